"""join_metrics: the loss and its metrics become one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from fxpipe.ir.program import Level, Output, Program, info, value
from fxpipe.ir.transform import Pass
from fxpipe.passes.whole_loss import call
from fxpipe.plan.spec import LOSS_WEIGHT
from fxpipe.torch_private import rename

aten = torch.ops.aten


@dataclass(frozen=True)
class JoinMetrics(Pass):
    """Let the step's metrics go with the loss: out of forward, over the microbatches, and to worker 0.

    A program without metrics stays unchanged. No gradient goes through the new calls: backward begins with a constant.

    Over the microbatches a metric is the mean, weighted like the loss: a leaf `loss_weight` of the batch multiplies
    both. A metric known to be a sum over the samples (`Program.summed_metrics`) is summed.

    Before:                       After:
        return loss, d_w, acc         loss_and_metrics = stack([loss, acc])
                                      return loss_and_metrics, d_w
    """

    name: ClassVar[str] = "join_metrics"
    requires: ClassVar[Level] = Level.FOLDED
    provides: ClassVar[Level] = Level.FOLDED

    microbatches: int = 1

    def __call__(self, program: Program) -> Program:
        program = program.copy()
        loss, metrics = program.loss_node, program.metrics()
        if loss is None or not metrics:
            return program
        graph = program.graph
        backward = next((n for n in program if info(n).phase == "B"), graph.output_node())
        with graph.inserting_before(backward):
            one = loss
            if value(loss).dtype != torch.float32:
                one = _forward(graph, aten._to_copy.default, (loss,), loss, dtype=torch.float32)
            leaves = {b.leaf.name: b.node for b in program.batch}
            weight = program.placeholders.get(leaves.get(LOSS_WEIGHT) or "")
            values = []
            for name, metric in metrics.items():
                if weight is not None:
                    metric = _forward(graph, aten.mul.Tensor, (metric, weight), metric)
                share = self.microbatches if name in program.summed_metrics else 1
                if program.loss_of_microbatches == "mean" and share != 1:
                    metric = _forward(graph, aten.mul.Scalar, (metric, share), metric)
                elif program.loss_of_microbatches == "sum" and share != self.microbatches:
                    metric = _forward(graph, aten.div.Scalar, (metric, self.microbatches), metric)
                values.append(metric)
            joined = _forward(graph, aten.stack.default, ([one, *values],), loss)
        rename(joined, "loss_and_metrics")
        pairs = [(n, o) for n, o in zip(program.output_nodes, program.outputs, strict=True) if o.kind != "metric"]
        nodes = tuple(joined if o.kind == "loss" else n for n, o in pairs)
        graph.output_node().args = (nodes,)
        graph.output_node().meta["val"] = tuple(value(n) for n in nodes)
        outputs: Sequence[Output] = [o for _, o in pairs]
        return replace(program, outputs=tuple(outputs), loss_metrics=tuple(metrics))


def _forward(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node, **kwargs: Any) -> fx.Node:
    """A forward call of the loss's own module that has no backward."""
    node = call(graph, target, args, kwargs, like)
    info(node).phase = "F"
    node.meta["seq_nr"] = None
    return node
