"""scale_loss: the backward begins with a loss scale from outside, instead of 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fxpipe.errors import TaskError, listed
from fxpipe.ir.program import Level, Program, value
from fxpipe.ir.transform import Pass
from fxpipe.passes.whole_loss import begins_of, read_instead, times, with_leaf
from fxpipe.plan.spec import LOSS_SCALE
from fxpipe.torch_private import rename


@dataclass(frozen=True)
class ScaleLoss(Pass):
    """Multiply the gradient that backward begins with by a leaf of the batch: a float32 scalar.

    Without it, small float16 gradients become zero, and large ones infinite. The user's batches do not have this leaf:
    worker 0 makes it for each microbatch. Forward, and so the reported loss, stays unchanged. Trained parameters that
    are themselves float16 are refused.

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
        begins = begins_of(program)
        shown = value(begins[0]).new_empty((), dtype=torch.float32)
        program, leaf = with_leaf(program, LOSS_SCALE, LOSS_SCALE, shown)
        for begin in begins:
            scaled = times(begin, leaf)
            rename(scaled, "d_scaled_loss")
            read_instead(begin, scaled)
        return program


def _check_parameters(program: Program) -> None:
    """Refuse what torch's GradScaler refuses, too: rounding would lose the step of such a parameter."""
    dtypes = {p.names[0]: program.values[p.node].dtype for p in program.parameters if p.trained}
    narrow = [name for name, dtype in dtypes.items() if dtype == torch.float16]
    if narrow:
        raise TaskError(
            f"--autocast fp16 trains parameters in float32, but these are float16: {listed(narrow, 5)}",
            hint="leave the model in float32 (no .half()): autocast converts the weights where it computes with them",
        )
