"""Finds the runs of calls that a stage repeats, such as the blocks of a transformer, from its graphs alone.

Two runs are equal if their operators, the types of all values and the connections are the same; weights, buffers, other
inputs and numbers may differ. The candidates come from a suffix automaton of the sequence of calls (Blumer et al., "The
smallest automaton recognizing the subwords of a text", 1985): linear in the calls.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

import torch
from torch import fx

from fxpipe.ir import wire
from fxpipe.ir.aten import is_getitem
from fxpipe.ir.program import ONE_DRAW, info, value

LINES_OF_CALL, LINES_OF_FUNCTION_CALL, LINES_OF_TEAR = 1.6, 4, 25
"""What a call takes in the text of a stage, with its part of the comments and `del`s; what a call of a function takes;
and how many lines more a run may take that is one whole module."""


@dataclass(frozen=True)
class Run:
    """Calls that are equal to those of other runs.

    Attributes:
        nodes: the calls, in order.
        inputs: the values from outside, in the order in which the calls read them first.
        results: the values that are read outside.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]


def repeats(graphs: Sequence[fx.Graph], kinds: Mapping[fx.Node, str], least: int, saves: int) -> Iterator[list[Run]]:
    """Groups of equal runs, those that save most first; no call is in two runs.

    Args:
        kinds: of placeholders that are not plain values, such as weights.
        least: the calls of a run, at least.
        saves: how many lines of text a group saves, at least.
    """
    calls = _LabelledCalls(graphs, kinds)
    left: list[int | None] = list(calls.sequence)
    while (best := _best(calls, left, least, saves)) is not None:
        length, starts = best
        yield [calls.run(i, length) for i in starts]
        covered = {i for start in starts for i in range(start, start + length)}
        left = [None if i in covered else i for i in left]
        left = [i for place, i in enumerate(left) if i is not None or (place and left[place - 1] is not None)]


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """What a call reads, in the order of its arguments, some perhaps twice."""
    read: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), read.append)
    return read


def numbers_of(node: fx.Node) -> list[tuple[int | str, float]]:
    """The numbers that are arguments of a call by themselves, with their places. Runs that differ in them are equal."""
    if is_getitem(node):
        return []
    places = [*enumerate(node.args), *node.kwargs.items()]
    return [(place, number) for place, number in places if type(number) in (int, float)]  # type: ignore[misc]


def shared_path(nodes: Sequence[fx.Node]) -> list[str]:
    """The path of the module that contains all calls, as far as they are in modules; empty if none does."""
    return shared_start([info(node).module.split(".") for node in nodes if info(node).module])


def shared_start(paths: Sequence[Sequence[str]]) -> list[str]:
    """With what all begin."""
    columns = takewhile(lambda column: len(set(column)) == 1, zip(*paths, strict=False))
    return [column[0] for column in columns]


class _LabelledCalls:
    """The calls of several graphs as one sequence, with a label for each: equal runs have equal labels."""

    def __init__(self, graphs: Sequence[fx.Graph], kinds: Mapping[fx.Node, str]) -> None:
        self.kinds = kinds
        self.nodes: list[fx.Node] = []
        self.sequence: list[int | None] = []
        self._types: dict[fx.Node, Any] = {}
        numbers: dict[Any, int] = {}
        self.labels: list[int] = []
        for graph in graphs:
            for node in graph.nodes:
                if node.op != "call_function":
                    continue
                self.sequence.append(None if _stays(node) else len(self.nodes))
                self.nodes.append(node)
                self.labels.append(numbers.setdefault(self._label(node), len(numbers)))
            self.sequence.append(None)
        self.index = {node: i for i, node in enumerate(self.nodes)}
        self.inputs = [inputs_of(node) for node in self.nodes]

    def _label(self, node: fx.Node) -> Any:
        numbers = dict(numbers_of(node))

        def described(argument: Any) -> Any:
            return (self.kinds.get(argument, ""), self._type(argument)) if isinstance(argument, fx.Node) else argument

        arguments = [
            (place, type(argument) if place in numbers else repr(fx.node.map_aggregate(argument, described)))
            for place, argument in [*enumerate(node.args), *node.kwargs.items()]
        ]
        return node.target, tuple(arguments), self._type(node)

    def _type(self, node: fx.Node) -> Any:
        if node not in self._types:
            self._types[node] = repr(_type_of(value(node)))
        return self._types[node]

    def form(self, start: int, length: int) -> tuple[Any, list[fx.Node], list[int]]:
        """How the calls of a run are connected, what they read from outside, and which of them are read outside."""
        places: dict[fx.Node, int] = {}
        form: list[Any] = []
        for i in range(start, start + length):
            for read in self.inputs[i]:
                at = self.index.get(read, -1)
                form.append(at - start if start <= at else ~places.setdefault(read, len(places)))
            form.append(None)
        results = [
            i - start
            for i in range(start, start + length)
            if any(not start <= self.index.get(user, -1) < start + length for user in self.nodes[i].users)
        ]
        return (tuple(form), tuple(results)), list(places), results

    def run(self, start: int, length: int) -> Run:
        _, inputs, results = self.form(start, length)
        nodes = self.nodes[start : start + length]
        return Run(tuple(nodes), tuple(inputs), tuple(nodes[i] for i in results))

    def torn(self, start: int, length: int) -> int:
        """How many ends of a run are within a module that it has calls of, which reads worse than a whole module."""
        common = shared_path(self.nodes[start : start + length])
        beyond = [self.nodes[i] for i in (start - 1, start + length) if 0 <= i < len(self.nodes)]
        return sum(info(node).module.split(".")[: len(common)] == common for node in beyond)


def _stays(node: fx.Node) -> bool:
    """Whether a call is part of no run: it has a name that others know."""
    ends = (wire.is_send, wire.is_recv, wire.is_pack, wire.is_unpack, wire.is_reduce)
    return ONE_DRAW in node.meta or any(is_end(node) for is_end in ends)


def _type_of(example: Any) -> Any:
    if isinstance(example, torch.Tensor):
        stride = example.stride() if example.layout == torch.strided else None
        return tuple(example.shape), stride, example.dtype, example.device
    return tuple(map(_type_of, example)) if isinstance(example, (tuple, list)) else type(example)


def _best(calls: _LabelledCalls, left: Sequence[int | None], least: int, saves: int) -> tuple[int, list[int]] | None:
    """The length and the starts of the equal runs that save most; None if none save enough."""
    candidates = sorted(_candidates(calls, left, least), key=lambda row: (_lines(row[0], row[1]), -row[1][0]))
    heap: list[tuple[float, int, bool, int, list[int]]] = []

    def put(length: int, starts: list[int], proved: bool) -> None:
        saved = _lines(length, starts) - len(calls.form(starts[0], length)[1])
        if saved >= saves:
            worth = saved - LINES_OF_TEAR * calls.torn(starts[len(starts) // 2], length)
            heapq.heappush(heap, (-worth, starts[0], proved, length, starts))

    while heap or candidates:
        while candidates and (not heap or _lines(*candidates[-1]) > -heap[0][0]):
            put(*candidates.pop(), proved=False)
        if not heap:
            break
        *_, proved, length, starts = heapq.heappop(heap)
        if proved:
            return length, starts
        forms = [calls.form(start, length)[0] for start in starts]
        (common, count), *_ = Counter(forms).most_common(1)
        if count > 1:
            put(length, [start for start, form in zip(starts, forms, strict=True) if form == common], True)
    return None


def _lines(length: int, starts: Sequence[int]) -> float:
    """The lines that runs save as calls of a function, but for what it is given."""
    return LINES_OF_CALL * length * (len(starts) - 1) - LINES_OF_FUNCTION_CALL * len(starts)


def _candidates(calls: _LabelledCalls, left: Sequence[int | None], least: int) -> Iterator[tuple[int, list[int]]]:
    """Lengths and starts of runs with equal labels that do not overlap."""
    labels = [~place if i is None else calls.labels[i] for place, i in enumerate(left)]
    for shortest, longest, ends in _substrings(labels):
        if longest < least:
            continue
        gap = min(after - before for before, after in pairwise(ends))
        for length in {longest, min(longest, gap)}:  # where a run repeats at once, its longer ones overlap
            if length <= shortest or length < least:
                continue
            starts, free = [], 0
            for end in ends:
                if end + 1 - length >= free:
                    starts.append(left[end + 1 - length])
                    free = end + 1
            if len(starts) > 1:
                yield length, starts  # type: ignore[misc]


def _substrings(labels: Sequence[int]) -> Iterator[tuple[int, int, list[int]]]:
    """What occurs more than once, longest first: of lengths above the first number, up to the second, with its ends."""
    after: list[dict[int, int]] = [{}]
    link, length, ends = [-1], [0], [[]]  # type: tuple[list[int], list[int], list[list[int]]]
    last = 0
    for place, label in enumerate(labels):
        state, at = len(after), last
        after.append({})
        link.append(0)
        length.append(length[last] + 1)
        ends.append([place])
        while at != -1 and label not in after[at]:
            after[at][label] = state
            at = link[at]
        if at != -1:
            target = after[at][label]
            if length[at] + 1 != length[target]:
                clone = len(after)
                after.append(dict(after[target]))
                link.append(link[target])
                length.append(length[at] + 1)
                ends.append([])
                while at != -1 and after[at].get(label) == target:
                    after[at][label] = clone
                    at = link[at]
                link[target] = clone
                target = clone
            link[state] = target
        last = state
    for state in sorted(range(1, len(after)), key=lambda s: -length[s]):
        places, above = sorted(ends[state]), link[state]
        if len(places) > 1:
            yield length[above], length[state], places
        ends[above] += places
        ends[state] = []
