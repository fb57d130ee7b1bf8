"""Whether one worker's weights depend on another's values, though the optimizer has made nothing of it yet.

What clips, skips or adapts by all parameters may wait for a large norm, for a gradient that is not finite, or for a
history of steps. No trial meets every threshold. So what is looked for is the dependence itself: tensors are followed
from operator to operator, and where Python reads a number of one worker's, it is given another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fxpipe.optimizer.equal_draws import EqualDraws, TooLong
from fxpipe.optimizer.follow import CHANGES, Follow, Number, OtherNumbers
from fxpipe.optimizer.play import Copies, Played
from fxpipe.optimizer.whose import MOST_WORKERS, UNSURE, Workers
from fxpipe.plan.spec import ParameterSpec

FEW, MANY = 2, 36
"""Steps: with all parameters, and with some, for what waits for a history."""

LATE = 30
"""The step from which on one worker's values are others, where it is about what waits for a history."""

SAMPLE = 3
"""Parameters of each of two workers, at most, with which many steps are played."""

_OTHERS: tuple[Mapping[int, Callable[[Number], Number]], ...] = (
    *(dict.fromkeys(range(FEW), change) for change in CHANGES),
    {LATE + i: change for i, change in enumerate(CHANGES)},
)
"""When numbers are read that are others."""

SOON, HISTORY = 2, 105
"""Steps before gradients of one worker become others: a history, where numbers are read of which Python may keep one.

They are played without following, which takes less.
"""

_LOUDER = {0: 1e9, 2: math.nan, 4: math.inf}
"""What they are then multiplied by, in which steps."""


@dataclass(frozen=True)
class Dependence:
    """One worker's weights and another's values.

    Attributes:
        what: a sentence.
        proved: else it may be so.
        line: where a number is read that decides.
    """

    what: str
    proved: bool
    line: str | None = None


class _Bench:
    """Copies, and one optimizer over all of them, which is played again and again."""

    def __init__(self, copies: Copies, steps: int) -> None:
        self.copies = copies
        self.gradients: Sequence[Sequence[Tensor]] = copies.gradients[:steps]
        self.owners = sorted({row.owner for row in copies.rows})
        self.own = [1 << self.owners.index(row.owner) % MOST_WORKERS for row in copies.rows]
        self._all = [[*range(len(copies.rows))]]
        follow, played = self._follow(None, self.gradients)
        self.seen = follow.seen
        self._draws = follow.drew or played.drew_without_torch
        self._operators = follow.operators / len(self.gradients)
        self._usual = {len(self.gradients): played}

    def reading(self, other: OtherNumbers, compare: Compare) -> ParameterSpec | None:
        """The parameter whose weights come out otherwise, of a worker of which no other numbers are read."""
        gradients = self.gradients[: max(other.changes) + 4]
        try:
            if len(gradients) not in self._usual:
                self._usual[len(gradients)] = self._follow(None, gradients)[1]
            return self._changed(self._usual[len(gradients)], self._follow(other, gradients)[1], other.of, compare)
        except (Exception, TooLong):
            return None  # with such numbers it stops

    def given(self, gradients: Sequence[Sequence[Tensor]], of: Workers, compare: Compare) -> ParameterSpec | None:
        """The same for other gradients of these workers."""
        try:
            if len(gradients) not in self._usual:
                draws = EqualDraws(self.copies.device) if self._draws else None
                usual = self.copies.play(self._all, draws, self.copies.gradients[: len(gradients)])
                self._usual[len(gradients)] = usual
            draws = EqualDraws(self.copies.device, self._most(gradients))
            found = self.copies.play(self._all, draws, gradients)
            return self._changed(self._usual[len(gradients)], found, of, compare)
        except (Exception, TooLong):
            return None

    def proves(self, compare: Compare) -> bool:
        """Whether what comes out otherwise does so by other values alone: played as before, everything is as before."""
        found = self._follow(None, self.gradients)[1]
        return not found.drew_without_torch and compare(self._usual[len(self.gradients)], found) is None

    def _changed(self, usual: Played, found: Played, of: Workers, compare: Compare) -> ParameterSpec | None:
        others = [place for place, worker in enumerate(self.own) if not worker & of]
        place = compare(_only(usual, others), _only(found, others)) if others else None
        return None if place is None else self.copies.rows[others[place]]

    def names(self, workers: Workers) -> str:
        """As `worker 0` or `workers 0 and 2`."""
        *most, last = [str(owner) for place, owner in enumerate(self.owners) if workers >> place % MOST_WORKERS & 1]
        return f"workers {', '.join(most)} and {last}" if most else f"worker {last}"

    def _follow(self, other: OtherNumbers | None, gradients: Sequence[Sequence[Tensor]]) -> tuple[Follow, Played]:
        most = None if other is None else self._most(gradients)
        follow = Follow(self.copies.device, self.own, other, most)
        played = self.copies.play(self._all, follow, gradients)
        follow.finish()
        return follow, played

    def _most(self, gradients: Sequence[Sequence[Tensor]]) -> int:
        """Operators after which so many steps are taken for endless."""
        return 10 * int(self._operators * len(gradients)) + 1000


Compare = Callable[[Played, Played], "int | None"]
"""The place of the first parameter that differs by more than rounding."""


def find_dependence(copies: Copies, chosen: Sequence[bool], compare: Compare) -> Dependence | None:
    """Play one optimizer over parameters of all workers, and look.

    Args:
        chosen: of each of the rows, whether the optimizer trains it.

    Raises:
        Exception: the optimizer cannot be followed.
    """
    if len({row.owner for row, trained in zip(copies.rows, chosen, strict=True) if trained}) < 2:
        return None
    everything = _Bench(copies, FEW)
    if found := _flow(everything):
        return found
    some = _sample(copies, chosen)
    if found := _flow(some) or _other_gradients(some, compare) or _other_numbers(some, set(), compare):
        return found
    if found := _other_numbers(everything, set(some.seen.read), compare):
        return found
    return _not_used(some) or _not_used(everything)


def _sample(copies: Copies, chosen: Sequence[bool]) -> _Bench:
    """Of the first and of the last worker one parameter of every number of dimensions."""
    rows = [row for row, trained in zip(copies.rows, chosen, strict=True) if trained]
    owners = sorted({row.owner for row in rows})
    taken = []
    for owner in (owners[0], owners[-1]):
        own = [row for row in rows if row.owner == owner]
        taken += list({len(row.tensor.shape): row for row in reversed(own)}.values())[:SAMPLE]
    rows = [row for row in copies.rows if row in taken]
    try:
        return _Bench(_quiet_then_steady(copies, rows), MANY)
    except Exception:  # it may need one of the others
        return _Bench(_quiet_then_steady(copies, copies.rows), MANY)


def _quiet_then_steady(copies: Copies, rows: Sequence[ParameterSpec]) -> Copies:
    found = Copies(rows, copies.device, copies.make, copies.scheduler, loud=(1.0,) * (HISTORY + max(_LOUDER) + 1))
    found.wide = copies.wide
    return found


def _flow(bench: _Bench) -> Dependence | None:
    """Of tensors alone: a weight that is made of another worker's values."""
    flowed = sorted(bench.seen.flowed, key=lambda flow: flow[1] & UNSURE)
    if not flowed:
        return None
    place, workers, at = flowed[0]
    row = bench.copies.rows[place]
    unsure = bool(workers & UNSURE)
    others = bench.names(workers & ~bench.own[place])
    said = f"the step of {row.name}, of worker {row.owner}, {'may use' if unsure else 'uses'} values of {others}"
    return Dependence(said + (f"; they come together at {at}" if at else ""), proved=not unsure)


def _other_gradients(bench: _Bench, compare: Compare) -> Dependence | None:
    """Whatever the optimizer does, with numpy or out of sight: what if one worker's gradients were others?"""
    for owner, first in ((bench.owners[0], HISTORY if bench.seen.read else SOON), (bench.owners[-1], SOON)):
        place = next(place for place, row in enumerate(bench.copies.rows) if row.owner == owner)
        gradients = [list(given) for given in bench.copies.gradients[: first + max(_LOUDER) + 2]]
        for step, much in _LOUDER.items():
            gradients[first + step][place] = gradients[first + step][place] * much
        row = bench.given(gradients, bench.own[place], compare)
        if row is None:
            continue
        said = (
            f"where gradients of {bench.copies.rows[place].name}, of worker {owner}, are far larger or not finite, "
            f"weights of {row.name}, of worker {row.owner}, come out otherwise"
        )
        decides = _other_numbers(bench, set(), compare)
        if decides is not None and decides.line:
            said += f": a number that is read at {decides.line}, decides"
        return Dependence(said, bench.proves(compare))
    return None


def _other_numbers(bench: _Bench, known: set[str], compare: Compare) -> Dependence | None:
    """Of numbers that Python reads elsewhere than at the lines that are known."""
    read = {line: workers for line, workers in bench.seen.read.items() if line not in known}
    workers = 0
    for each in read.values():
        workers |= each
    for worker, other in _others(bench, workers):
        row = bench.reading(other, compare)
        if row is None:
            continue
        alone = (OtherNumbers(worker, other.changes, line) for line in read)
        line = next((each.line for each in alone if bench.reading(each, compare)), None)
        said = (
            f"weights of {row.name}, of worker {row.owner}, come out otherwise where another number is read of "
            f"{bench.names(worker)}'s values" + (f", at {line}" if line else "")
        )
        return Dependence(said, bench.proves(compare), line)
    return None


def _others(bench: _Bench, workers: Workers) -> Iterator[tuple[Workers, OtherNumbers]]:
    """Other numbers for the first and for the last of the workers whose values are read."""
    ends = [owner for owner in bench.own if owner & workers]
    for changes in _OTHERS:
        asked = dict.fromkeys((min(ends), max(ends)) if ends else ())
        for worker in [*asked][: 1 if min(changes) else 2]:
            if max(changes) < len(bench.gradients):
                yield worker, OtherNumbers(worker, changes)


def _not_used(bench: _Bench) -> Dependence | None:
    """What is made of several workers' values, though nothing has come of it."""
    if bench.seen.together:
        said = f"a number is read of several workers' values at once, at {bench.seen.together[0]}"
    elif bench.seen.kept:
        said = f"values of several workers come together at {bench.seen.kept[0]}, and are kept"
    else:
        return None
    steps = len(bench.gradients)
    return Dependence(f"{said}: in {steps} steps no weight has changed by it, later ones may", proved=False)


def _only(played: Played, places: Sequence[int]) -> Played:
    """What became of these parameters."""
    weights = [[step[place] for place in places] for step in played.weights]
    options = ([played.options[0][place] for place in places], [played.options[1][place] for place in places])
    return Played(played.kinds, weights, options, played.drew_without_torch, played.eps)
