"""scale_loss: the backward begins with a loss scale that comes from outside, instead of with 1."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from fxpipe.passes.whole_loss import call, read_instead

from fxpipe.errors import TaskError, listed
from fxpipe.ir.program import BatchInput, Level, Program, info, value
from fxpipe.ir.transform import Pass
from fxpipe.plan.spec import LOSS_SCALE, LeafSpec
from fxpipe.task.batch import tensor_spec

aten = torch.ops.aten


@dataclass(frozen=True)
class ScaleLoss(Pass):
    """Multiply the gradient that backward begins with by a leaf of the batch: a float32 scalar.

    Gradients of float16 that are too small for it would be zero, those that are too large infinite. The leaf is in no
    batch of the user's: worker 0 makes it for each microbatch. Forward, and so the loss that is reported, stays as it
    was.

    Raises:
        TaskError: trained parameters are of float16 themselves.

    Before:                                     After:
        d_loss = ones([])                           d_loss = ones([])
        d_pow = mul(d_loss, …)                      d_mul = mul(d_loss, loss_scale)
                                                    d_pow = mul(d_mul, …)
    """

    name: ClassVar[str] = "scale_loss"
    requires: ClassVar[Level] = Level.FOLDED
    provides: ClassVar[Level] = Level.FOLDED

    def __call__(self, program: Program) -> Program:
        program = program.copy()
        _check_parameters(program)
        graph = program.graph
        with graph.inserting_after([n for n in graph.nodes if n.op == "placeholder"][-1]):
            leaf = graph.placeholder(LOSS_SCALE)
        begins = [n for n in program if info(n).phase == "B" and n.name == "d_loss"]
        leaf.meta["val"] = value(begins[0]).new_empty((), dtype=torch.float32)
        for begin in begins:
            with graph.inserting_before(begin.next):
                factor = leaf
                if value(begin).dtype != torch.float32:
                    factor = call(graph, aten._to_copy.default, (leaf,), {"dtype": value(begin).dtype}, begin)
                made = call(graph, aten.mul.Tensor, (begin, factor), {}, begin)
                made._rename("d_scaled_loss")
            read_instead(begin, made)
        real = torch.ones((), device=program.device)
        row = BatchInput(leaf.name, LeafSpec(LOSS_SCALE, tensor_spec(real)))
        return replace(program, batch=(*program.batch, row), example={**program.example, leaf.name: real})


def _check_parameters(program: Program) -> None:
    """Refuse what torch's GradScaler refuses, too: the step of such a parameter would be lost in its rounding."""
    dtypes = {p.names[0]: program.values[p.node].dtype for p in program.parameters if p.trained}
    narrow = [name for name, dtype in dtypes.items() if dtype == torch.float16]
    if narrow:
        raise TaskError(
            f"--autocast fp16 trains parameters in float32, and these are of float16: {listed(narrow, 5)}",
            hint="leave the model in float32 (no .half()): autocast converts the weights where it computes with them",
        )
