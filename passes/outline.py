"""outline: what a stage computes several times, such as its blocks, becomes one function of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from fxpipe.ir.aten import is_getitem
from fxpipe.ir.program import ONE_DRAW, Level, Program, info, inputs_of, value
from fxpipe.ir.repeats import LabelledCall, repeats, shared_start
from fxpipe.ir.stage import Function, FunctionCall, Part, Stage
from fxpipe.ir.transform import Pass
from fxpipe.ir.wire import free_name, is_pack, is_recv, is_reduce, is_send, is_unpack
from fxpipe.torch_private import OpOverload, schema_of

LEAST_CALLS, LEAST_LINES = 8, 12
"""How many calls a function has at least, and how many lines of text it saves."""
_KINDS = ("weights", "buffers", "values")


@dataclass(frozen=True)
class Outline(Pass):
    """Find calls that repeat up to weights, buffers, values and numbers; the graphs of the parts stay unchanged.

    Runs are found from the graph; module paths only name them, and decide between runs that begin at other calls of the
    same blocks. Small repeats stay where they are. Values that die in a function are dropped there, so memory is that
    of the calls in a row.

    Before:  y = mm(x, w1); z = relu(y)      After:  z = blocks_forward(weights[:1], [x])  # blocks.0
             v = mm(z, w2); u = relu(v)              u = blocks_forward(weights[1:], [z])  # blocks.1
    """

    name: ClassVar[str] = "outline"
    requires: ClassVar[Level] = Level.SPLIT
    provides: ClassVar[Level] = Level.SPLIT

    def __call__(self, program: Program) -> Program:
        return replace(program, stages=tuple(self._outlined(stage) for stage in program.stages))

    def _outlined(self, stage: Stage) -> Stage:
        parts = tuple(stage.parts.values())
        kinds = {node: kind for part in parts for node, kind in _kinds(part).items()}
        part_of = {node: i for i, part in enumerate(parts) for node in part.graph.nodes}
        order = {node: i for i, node in enumerate(part_of)}
        calls: list[list[FunctionCall]] = [[] for _ in parts]
        taken: set[str] = {part.function for part in parts}
        groups = _repeats([part.graph for part in parts], kinds)
        groups.sort(key=lambda runs: order[runs[0].nodes[0]])
        within = {node: run.nodes[0] for runs in groups for run in runs for node in run.nodes}
        for runs in groups:
            function = parts[part_of[runs[0].nodes[0]]].function
            for call in _Outlined(runs, function, kinds, order, within, taken).calls:
                calls[part_of[call.nodes[0]]].append(call)
        outlined = {
            phase: replace(part, outlined=tuple(sorted(some, key=lambda call: order[call.nodes[0]])))
            for (phase, part), some in zip(stage.parts.items(), calls, strict=True)
        }
        return replace(stage, parts=outlined)


@dataclass(frozen=True)
class _Run:
    """Calls of a part that are equal to others; their inputs and results."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]

    @property
    def module(self) -> str:
        """The module that contains the whole run; '' if none does."""
        return ".".join(shared_start(self._paths()))

    @property
    def span(self) -> str:
        """From which of that module's own modules to which: `layers.3 into layers.4`."""
        paths, depth = self._paths(), len(shared_start(self._paths())) + 1
        ends = dict.fromkeys(".".join(path[:depth]) for path in (paths[0], paths[-1])) if paths else ()
        return " into ".join(ends)

    def _paths(self) -> list[list[str]]:
        return [info(node).module.split(".") for node in self.nodes if info(node).module]


def _repeats(graphs: Sequence[fx.Graph], kinds: Mapping[fx.Node, str]) -> list[list[_Run]]:
    """Groups of equal runs of all graphs."""
    nodes: list[fx.Node] = []
    calls: list[LabelledCall] = []
    ends: set[fx.Node] = set()
    types: dict[fx.Node, str] = {}
    for graph in graphs:
        for node in graph.nodes:
            if node.op == "call_function":
                module = tuple(info(node).module.split(".")) if info(node).module else ()
                calls.append(LabelledCall(_label(node, kinds, types), tuple(inputs_of(node)), (node,), module))
                nodes.append(node)
        ends.update(inputs_of(graph.output_node()))
        calls.append(LabelledCall(None))  # no run goes on from one part to the next
        nodes.append(graph.output_node())
    return [
        [_Run(tuple(nodes[r.start : r.start + r.length]), r.inputs, r.results) for r in runs]
        for runs in repeats(calls, ends, LEAST_CALLS, LEAST_LINES)
    ]


def _label(node: fx.Node, kinds: Mapping[fx.Node, str], types: dict[fx.Node, str]) -> Any:
    """The operator, the kinds and types of what it reads, its constants, and what it makes; None if it has a name that
    others know. Runs that differ in numbers are equal."""
    if ONE_DRAW in node.meta or any(is_end(node) for is_end in (is_send, is_recv, is_pack, is_unpack, is_reduce)):
        return None
    numbers = dict(_numbers(node))

    def type_of(read: fx.Node) -> str:
        if read not in types:
            types[read] = f"{kinds.get(read, '')} {_type(value(read))}"
        return types[read]

    def described(argument: Any) -> Any:
        return type_of(argument) if isinstance(argument, fx.Node) else argument

    arguments = [
        (place, type(argument) if place in numbers else repr(fx.node.map_aggregate(argument, described)))
        for place, argument in [*enumerate(node.args), *node.kwargs.items()]
    ]
    return node.target, tuple(arguments), type_of(node)


def _type(example: Any) -> Any:
    if isinstance(example, torch.Tensor):
        stride = example.stride() if example.layout == torch.strided else None
        return tuple(example.shape), stride, example.dtype, example.device
    return tuple(map(_type, example)) if isinstance(example, (tuple, list)) else type(example)


def _numbers(node: fx.Node) -> list[tuple[int | str, float]]:
    """The numbers that are arguments of a call by themselves, with their places."""
    if is_getitem(node):
        return []
    places = [*enumerate(node.args), *node.kwargs.items()]
    return [(place, number) for place, number in places if type(number) in (int, float)]  # type: ignore[misc]


def _kinds(part: Part) -> dict[fx.Node, str]:
    """Which of its placeholders are weights and buffers."""
    holders = (node for node in part.graph.nodes if node.op == "placeholder")
    kinds = ["weights"] * len(part.spec.weights) + ["buffers"] * len(part.spec.buffers)
    return dict(zip(holders, kinds, strict=False))


class _Outlined:
    """Equal runs as calls of one function."""

    def __init__(
        self,
        runs: Sequence[_Run],
        function: str,
        kinds: Mapping[fx.Node, str],
        order: Mapping[fx.Node, int],
        within: Mapping[fx.Node, fx.Node],
        taken: set[str],
    ) -> None:
        self._kinds = kinds
        first = runs[0]
        inputs = sorted(range(len(first.inputs)), key=lambda i: (self._kind(first.inputs[i]), order[first.inputs[i]]))
        numbers = _differing(runs)
        results = _results(first, within)
        modules = [run.module for run in runs]
        serves = modules if len(set(modules)) == len(modules) else [run.span for run in runs]
        name = free_name(f"{_last_name(modules)}_{function}", taken)
        counts = [sum(self._kind(node) == kind for node in first.inputs) for kind in range(3)]
        graph = _graph(first, [first.inputs[i] for i in inputs], numbers, results, modules[0])
        outlined = Function(name, modules[0], tuple(serves), graph, *counts)
        self.calls = [
            FunctionCall(
                outlined,
                module,
                run.nodes,
                (*(run.inputs[i] for i in inputs), *(column[i] for column in numbers)),
                tuple(run.nodes[i] for i in results),
            )
            for i, (run, module) in enumerate(zip(runs, serves, strict=True))
        ]

    def _kind(self, node: fx.Node) -> int:
        return _KINDS.index(self._kinds.get(node, "values"))


def _differing(runs: Sequence[_Run]) -> dict[tuple[float, ...], list[tuple[int, int | str]]]:
    """The numbers in which the runs differ: for each run one, and where in a run it is used."""
    columns: dict[tuple[float, ...], list[tuple[int, int | str]]] = {}
    for i, nodes in enumerate(zip(*(run.nodes for run in runs), strict=True)):
        for rows in zip(*map(_numbers, nodes), strict=True):
            column = tuple(number for _, number in rows)
            if len({repr(number) for number in column}) > 1:
                columns.setdefault(column, []).append((i, rows[0][0]))
    return columns


def _results(run: _Run, within: Mapping[fx.Node, fx.Node]) -> list[int]:
    """The places of the results in a run: last those of which most are read by one place, in its order."""
    inside, results = set(run.nodes), set(run.results)
    readers = {
        i: tuple({within.get(user, user): None for user in node.users if user not in inside})
        for i, node in enumerate(run.nodes)
        if node in results
    }
    sizes = Counter(readers.values())
    at_end = {node: i for some in set(readers.values()) for user in some for i, node in enumerate(inputs_of(user))}

    def key(i: int) -> tuple[int, int]:
        (reader, *more) = readers[i]
        size = 0 if more else sizes[readers[i]]
        return size, at_end[run.nodes[i]] if size and reader.op == "output" else i

    return sorted(readers, key=key)


def _last_name(modules: Iterable[str]) -> str:
    """A name for what the modules have in common: `blocks` for blocks.0 and blocks.1."""
    paths = [[name for name in module.split(".") if name.isidentifier()] for module in modules]
    shared = shared_start([path[::-1] for path in paths]) or shared_start(paths)[::-1]
    return shared[0] if shared else "repeated"


def _graph(
    run: _Run,
    inputs: Sequence[fx.Node],
    numbers: Mapping[tuple[float, ...], Sequence[tuple[int, int | str]]],
    results: Sequence[int],
    module: str,
) -> fx.Graph:
    """The graph of the function, with the run's names without the module's."""
    graph, taken = fx.Graph(), set[str]()
    mapped: dict[fx.Node, fx.Node] = {}

    def holder(name: str, meta: Mapping[str, Any]) -> fx.Node:
        name = free_name(name, taken)
        node = graph.create_node("placeholder", name, (), {}, name=name)
        node.meta = dict(meta)
        return node

    for node in inputs:
        mapped[node] = holder(_short(node, module, outside=True), node.meta)
    number_at: dict[tuple[int, int | str], fx.Node] = {}
    for column, places in numbers.items():
        number = holder(_argument_name(run.nodes[places[0][0]], places[0][1]), {"val": column[0]})
        number_at |= dict.fromkeys(places, number)
    for i, node in enumerate(run.nodes):
        name = free_name(_short(node, module), taken)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), mapped.__getitem__)
        args = tuple(number_at.get((i, place), argument) for place, argument in enumerate(args))
        kwargs = {place: number_at.get((i, place), argument) for place, argument in kwargs.items()}
        mapped[node] = graph.create_node("call_function", node.target, args, kwargs, name=name)
        mapped[node].meta = dict(node.meta)
    graph.output(tuple(mapped[run.nodes[i]] for i in results))
    return graph


def _short(node: fx.Node, module: str, outside: bool = False) -> str:
    """The name of a node without its module's: `d_norm1_getitem`; of a value from outside `x`."""
    sign = "d_" if node.name.startswith("d_") else ""
    prefix, name = re.sub(r"\W", "_", module) + "_" if module else "", node.name.removeprefix(sign)
    if prefix and name.startswith(prefix) and name.removeprefix(prefix).isidentifier():
        return sign + name.removeprefix(prefix)
    return f"{sign}x" if outside else sign + re.sub(r"_\d+$", "", name)


def _argument_name(node: fx.Node, place: int | str) -> str:
    """The name of an operator's argument."""
    if isinstance(place, str):
        return place
    target = node.target
    return str(schema_of(target).arguments[place].name) if isinstance(target, OpOverload) else "number"
