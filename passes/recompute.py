"""recompute: choose what each worker's backward computes again of its own forward, so that what is saved fits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import fx

from fxpipe.ir.aten import is_getitem, is_view
from fxpipe.ir.program import AGAIN, Again, Level, Program, info, size_of, value
from fxpipe.ir.transform import Pass
from fxpipe.passes.analysis.keep_or_repeat import Item, KeepOrRepeat
from fxpipe.passes.analysis.left_values import LeftValues, left_values, memory_of
from fxpipe.passes.rematerialize import Kinds, Rematerialize, reads_again

CUTS = 8
"""The most minimum cuts from which a worker chooses."""

STEPS = 16
"""How many choices there are from one minimum cut to the next."""


@dataclass(frozen=True)
class Room:
    """How much a worker may keep between the actions of microbatches.

    Attributes:
        bytes: for everything saved and deferred, of all microbatches, and what one of them has computed again; inf for
            no limit.
        moments: how many microbatches are between F and B, and between B and W, when they need most memory.
    """

    bytes: float = math.inf
    moments: tuple[tuple[int, int], ...] = ((1, 0),)

    def filled(self, left: LeftValues) -> float:
        """The bytes of `left`, at the moment of most memory."""
        most = max(waiting * left.saved + later * left.deferred for waiting, later in self.moments)
        return most + left.repeated


LEAST = Room(-1.0)
"""Room for nothing: chooses the fewest bytes of each microbatch at any time."""


@dataclass(frozen=True)
class Recompute(Pass):
    """Choose the forward values that the same worker's backward computes again: the least time that fits.

    The choices of a worker are minimum cuts of its part of the graph (`analysis/keep_or_repeat.py`), from saving
    everything that backward reads to keeping hardly more than what enters the worker. Between two of them, the later
    one is used for what comes last in forward, and the earlier one for the rest (of equal blocks, a minimum cut takes
    all or none). Random values and buffers' new values are never computed again. `rematerialize` makes the copies.

    Fields:
        rooms: for each worker; with `LEAST`, it keeps the fewest bytes.
        known: instead of rooms: what each worker's backward computes again in a program whose nodes have these names.

    Before: again = ()                     After: again = (Again(("gelu", "addmm"), 2e-3, 65536), Again())
    """

    name: ClassVar[str] = "recompute"
    requires: ClassVar[Level] = Level.PLACED
    provides: ClassVar[Level] = Level.PLACED

    rooms: tuple[Room, ...] = ()
    known: tuple[tuple[str, ...], ...] = field(default=(), kw_only=True)

    def __call__(self, program: Program) -> Program:
        plain = Rematerialize()(program)
        before = left_values(plain)
        if self.known:
            named = replace(program, again=tuple(Again(names) for names in self.known))
            after = left_values(Rematerialize()(named))
            return replace(program, again=tuple(map(_again, self.known, before, after)))
        workers = range(len(self.rooms))
        tight = [k for k in workers if self.rooms[k].filled(before[k]) > self.rooms[k].bytes]
        if not tight:
            return program
        choices = {k: Choices(program, plain, k) for k in tight}
        taken = _places(program, choices, {k: self.rooms[k] for k in tight})
        left = _left(program, choices, taken)
        again = [Again()] * len(self.rooms)
        for k in tight:
            names = choices[k].names(taken[k])
            values = tuple(node.name for node in choices[k].nodes if node.name in names)
            again[k] = _again(values, before[k], left[k])
        return replace(program, again=tuple(again))


def _again(values: tuple[str, ...], before: LeftValues, after: LeftValues) -> Again:
    """The cost and the savings of a choice, from what is left without it and with it."""
    if not values:
        return Again()
    return Again(values, max(after.seconds - before.seconds, 0.0), before.saved - after.saved)


def _places(program: Program, choices: dict[int, Choices], rooms: dict[int, Room]) -> dict[int, int]:
    """For each worker, the fastest of its choices that fits; the smallest if none does."""
    low = dict.fromkeys(rooms, 0)
    high = {k: choices[k].last for k in rooms}
    tried: dict[int, dict[int, LeftValues]] = {k: {} for k in rooms}

    def look(places: dict[int, int]) -> None:
        for k, left in _left(program, choices, places).items():
            tried[k][places[k]] = left

    look(low)  # with one microbatch at a time, nothing is smaller than saving all
    look(high)
    while any(low[k] < high[k] for k in rooms):  # all workers at once: each look walks the whole graph
        middle = {k: (low[k] + high[k]) // 2 for k in rooms}
        look(middle)
        for k, room in rooms.items():
            if low[k] == high[k]:
                continue
            if room.filled(tried[k][middle[k]]) <= room.bytes:
                high[k] = middle[k]
            else:
                low[k] = middle[k] + 1
    return {k: _best(room, tried[k]) for k, room in rooms.items()}


def _best(room: Room, tried: dict[int, LeftValues]) -> int:
    """The fastest place that fits; the smallest if none does."""
    fitting = [place for place, left in tried.items() if room.filled(left) <= room.bytes]
    if fitting:
        return min(fitting, key=lambda place: tried[place].seconds)
    if room == LEAST:
        return min(tried, key=lambda place: tried[place].saved)
    return min(tried, key=lambda place: room.filled(tried[place]))


def _left(program: Program, choices: dict[int, Choices], places: dict[int, int]) -> dict[int, LeftValues]:
    """By worker, what its forward leaves with the given choice."""
    assert program.cuts is not None
    again = [Again()] * program.cuts.workers
    for k, place in places.items():
        again[k] = Again(tuple(choices[k].names(place)))
    left = left_values(Rematerialize()(replace(program, again=tuple(again))))
    return {k: left[k] for k in places}


class Choices:
    """What one worker's backward can compute again, from nothing to everything possible, in `most` minimum cuts.

    `plain` is the program after `rematerialize`: with nothing chosen, what its backwards read of forward is needed.
    """

    def __init__(self, program: Program, plain: Program, worker: int, most: int = CUTS) -> None:
        self.nodes, items = _items(program, plain, worker)
        self._sets = [point.repeated for point in KeepOrRepeat(items).hull(most)] if items else [frozenset[int]()]
        self._places = {node: v for v, node in enumerate(self.nodes)}
        self._views = [is_view(node) for node in self.nodes]
        self.last = STEPS * (len(self._sets) - 1)

    def names(self, place: int) -> frozenset[str]:
        """The choice at a place from 0 to `last`: between two minimum cuts, ever more of the second one."""
        step, share = divmod(place, STEPS)
        repeated = self._sets[step]
        if share:
            changed = sorted(repeated ^ self._sets[step + 1])
            taken = set(changed[len(changed) - len(changed) * share // STEPS :])
            repeated = repeated ^ taken
        return frozenset(self.nodes[v].name for v in repeated if not self._is_kept_view(v, repeated))

    def _is_kept_view(self, v: int, repeated: frozenset[int]) -> bool:
        """Whether it is a view of a kept value: keeping it, too, costs nothing. Of a tuple, each element is kept."""
        if not self._views[v]:
            return False
        node = self.nodes[v]
        if is_getitem(node):
            whole = self._places[node.all_input_nodes[0]]
            return whole not in repeated or self._is_kept_view(whole, repeated)
        memory = memory_of(node)
        at = self._places.get(memory)
        return memory is not node and at is not None and at not in repeated


def _items(program: Program, plain: Program, worker: int) -> tuple[list[fx.Node], list[Item]]:
    """What the worker's backward reads of its forward, and what that is made from; the items, by node."""
    kinds = Kinds(program)
    names = {node.name: node for node in program.graph.nodes}
    needed, copied = _read_later(plain, worker)
    seconds: dict[fx.Node, float] = {}
    inputs: dict[fx.Node, list[fx.Node]] = {}
    stack = [names[name] for name in needed]
    while stack:
        node = stack.pop()
        if node not in inputs and not _is_there(node, kinds, worker):
            seconds[node] = _seconds(node, kinds, worker, copied)
            inputs[node] = reads_again(node) if math.isfinite(seconds[node]) else []
            stack += inputs[node]
    nodes = [node for node in program.graph.nodes if node in inputs]
    place = {node: v for v, node in enumerate(nodes)}
    items = []
    for node in nodes:
        read = tuple(sorted({place[n] for n in inputs[node] if n in place}))
        is_needed = node.name in needed
        items.append(Item(seconds[node], _bytes(node, kinds, worker, is_needed), read, is_needed))
    return nodes, items


def _read_later(plain: Program, worker: int) -> tuple[set[str], set[str]]:
    """What the worker's backward reads of forward, and what it computes again in any case."""
    needed: set[str] = set()
    copied: set[str] = set()
    for node in plain:
        if info(node).worker != worker or info(node).phase == "F":
            continue
        if AGAIN in node.meta:
            copied.add(node.meta[AGAIN])
        needed.update(n.name for n in _of_forward(node, plain))
    return needed, copied


def _of_forward(node: fx.Node, program: Program) -> Iterator[fx.Node]:
    tables = {p.node for p in program.parameters}
    for source in node.all_input_nodes:
        if source.op == "placeholder":
            if source.name not in tables:
                yield source
        elif info(source).phase == "F":
            yield source


def _is_there(node: fx.Node, kinds: Kinds, worker: int) -> bool:
    """Whether backward has it although its forward does not keep it: weights, constants, other workers' masks."""
    if node.op == "placeholder":
        return node.name not in kinds.inputs and node.name not in kinds.updated
    return kinds.is_made_anywhere(node, worker)


def _seconds(node: fx.Node, kinds: Kinds, worker: int, copied: set[str]) -> float:
    """The time of computing it again; inf if that is impossible."""
    if node.op == "placeholder" or info(node).worker != worker or kinds.only_once(node):
        return math.inf
    return 0.0 if node.name in copied else info(node).seconds or 0.0


def _bytes(node: fx.Node, kinds: Kinds, worker: int, needed: bool) -> float:
    """The bytes of keeping it; inf if `rematerialize` or its form forbids it."""
    if node.op == "placeholder" or info(node).worker != worker:
        return size_of(value(node))
    if not hasattr(value(node), "dtype"):  # a tuple: its elements are kept
        return math.inf
    if kinds.only_once(node):
        return size_of(value(node))
    if node in kinds.weights or memory_of(node) is not node:
        return math.inf
    if info(node).region is not None and not needed:
        return math.inf
    return size_of(value(node))
