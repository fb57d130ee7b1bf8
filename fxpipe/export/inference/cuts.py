"""Which worker each call of the eval graph belongs to: the one that computes its like in training."""

from __future__ import annotations

import difflib
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from fxpipe.errors import ExportError
from fxpipe.export.inference.graph import Graph
from fxpipe.export.inference.nodes import is_size, module_of, operator_of
from fxpipe.ir.aten import is_getitem, is_view
from fxpipe.ir.program import info
from fxpipe.ir.transform import run_passes
from fxpipe.plan.spec import Plan
from fxpipe.task.batch import split
from fxpipe.tracing.capture import Loss, capture


@dataclass(frozen=True)
class Cuts:
    """Forward calls of the training graph in order.

    Attributes:
        keys: module and operator of each; '' for any operator.
        at: the worker of each.
    """

    workers: int
    keys: tuple[tuple[str, str], ...] = ()
    at: tuple[int, ...] = ()


def find_cuts(model: nn.Module, loss: Loss, batch: Any, plan: Plan | None) -> Cuts:
    """Where a plan cuts the forward.

    Raises:
        ExportError: it is not of this model.
    """
    if plan is None or plan.workers == 1:
        return Cuts(1)
    from fxpipe.passes.fold import Fold
    from fxpipe.passes.units import Units

    program = capture(model, loss, split(batch, plan.microbatches)[0], autocast=plan.autocast)
    program = run_passes(program, [Fold(), Units()])
    starts = [s.forward_units[0] for s in plan.stages]
    if program.units == plan.units:
        nodes = [n for n in program if info(n).phase == "F" and info(n).unit >= 0 and not is_view(n)]
        keys = tuple((info(n).module, operator_of(n)) for n in nodes)
        units = [info(n).unit for n in nodes]
    elif plan.device != program.device:  # made for another device, whose operators may differ
        keys = tuple((path, "") for path in plan.units)
        units = list(range(len(keys)))
    else:
        raise ExportError(
            "the build is not of this model: its training step has other units",
            hint="compile it again, or give the model file that it was compiled from",
        )
    return Cuts(plan.workers, keys, tuple(bisect_right(starts, unit) - 1 for unit in units))


def workers_of(graph: Graph, cuts: Cuts) -> dict[fx.Node, int]:
    """The worker of every call: never before those of its inputs."""
    if cuts.workers == 1:
        return dict.fromkeys(graph.calls, 0)
    found = _alike(graph, cuts)
    modules: dict[str, int] = {}
    for (module, _), worker in zip(cuts.keys, cuts.at, strict=True):
        modules.setdefault(module, worker)
    limits: list[int] = []  # the worker of the next call that has its like in training
    limit = cuts.workers - 1
    for node in reversed(graph.calls):
        limit = found.get(node, limit)
        limits.append(limit)
    made: dict[fx.Node, int] = {}
    last = 0
    for node, limit in zip(graph.calls, reversed(limits), strict=True):
        last = found.get(node, last)
        worker = found.get(node, min(max(modules.get(module_of(node), last), last), limit))
        if is_getitem(node):  # a tuple never crosses workers, its elements do
            worker = made[node.all_input_nodes[0]]
        made[node] = max([worker, *(made[n] for n in node.all_input_nodes if n in made and not is_size(n))])
    return made


def _alike(graph: Graph, cuts: Cuts) -> dict[fx.Node, int]:
    """The workers of the calls that have their like in training, in the same order."""
    calls = [n for n in graph.calls if not is_view(n) and not is_size(n)]
    any_operator = all(not operator for _, operator in cuts.keys)
    keys = [(module_of(n), "" if any_operator else operator_of(n)) for n in calls]
    found: dict[fx.Node, int] = {}
    for there, here, count in difflib.SequenceMatcher(None, cuts.keys, keys, autojunk=False).get_matching_blocks():
        found.update((calls[here + i], cuts.at[there + i]) for i in range(count))
    return found
