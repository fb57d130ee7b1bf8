"""Which worker computes each call of the eval graph: the one whose forward reads the same weights in training."""

from __future__ import annotations

from torch import fx

from fxpipe.errors import ExportError, listed
from fxpipe.export.inference.eval_graph import EvalGraph
from fxpipe.export.inference.nodes import is_size
from fxpipe.ir.aten import is_cheap, is_getitem
from fxpipe.plan.spec import Plan
from fxpipe.tracing.held_tensors import HeldTensors


def place_calls(graph: EvalGraph, plan: Plan | None) -> dict[fx.Node, int]:
    """The worker of every call that makes a tensor, not before the worker of any input; without a plan, 0 for all.

    A call that reads a parameter or a buffer goes to the worker whose forward reads it; if several do, to the first one
    not before the call's other inputs. A call that reads neither goes with the values that it reads; if it reads only
    the model's inputs, with the first call that uses it.
    """
    reads = {node: _forward_readers(plan, graph.names[node]) for node in graph.held}
    sources = sources_of(graph)
    calls = [node for node in graph.calls if not is_size(node) and node not in sources]
    at: dict[fx.Node, int] = {}
    for node in graph.calls:
        if node in sources:  # its weights are read by its readers
            reads[node] = sorted({worker for n in node.all_input_nodes for worker in reads.get(n, ())})
    for node in calls:
        arrive = [at[n] for n in node.all_input_nodes if n in at]
        least = max(arrive, default=0)
        readers = [reads[n] for n in node.all_input_nodes if reads.get(n)]
        weights = [min((worker for worker in workers if worker >= least), default=least) for workers in readers]
        if arrive or weights:
            at[node] = max([least, *weights])
    for node in reversed(calls):
        if node not in at:
            at[node] = min((at[user] for user in node.users if user in at), default=0)
    for node in calls:
        if is_getitem(node):  # a tuple never crosses workers, its elements do
            at[node] = at[node.all_input_nodes[0]]
    return at


def sources_of(graph: EvalGraph) -> set[fx.Node]:
    """What is cheap to make from weights, sizes or nothing: every stage that reads it computes it itself."""
    sources: set[fx.Node] = set()
    for node in graph.calls:
        makes_tensor = not is_size(node) and not isinstance(node.meta.get("val"), (tuple, list))
        from_sources = all(n in sources or n in graph.held or is_size(n) for n in node.all_input_nodes)
        if node.op == "get_attr" or (makes_tensor and from_sources and is_cheap(node)):
            sources.add(node)
    return sources


def check_plan(plan: Plan, held: HeldTensors) -> None:
    """Refuse a plan for another model."""
    names = [row[0] for row in held.names[: held.parameters]]
    shapes = {name: tuple(value.shape) for name, value in zip(names, held.values, strict=False)}
    planned = {row.name: tuple(row.tensor.shape) for row in plan.tensors if row in plan.parameters or row.name in names}
    if shapes != planned:
        other = sorted(name for name in shapes.keys() | planned.keys() if shapes.get(name) != planned.get(name))
        raise ExportError(
            f"the build is for another model: they differ in {listed(other, 8)}",
            hint="compile it again, or give the model file that it was compiled from",
        )


def _forward_readers(plan: Plan | None, name: str) -> list[int]:
    """The workers whose forward reads a parameter or buffer, in order."""
    stages = plan.stages if plan else ()
    return [k for k, stage in enumerate(stages) if name in (*stage.forward.weights, *stage.forward.buffers)]
