"""place_evaluation: every worker computes the part of an evaluation that its own weights are for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, NamedTuple

import numpy as np
from fxpipe.passes.analysis.sources import sources_of
from fxpipe.passes.cut import Cut
from torch import fx

from fxpipe.ir.program import Buffer, Level, Parameter, Program, info, size_of, value
from fxpipe.ir.transform import Pass
from fxpipe.planner.cuts import Cuts

_NEVER = 2**60


@dataclass(frozen=True)
class PlaceEvaluation(Pass):
    """Give the units of an evaluation, in order, to the workers that hold the weights they read.

    Fields:
        workers: how many there are.
        owners: the worker that holds a parameter or an updated buffer, by its first name; others are everywhere.

    The placement moves the least: first in bytes of weights and buffers that a worker reads and another one holds, then
    in bytes of values that cross. If both are equal, a unit stays with the worker of the unit before.

    Before:                                      After (head.weight is embed.weight, which worker 0 owns):
        x = embedding(embed_weight, ids)  # u0       x = embedding(embed_weight, ids)  # w0
        y = mm(x, hidden_weight)  # u1               y = mm(x, hidden_weight)  # w1
        z = mm(y, embed_weight_t)  # u2              z = mm(y, embed_weight_t)  # w1: embed_weight is sent
    """

    name: ClassVar[str] = "place_evaluation"
    requires: ClassVar[Level] = Level.COSTED
    provides: ClassVar[Level] = Level.PLACED

    workers: int
    owners: Mapping[str, int]

    def __call__(self, program: Program) -> Program:
        positions = cheapest(self.workers, len(program.units), held_of(program, self.owners), values_of(program))
        return Cut(Cuts(positions, positions))(program)


class Held(NamedTuple):
    """A tensor that one worker holds, and the units that read it, in order."""

    bytes: int
    owner: int
    readers: tuple[int, ...]


class Passed(NamedTuple):
    """A value, the unit that makes it (-1: it is of the batch, on worker 0), and the later units that read it."""

    bytes: int
    unit: int
    readers: tuple[int, ...]


def held_of(program: Program, owners: Mapping[str, int]) -> list[Held]:
    """The parameters and buffers that only one worker holds."""
    placeholders, sources = program.placeholders, sources_of(program).cheap
    found = []
    rows: tuple[Parameter | Buffer, ...] = (*program.parameters, *program.buffers)
    for row in rows:
        node = placeholders[row.node]
        if row.names[0] in owners:
            found.append(Held(size_of(value(node)), owners[row.names[0]], _readers(node, sources)))
    return [held for held in found if held.readers]


def values_of(program: Program) -> list[Passed]:
    """What units pass to later ones, and the batch. What every worker can make from what it has does not count."""
    sources = sources_of(program).cheap
    inputs = {b.node for b in program.batch if b.node}
    found = [
        Passed(size_of(value(n)), -1, _readers(n, sources)) for n in program.placeholders.values() if n.name in inputs
    ]
    for node in program:
        if node not in sources:
            unit = info(node).unit
            later = tuple(u for u in _readers(node, sources) if u > unit)
            found.append(Passed(size_of(value(node)), unit, later))
    return [passed for passed in found if passed.readers]


def _readers(node: fx.Node, sources: Set[fx.Node]) -> tuple[int, ...]:
    """The units that read a value, or what is made of it where it is read."""
    units: set[int] = set()
    seen: set[fx.Node] = set()
    stack = [n for n in node.users if n.op == "call_function"]
    while stack:
        user = stack.pop()
        if user in seen:
            continue
        seen.add(user)
        later = [n for n in user.users if n.op == "call_function"] if user in sources else []
        if later:
            stack += later
        else:
            units.add(info(user).unit)
    return tuple(sorted(units))


def cheapest(workers: int, units: int, held: Sequence[Held], values: Sequence[Passed]) -> tuple[int, ...]:
    """The cuts of least cost: worker k computes units [cuts[k], cuts[k + 1]).

    Exact, by dynamic programming over (worker, unit) for the pair of bytes of held tensors and bytes of values. What a
    worker receives depends only on where it begins and ends, and grows with its end: a reader counts for all beginnings
    after the reader (or the maker) before it. Takes workers x units^2 steps at worst; beginnings that already cost more
    than some placement does are dropped, so that few are usually left.
    """
    return _Search(workers, units, held, values, _bound(workers, held)).cuts()


def _bound(workers: int, held: Sequence[Held]) -> int:
    """Bytes of held tensors that move if there are cuts only where owners change; exact if nothing is tied."""
    owners: dict[int, int] = {}
    for tensor in sorted(held, key=lambda t: t.bytes):
        owners.update(dict.fromkeys(tensor.readers, tensor.owner))  # the largest of a unit decides
    anchors = sorted(owners)
    starts = [0] + [b for a, b in pairwise(anchors) if owners[a] != owners[b]]
    if len(starts) > 4 * workers:
        return _NEVER
    groups = [
        Held(t.bytes, t.owner, tuple(sorted({bisect_right(starts, unit) - 1 for unit in t.readers}))) for t in held
    ]
    return _Search(workers, len(starts), groups, (), _NEVER).moved()


class _Search:
    """The tables of the dynamic programming, filled.

    Attributes:
        begin: by worker and beginning, the bytes of held tensors that it has to get, up to the current end.
        cross: by beginning, the bytes of values; the same for every worker but the first, which gets none.
        held, values: by number of workers and end, the least cost of all units before it.
        origin: where the last of those workers begins.
    """

    def __init__(self, workers: int, units: int, held: Sequence[Held], values: Sequence[Passed], bound: int) -> None:
        shape = (workers + 1, units + 1)
        self.workers, self.units, self.bound = workers, units, bound
        self.begin = np.zeros((workers, units + 1), np.int64)
        self.cross = np.zeros(units + 1, np.int64)
        self.held, self.values = np.full(shape, _NEVER, np.int64), np.full(shape, _NEVER, np.int64)
        self.origin = np.zeros(shape, np.int64)
        self.low = 0  # earlier beginnings cost more than the bound, whoever begins there
        self.held[:, 0] = self.values[:, 0] = 0
        reads, passes = _spans(units, held), _spans(units, values)
        for end in range(1, units + 1):
            for index, first in reads[end - 1]:
                span = slice(max(first, self.low), end)
                self.begin[:, span] += held[index].bytes
                self.begin[held[index].owner, span] -= held[index].bytes
            for index, first in passes[end - 1]:
                self.cross[max(first, self.low) : end] += values[index].bytes
            self._extend(end)

    def cuts(self) -> tuple[int, ...]:
        found = [self.units]
        for k in range(self.workers, 0, -1):
            found.append(int(self.origin[k, found[-1]]))
        return tuple(reversed(found))

    def moved(self) -> int:
        return int(self.held[self.workers, self.units])

    def _extend(self, end: int) -> None:
        """Fill the column of `end`: the best of all beginnings, the latest among equals."""
        span = slice(self.low, end)
        moved = self.held[:-1, span] + self.begin[:, span]
        passed = self.values[:-1, span] + self.cross[span]
        if self.low == 0:
            passed[0, 0] = 0
        least = moved.min(axis=1)
        passed = np.where(moved == least[:, None], passed, 4 * _NEVER)
        at = end - 1 - passed[:, ::-1].argmin(axis=1)
        fewest = passed[np.arange(self.workers), at - self.low]
        for k in range(self.workers):
            idle = self.held[k, end], self.values[k, end]  # the last worker does nothing
            if (least[k], fewest[k]) < idle:
                self.held[k + 1, end], self.values[k + 1, end], self.origin[k + 1, end] = least[k], fewest[k], at[k]
            else:
                self.held[k + 1, end], self.values[k + 1, end], self.origin[k + 1, end] = *idle, end
        alive = (moved <= self.bound).any(axis=0)
        self.low += int(alive.argmax()) if alive.any() else end - self.low


def _spans(units: int, tensors: Sequence[Held | Passed]) -> list[list[tuple[int, int]]]:
    """For every unit what it reads, each with the first beginning for which that reader is the worker's first."""
    spans: list[list[tuple[int, int]]] = [[] for _ in range(units)]
    for index, tensor in enumerate(tensors):
        before = tensor.unit if isinstance(tensor, Passed) else -1
        for reader in tensor.readers:
            spans[reader].append((index, before + 1))
            before = reader
    return spans
