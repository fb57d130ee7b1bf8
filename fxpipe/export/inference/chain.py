"""The stages of the chain: which worker computes each call, what a stage reads, returns, and only passes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import fx

from fxpipe.errors import ExportError, listed
from fxpipe.export.inference.call import distinct
from fxpipe.export.inference.eval_graph import EvalGraph, is_size, module_of
from fxpipe.ir.aten import is_cheap, is_getitem
from fxpipe.plan.plan import Plan
from fxpipe.torch_private import operator_name
from fxpipe.tracing.held_tensors import HeldTensors

PortKind = Literal["input", "activation", "passed", "output"]


@dataclass(frozen=True)
class Port:
    """An input or output of a stage.

    Kinds: `input` or `output` of the model, `activation` (made by this stage or by the one before), and `passed` (only
    passed on, by this stage or by the one before). An open dimension is the text `batch`.
    """

    name: str
    kind: PortKind
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class ChainStage:
    """One stage of the chain."""

    worker: int
    count: int  # how many stages the chain has
    # arrives, leaves: nodes of the values that come in and go out, and what each means to the user
    arrives: tuple[fx.Node, ...]
    leaves: tuple[fx.Node, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    calls: tuple[fx.Node, ...]  # the nodes that it computes, in order
    # arithmetic on sizes of other stages' values: the value and dimension to read it from instead
    sizes: Mapping[fx.Node, tuple[fx.Node, int]]


def make_chain(graph: EvalGraph, at: Mapping[fx.Node, int], count: int) -> list[ChainStage]:
    """The stages, from the last one back: what a stage needs and does not make, the previous stage must return.

    `at` is the worker of every call, never before the workers of its inputs.
    """
    sources = sources_of(graph)
    order = {node: i for i, node in enumerate([*graph.inputs, *graph.calls])}
    ports = _Ports(graph, at, count)
    chain: list[ChainStage] = []
    leaves = tuple(node for _, node in graph.outputs)
    for k in reversed(range(count)):
        arrives: set[fx.Node] = set()
        local: set[fx.Node] = set()
        sizes: set[fx.Node] = set()
        stack = [*leaves, *(n for n in graph.calls if at.get(n) == k)]
        while stack:
            node = stack.pop()
            if node in local or node in arrives or node in graph.held:
                continue
            if is_size(node):
                sizes.add(node)
            elif node in sources or at.get(node, -1) == k:
                local.add(node)
                stack += node.all_input_nodes
            else:
                arrives.add(node)
        substitutes = _resolve(sizes, local, arrives, graph)
        if k == 0:
            arrives |= set(graph.inputs)
        ordered = tuple(sorted(arrives, key=order.__getitem__))
        calls = tuple(n for n in graph.calls if n in local or (n in sizes and n not in substitutes))
        sides = ports.at(k, ordered), ports.at(k + 1, leaves)
        chain.append(ChainStage(k, count, ordered, leaves, *sides, calls, substitutes))
        leaves = ordered
    return chain[::-1]


def _resolve(
    sizes: set[fx.Node], local: set[fx.Node], arrives: set[fx.Node], graph: EvalGraph
) -> dict[fx.Node, tuple[fx.Node, int]]:
    """For every size that a stage reads, a separate tensor to read it from; adds to `sizes` and `arrives`."""
    substitutes: dict[fx.Node, tuple[fx.Node, int]] = {}
    stack = sorted(sizes, key=lambda n: n.name)
    sizes.clear()
    while stack:
        node = stack.pop()
        if node in sizes:
            continue
        sizes.add(node)
        tensors = [n for n in node.all_input_nodes if not is_size(n)]
        if not tensors:
            stack += node.all_input_nodes
            continue
        if all(n in local or n in graph.held or n in arrives for n in tensors):
            continue
        text = str(node.meta["val"])
        choices = [*sorted(arrives, key=lambda n: n.name), *graph.inputs]
        place = next(((n, i) for n in choices for i, d in enumerate(n.meta["val"].shape) if str(d) == text), None)
        if place is None:
            arrives.update(n for n in tensors if n not in local)
        else:
            substitutes[node] = place
            arrives.add(place[0])
    return substitutes


class _Ports:
    """The names of the values at each boundary; boundary k is before stage k."""

    def __init__(self, graph: EvalGraph, at: Mapping[fx.Node, int], workers: int) -> None:
        self.graph = graph
        self.made_at = at
        self.workers = workers
        crossing = [n for n in graph.calls if not is_size(n)]
        taken = [*graph.names.values(), *(name for name, _ in graph.outputs)]
        self.names = dict(zip(crossing, distinct([_value_name(n) for n in crossing], taken), strict=True))
        self.names |= {n: graph.names[n] for n in graph.inputs}

    def at(self, boundary: int, nodes: tuple[fx.Node, ...]) -> tuple[Port, ...]:
        return tuple(self._port(boundary, i, node) for i, node in enumerate(nodes))

    def _port(self, boundary: int, i: int, node: fx.Node) -> Port:
        kind: PortKind
        if boundary == self.workers:
            name, kind = self.graph.outputs[i][0], "output"
        elif boundary == 0:
            name, kind = self.names[node], "input"
        else:
            passed = boundary - 1 - self.made_at.get(node, -1)
            name = self.names[node] + (f".{passed}" if passed else "")
            kind = "passed" if passed else "activation"
        return Port(name, kind, str(node.meta["val"].dtype).removeprefix("torch."), self.graph.shape(node))


def _value_name(node: fx.Node) -> str:
    """`blocks.2/add`: the name of a value that crosses workers."""
    path = module_of(node)
    return (f"{path}/" if path else "") + operator_name(node.target, node.name)


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
