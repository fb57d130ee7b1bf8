"""PipeDream's 1F1B: one forward, one backward, without a flush; and the same with each update a minibatch later."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import ClassVar

from fxpipe.plan.spec import Phase
from fxpipe.schedule.action import Action
from fxpipe.schedule.base import Schedule, divisors


class Async(Schedule):
    """One forward, one backward, without a flush: no worker waits for long, but its weights are stale.

        worker 0: F0 F1 F2 .. .. B0 F3 B1 F4 B2 .. B3 .. B4
        worker 1: .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 .. B4
        worker 2: .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4

    Worker k of N starts with N−1−k forwards and updates after every minibatch, so its F of minibatch m sees
    version m − (N−1−k) of its weights, its B version m. From: Narayanan et al. 2019 (PipeDream), SOSP.
    """

    name: ClassVar[str] = "async"
    synchronous: ClassVar[bool] = False
    takes_replicas: ClassVar[bool] = True

    @classmethod
    def usual_microbatches(cls, workers: int, samples: int) -> int:
        """So many that weights are at most one update old on every worker: N, or the nearest divisor from N−1 to 2N.

        Without such a divisor, the largest one below. Two workers are one update late with a single microbatch, which
        is then the fastest. benchmarks/accuracy measures the cost of each choice.
        """
        if workers < 3:
            return 1
        counts = divisors(samples)
        enough = [d for d in counts if workers - 1 <= d <= 2 * workers]
        few = max(d for d in counts if d < workers)
        return min(enough, key=lambda d: (abs(d - workers), -d), default=few)

    def actions(self, worker: int, start: int = 0) -> Iterator[Action]:
        ahead = self.ahead(worker)
        for flat in range(ahead):
            yield self._action("F", start, flat)
        for flat in count():
            yield self._action("F", start, flat + ahead)
            yield self._action("B", start, flat)

    def _action(self, phase: Phase, start: int, flat: int) -> Action:
        """The action of the `flat`-th microbatch since minibatch `start`."""
        return Action(phase, start + flat // self.microbatches, flat % self.microbatches)


class AsyncLate(Async):
    """The order of `async`, but a minibatch's update is made when the next minibatch is over, or by a flush.

        worker 0: F0 F1 F2 .. .. B0 F3 B1 F4 B2 .. B3 .. B4
        worker 1: .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 .. B4
        worker 2: .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4

    B1 ends with the update of minibatch 0. Worker k of N misses one update more than with `async`: its F of minibatch m
    sees version m − (N−1−k) − 1 of its weights, its B version m − 1.

    It is for replicas (`--dp`): they sum the gradients of minibatch m during all of minibatch m + 1, while `async`
    waits for the part of the sum that the backward of m does not hide. Without replicas there is no such sum, and it
    only misses one more update and holds one more set of gradients. With one worker it is data parallelism with
    gradients one step old. From: Li et al. 2018 (Pipe-SGD), NeurIPS, arXiv 1811.03619, for one worker.
    """

    name: ClassVar[str] = "async-late"
    takes_replicas: ClassVar[bool] = False  # of different numbers
    late: ClassVar[int] = 1
