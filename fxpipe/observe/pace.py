"""How long a run trains, and how fast, on worker 0: seconds and rates without evaluations."""

from __future__ import annotations

from collections import deque
from time import perf_counter

from fxpipe.observe.rates import NO_WORK, Work

STEADY = 4
"""The fewest steps that can have a steady state."""


class Pace:
    """The time of a run's steps. The pipeline has so many workers, and begins to fill after `first`."""

    def __init__(self, first: int, workers: int) -> None:
        self.first = first  # how many steps were made before the run went on
        self.steps, self.work = 0, NO_WORK  # made since then
        self.evaluation_seconds = 0.0  # those of evaluations before the last step
        self._evaluating = 0.0  # of the evaluations since the last step
        self._steady = _Steady(first + workers, workers)
        self.begin()

    def begin(self) -> None:
        """Training begins now."""
        self._begin = self._last = perf_counter()

    def step(self, minibatch: int, work: Work) -> dict[str, float]:
        """A minibatch has ended now; returns its rates."""
        now = perf_counter()
        seconds = now - self._last
        self._steady.add(minibatch, work.samples, seconds)
        rates = work.rates(seconds - self._evaluating)
        self.evaluation_seconds += self._evaluating
        self._last, self._evaluating = now, 0.0
        self.steps += 1
        self.work += work
        return rates

    def evaluated(self, step: int, seconds: float) -> None:
        """The state after a step was evaluated, for so long."""
        self._evaluating += seconds
        self._steady.disturbed.add(step)

    @property
    def seconds(self) -> float:
        """From the beginning of training, or from where it went on, to the last step, without evaluations."""
        return self._last - self._begin - self.evaluation_seconds

    @property
    def rates(self) -> dict[str, float]:
        """Of the whole run, or since it went on, including the filling and emptying of the pipeline."""
        return self.work.rates(self.seconds)

    @property
    def steady(self) -> float | None:
        """Samples a second between the filling and the emptying of the pipeline; None if there is little between them.

        Steps after an evaluation do not count: the workers first have to get into step again.
        """
        return self._steady.rate


class _Steady:
    """The rate of samples between the steps in which the pipeline fills and those in which it empties.

    Steps after number `filled` count, but for the last `emptying` ones.
    """

    def __init__(self, filled: int, emptying: int) -> None:
        self._filled, self._emptying = filled, emptying
        self._newest: deque[tuple[int, int, float]] = deque()  # those in which it may be emptying already
        self._count = self._samples = 0
        self._seconds = 0.0
        self.disturbed: set[int] = set()  # steps before which there was an evaluation

    def add(self, step: int, samples: int, seconds: float) -> None:
        self._newest.append((step, samples, seconds))
        if len(self._newest) <= self._emptying:
            return
        step, samples, seconds = self._newest.popleft()
        if step in self.disturbed:
            self.disturbed.discard(step)
        elif step > self._filled:
            self._count += 1
            self._samples += samples
            self._seconds += seconds

    @property
    def rate(self) -> float | None:
        return None if self._count < STEADY else self._samples / max(self._seconds, 1e-9)
