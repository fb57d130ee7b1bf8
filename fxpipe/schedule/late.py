"""PipeDream's 1F1B with each update a minibatch later: the sum over replicas has that long to travel."""

from __future__ import annotations

from typing import ClassVar

from fxpipe.schedule.asynchronous import Async


class AsyncLate(Async):
    """The order of `async`; a minibatch's update is made when the next minibatch is over, and a flush makes the last.

        worker 0: F0 F1 F2 .. .. B0 F3 B1 F4 B2 .. B3 .. B4
        worker 1: .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 .. B4
        worker 2: .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4

    B1 ends with the update of minibatch 0. Worker k of N misses one update more than with `async`: its F of minibatch m
    sees version m − (N−1−k) − 1 of its weights, its B version m − 1.

    It is for replicas (`--dp`): their sum of minibatch m is under way during all of minibatch m + 1, where `async`
    waits for what the backward of m does not hide. Without replicas there is nothing to wait for, and all it does is to
    miss one more update, and to hold one more sum of gradients. With one worker it is data parallelism whose gradients
    are one step old. From: Li et al. 2018 (Pipe-SGD), NeurIPS, arXiv 1811.03619, for one worker.
    """

    name: ClassVar[str] = "async-late"
    takes_replicas: ClassVar[bool] = False  # of different numbers
    late: ClassVar[int] = 1
