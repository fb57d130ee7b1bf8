"""Moves cuts as long as the simulator finds that the pipeline becomes faster.

The planner minimises what the slowest worker takes in the steady state. Under a schedule with a flush, workers also
fill and drain, and where weight gradients are apart, W fills some of that: cuts that are a little uneven may be better.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fxpipe.planner.candidates import Positions, positions
from fxpipe.planner.cost_model import CostModel
from fxpipe.search.trial import Cut, Judge, Trial

STEPS = (1, -1, 3, -3, 9, -9)
"""How many positions a cut is moved by."""

WORTH = 1e-4
"""The least share of the time that a move must gain."""

_Three = tuple[Cut, Cut, Cut]
_COLUMNS: dict[str, tuple[tuple[int, ...], ...]] = {
    "same": ((0, 1, 2),),
    "bidirectional": ((0, 1, 2), (0,), (1, 2)),
    "three-way": ((0, 1, 2), (0,), (1, 2), (2,), (1,)),
}
"""By mode, which kinds of cuts move together: 0 forward, 1 backward, 2 weight gradients."""


def climb(judge: Judge, start: Trial, most: int) -> Trial:
    """The best trial that moves of single boundaries lead to, one after the other, each an improvement.

    Args:
        most: how many plans may be simulated.
    """
    mode = judge.candidate.mode
    if mode not in _COLUMNS or judge.workers.count == 1:
        return start
    places = positions(CostModel(judge.profile, judge.workers), mode)
    best, budget = start, _Budget(most)
    seen = {_cuts(start)}
    improved = True
    while improved:
        improved = False
        for boundary in range(1, judge.workers.count):
            while (better := _first_better(judge, best, boundary, places, seen, budget)) is not None:
                best, improved = better, True
    return best


@dataclass
class _Budget:
    left: int

    def spend(self) -> bool:
        """Whether there was one left."""
        self.left -= 1
        return self.left >= 0


def _first_better(
    judge: Judge, best: Trial, boundary: int, places: Positions, seen: set[_Three], budget: _Budget
) -> Trial | None:
    """The first move of one boundary that is worth it."""
    for moved in _moves(_cuts(best), boundary, judge.candidate.mode, places):
        if moved in seen:
            continue
        if not budget.spend():
            return None
        seen.add(moved)
        for send in (False, True) if best.partition.recompute else (False,):
            found = judge.of_cuts(best.partition, *moved, send=send)
            if found is not None and found.seconds < best.seconds * (1 - WORTH):
                return found
    return None


def _cuts(trial: Trial) -> _Three:
    return trial.partition.forward, trial.partition.backward, trial.partition.weights


def _moves(cuts: _Three, boundary: int, mode: str, places: Positions) -> Iterator[_Three]:
    """The lawful cuts that differ in one boundary."""
    allowed = [places.forward, places.backward, places.weight]
    if mode == "same":
        allowed = [places.shared] * 3
    for columns in _COLUMNS[mode]:
        for step in STEPS:
            moved = list(cuts)
            for column in columns:
                where, cut = allowed[column if mode == "three-way" else min(column, 1)].tolist(), cuts[column]
                at = _next(where, cut[boundary], step)
                moved[column] = (*cut[:boundary], at, *cut[boundary + 1 :])
            forward, backward, weights = moved
            lawful = all(list(c) == sorted(c) for c in moved)
            if lawful and all(w >= b for w, b in zip(weights, backward, strict=True)) and tuple(moved) != cuts:
                yield forward, backward, weights


def _next(where: list[int], position: int, step: int) -> int:
    """The position some allowed positions further, or the last one on that side."""
    if step > 0:
        after = [p for p in where if p > position]
        return after[min(step, len(after)) - 1] if after else position
    before = [p for p in where if p < position]
    return before[max(step, -len(before))] if before else position
