"""Moves cuts as long as the simulated pipeline becomes faster.

The planner minimises what the slowest worker takes in the steady state. Under a schedule with a flush, workers also
fill and drain, and where weight gradients are separate, W fills some of that: slightly uneven cuts may be better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, pairwise
from math import comb

import numpy as np

from fxpipe.planner.candidates import Positions, positions
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.sums_over_runs import Floats
from fxpipe.search.simulated_plan import Judge, SimulatedPlan, ThreeCuts

STEPS = (1, -1, 3, -3, 9, -9)
"""By how many positions cuts are moved."""

EVERY = 400
"""If there are this many plans or fewer, all are tried instead."""

WORTH = 1e-4
"""The least share of the time that a move must gain."""

_Move = tuple[int, int, int]
_MOVES: dict[str, tuple[_Move, ...]] = {
    "same": ((1, 1, 1),),
    "bidirectional": ((1, 1, 1), (1, 0, 0), (0, 1, 1), (1, -1, -1)),
    "three-way": ((1, 1, 1), (1, 0, 0), (0, 1, 1), (1, -1, -1), (0, 0, 1), (0, 1, 0), (1, 0, -1), (0, 1, -1)),
}
"""By mode, the directions in which forward, backward and weight cuts of a boundary move together."""


def climb(judge: Judge, starts: list[SimulatedPlan], most: int) -> SimulatedPlan:
    """The best trial that a sequence of moves reaches from any start; each move is an improvement.

    A move shifts the cuts of one boundary between workers, or of two neighbouring boundaries alike.

    Args:
        starts: trials whose cuts the judge's mode allows.
        most: how many plans may be simulated, from all starts together.
    """
    search = _Climb(judge, most)
    best = min(starts, key=lambda trial: trial.seconds)
    if judge.candidate.mode not in _MOVES or judge.workers.count == 1:
        return best
    if search.plans <= EVERY:
        return search.every(best)
    return min((search.from_(start) for start in starts), key=lambda trial: trial.seconds)


class _Climb:
    """One search for cuts."""

    def __init__(self, judge: Judge, most: int) -> None:
        self.judge = judge
        self.left = most
        self.mode = judge.candidate.mode
        self.costs = judge.costs
        self.places = _allowed(positions(judge.costs, self.mode), self.mode)
        self.seen: set[ThreeCuts] = set()

    @property
    def plans(self) -> int:
        """An upper bound of the number of plans."""
        inner = self.judge.workers.count - 1
        chains = {"same": 1, "bidirectional": 2}.get(self.mode, 3)
        counts = [comb(len(places) + inner - 1, inner) for places in self.places[:chains]]
        return int(np.prod(np.array(counts, dtype=object)))

    def every(self, best: SimulatedPlan) -> SimulatedPlan:
        """The best of all plans."""
        inner, count = self.judge.workers.count - 1, self.costs.count
        forward, backward, weights = (
            [(0, *cut, count) for cut in combinations_with_replacement(places, inner)] for places in self.places
        )
        plans = [
            (f, b, w)
            for f in forward
            for b in ([f] if self.mode == "same" else backward)
            for w in (weights if self.mode == "three-way" else [b])
            if all(later >= at for later, at in zip(w, b, strict=True))
        ]
        self.left = 2 * len(plans)
        while (better := self._first(plans, best)) is not None:
            best = better
        return best

    def from_(self, best: SimulatedPlan) -> SimulatedPlan:
        """The best trial that moves reach from one trial."""
        improved = True
        while improved:
            improved = False
            for boundaries in self._boundaries():
                while (better := self._first([*self._moves(best.cuts, boundaries)], best)) is not None:
                    best, improved = better, True
        return best

    def _boundaries(self) -> list[tuple[int, ...]]:
        single = range(1, self.judge.workers.count)
        return [*((k,) for k in single), *pairwise(single)]

    def _first(self, plans: Sequence[ThreeCuts], best: SimulatedPlan) -> SimulatedPlan | None:
        """The first of these plans that fits and gains enough, those with the most even work first.

        Those whose work alone takes too long are not simulated.
        """
        plans = [cuts for cuts in plans if cuts not in self.seen]
        if not plans or self.left <= 0:
            return None
        work = self._work(plans)
        ordered = [plans[at] for at in np.argsort(work, kind="stable") if work[at] < best.seconds]
        again = best.partition.recompute
        kinds = (again, ()) if again else ((),)  # or what is mismatched travels
        tried = [Cuts(f, b, w, recompute) for f, b, w in ordered for recompute in kinds][: self.left]
        for cuts, trial in zip(tried, self.judge.of_cuts(tried), strict=True):
            self.left -= 1
            self.seen.add((cuts.forward, cuts.backward, cuts.weights))
            if trial is not None and trial.seconds < best.seconds * (1 - WORTH):
                return trial
        return None

    def _work(self, plans: Sequence[ThreeCuts]) -> Floats:
        """Seconds of a minibatch in which the busiest worker computes: a lower bound for any schedule."""
        loads = self.costs.load(np.array(plans, dtype=np.int64).reshape(len(plans), 3, -1).transpose(0, 2, 1))
        busy = np.diff(loads) / np.array(self.judge.workers.speeds)
        return busy.max(axis=1) * self.judge.workers.microbatches / 1e3

    def _moves(self, cuts: ThreeCuts, boundaries: tuple[int, ...]) -> Iterator[ThreeCuts]:
        """The legal cuts that differ in these boundaries."""
        for move in _MOVES[self.mode]:
            for step in STEPS:
                moved = []
                for cut, way, places in zip(cuts, move, self.places, strict=True):
                    at = list(cut)
                    for k in boundaries if way else ():
                        at[k] = _shifted(places, at[k], way * step)
                    moved.append(tuple(at))
                forward, backward, weights = moved
                rising = all(list(cut) == sorted(cut) for cut in moved)
                if rising and all(w >= b for w, b in zip(weights, backward, strict=True)) and tuple(moved) != cuts:
                    yield forward, backward, weights


def _allowed(where: Positions, mode: str) -> tuple[list[int], list[int], list[int]]:
    """Where forward, backward and weight gradients may be cut."""
    forward, backward, weight = where.forward, where.backward, where.weight
    if mode == "same":
        forward = backward = where.shared
    if mode != "three-way":
        weight = backward
    return forward.tolist(), backward.tolist(), weight.tolist()


def _shifted(places: list[int], position: int, step: int) -> int:
    """A place this many places further, or the last one on that side."""
    if step > 0:
        after = [p for p in places if p > position]
        return after[min(step, len(after)) - 1] if after else position
    before = [p for p in places if p < position]
    return before[max(step, -len(before))] if before else position
