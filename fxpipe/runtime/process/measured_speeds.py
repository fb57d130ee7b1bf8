"""How fast the workers of a run are, from their own times: seconds of work a step, over what the build's costs promise.

    rank 0:  ··|·······|·······|·······|···   a mark: a beat of its pulse, at least `STEPS` after the last one
    rank 1:  ·····|·····|·····|·····|·····|   between two marks, a sample; of `SAMPLES` samples, the median

What a worker waits for, feeding data, saving and evaluations are not its work. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from fxpipe.observe.pulse import Signs
from fxpipe.plan.spec import Plan
from fxpipe.planner.costs_file import BuildCosts

STEPS = 5
"""The fewest steps of a sample."""

SAMPLES = 4
"""How many samples of every worker make a window."""


class Window(NamedTuple):
    """What was measured, over some steps.

    Attributes:
        step: the last that all have begun.
        busy: seconds of work a step, by rank.
        pace: seconds from one step to the next.
    """

    step: int
    busy: tuple[float, ...]
    pace: float

    def speeds(self, work: Sequence[float]) -> tuple[float, ...]:
        """The speed of each rank: the seconds of a step that its costs promise, over those that it takes."""
        return tuple(promised / max(taken, 1e-9) for promised, taken in zip(work, self.busy, strict=True))

    def most(self, work: Sequence[float]) -> float:
        """The share of a step's time that other cuts could save at most: all work is shared out by the speeds."""
        slowest = max(self.busy)
        return 1 - sum(work) / sum(self.speeds(work)) / slowest if slowest else 0.0


def promised(plan: Plan, costs: BuildCosts) -> tuple[float, ...]:
    """The seconds of a step at speed 1, by rank, as the compiler estimates them from the costs of nodes."""
    found = [0.0] * plan.ranks
    for worker, summary in enumerate(costs.workers):
        found[plan.rank_of(worker)] += plan.own_microbatches * summary.time.microbatch + summary.time.update
    return tuple(found)


class _AtBeat(NamedTuple):
    """What a process has done at a beat; nanoseconds."""

    step: int
    busy: int
    now: int


class Windows:
    """Makes windows of the signs of a run's processes, by rank."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.clear()

    def clear(self) -> None:
        """Begin a new window."""
        self._beats: list[int | None] = [None] * self._ranks
        self._marks: list[_AtBeat | None] = [None] * self._ranks
        self._samples: list[list[tuple[float, float]]] = [[] for _ in range(self._ranks)]

    def add(self, signs: Sequence[Signs]) -> Window | None:
        """Look at the processes, many times between two beats; the window that this completes."""
        for rank, one in enumerate(signs):
            before, self._beats[rank] = self._beats[rank], one.beat
            if before in (None, one.beat):  # the step is of now, but how busy it was is of the last beat
                continue
            mark, last = _AtBeat(one.step, one.status.busy, one.status.now), self._marks[rank]
            if one.phase != "training" or not mark.step:
                self._marks[rank] = None
            elif last is None:
                self._marks[rank] = mark
            elif mark.step - last.step >= STEPS:
                steps = (mark.step - last.step) * 1e9
                self._samples[rank].append(((mark.busy - last.busy) / steps, (mark.now - last.now) / steps))
                self._marks[rank] = mark
        if min(map(len, self._samples)) < SAMPLES:
            return None
        busy = tuple(median(work for work, _ in samples) for samples in self._samples)
        pace = median(whole for _, whole in self._samples[0])
        self.clear()
        return Window(min(one.step for one in signs), busy, pace)
