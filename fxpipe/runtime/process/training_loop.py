"""Walks a process's row: its actions one after the other, with receives posted ahead. Evaluations use `posted`, too.

If updates are late, the last one is made after the row's end.

If a process has several workers and their schedule a flush, all of them end a minibatch before any begins the next.
What must wait for other workers, or belongs to the process, is done in between. So all processes do it in one order,
and none waits for what another would only do later:

    rank 0:  … 2:B7 0:B7 │ announce 2, announce 0, settle 0, settle 2 │ on_step, checkpoint, evaluation │ 0:F8 …
    rank 1:  … 3:B7 1:B7 │ announce 3, announce 1, settle 1, settle 3 │ …

Without a flush each worker's update follows its last action. Worker 0's process does the rest when its first worker has
updated: by then all of the process have made as many updates, since the first comes last (`wpipe`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fxpipe.device_copies import mark
from fxpipe.observe.record import RecordedStep, ScaledStep
from fxpipe.runtime.process.losses import Losses, StepLoss
from fxpipe.runtime.wires.one_process import Turns
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.loss_scaler import LossScaler
from fxpipe.runtime.worker.observer import Observer
from fxpipe.schedule.action import LOOKAHEAD, Event
from fxpipe.schedule.base import Schedule

LAUNCHED = 2
"""How many actions may be launched and not over: more hold memory, and make a device no busier."""


def posted(
    coming: Callable[[], Event | None], expect: Callable[[Event], None], ahead: int, device: torch.device
) -> Iterator[Event | None]:
    """The events of a row in turn, None where nothing comes for now; `expect` gets each `ahead` events earlier.

    The next one comes when the device has done all but the last `LAUNCHED`.
    """
    window: deque[Event] = deque()
    launched: deque[Callable[[], None]] = deque()
    while True:
        while len(window) <= ahead and (event := coming()) is not None:
            expect(event)
            window.append(event)
        yield window.popleft() if window else None
        launched.append(mark(device))
        if len(launched) > LAUNCHED:
            launched.popleft()()


class EndedStep(NamedTuple):
    """A minibatch that is over on worker 0; `lr`, `norm` and `scaled` are as of `RecordedStep`."""

    minibatch: int
    loss: StepLoss
    lr: float | None
    norm: float | None
    scaled: ScaledStep | None

    def read(self) -> RecordedStep:
        """The step with its numbers, waiting for them."""
        return RecordedStep(self.minibatch, float(self.loss), self.lr, self.norm, self.loss.metrics, self.scaled)


def train(
    executors: Sequence[Executor],
    row: LimitedRow,
    losses: Losses,
    feed: Callable[[int], list[tuple[Any, ...]]] | None = None,
    report: Callable[[EndedStep], None] | None = None,
    observers: Sequence[Observer] = (),
) -> None:
    """Run all actions of one process's row, and wait until all that was sent has been received.

    Args:
        losses: of this process.
        feed: in worker 0's process, gives the microbatches of a minibatch.
        report: in worker 0's process, called when it ends a minibatch.
        observers: follow the row.
    """
    of_worker = {executor.worker: executor for executor in executors}
    first = executors[0]
    scaler = first.store.part(LossScaler)
    together = len(executors) > 1 and first.schedule.synchronous
    leaves: list[tuple[Any, ...]] = []
    reached = ended = -1
    unreported: int | None = None
    version = first.store.version

    for observer in observers:  # before receives are posted: observers may end the run here
        observer.between(executors)
    ahead = LOOKAHEAD * len(executors)
    for event in posted(row.next, lambda event: of_worker[event[0]].expect(event[1]), ahead, first.device):
        if not together or event is None or event[1].minibatch != ended:
            for executor in reversed(executors):
                executor.announce()
            for executor in executors:
                losses.update(executor, executor.settle())
            if unreported is not None and report is not None:
                lr, norm, scaled = first.store.updater.lr, first.store.norm, None if scaler is None else scaler.last
                report(EndedStep(unreported, losses[unreported], lr, norm, scaled))
            unreported = None
            if first.store.version != version:
                version = first.store.version
                for observer in observers:
                    observer.between(executors)
        if event is None:
            for executor in executors:
                for loss in executor.await_losses():
                    losses.update(executor, loss)
            losses.send()
            if row.more():
                continue
            owed = first.store.owed
            if owed is None:
                break
            first.store.catch_up()
            unreported = owed if first.worker == 0 else None
            continue
        worker, action = event
        executor, mine = of_worker[worker], None
        if action.phase == "F" and action.minibatch > reached:
            reached = action.minibatch
            executor.watch.at(action)
            losses.begins(reached)
            for observer in observers:
                observer.begins(reached)
        if feed is not None and worker == 0 and action.phase == "F":
            if action.microbatch == 0:
                executor.watch.at(action)
                executor.watch.open("data")
                leaves = feed(action.minibatch)[::-1]
                executor.watch.close()
            mine = leaves.pop()
        losses.action(executor, executor.execute(action, mine))
        ended = action.minibatch
        if worker == 0 and executor.store.due is not None:
            unreported = executor.store.due
    for executor in executors:
        executor.store.versions.expect_all()
        executor.transport.drop_weights()
    for executor in executors:
        executor.transport.finish()


@dataclass
class Limit:
    """How far the rows of a process go.

    Attributes:
        fed: no minibatch from this one on may begin yet.
        end: no minibatch from this one on will follow; None while that is unknown.
    """

    fed: int
    end: int | None = None


class LimitedRow:
    """The events of a rank, or of one of its replicas, from a minibatch on, as far as its limit allows.

    With a known end it is the endless row without later minibatches, up to the last action of those before, as in
    `Schedule.until`.

    Args:
        start: where the row began with an empty pipeline: at `step`, or before the checkpoint of that step.
        turns: in which it waits for its limit to move.
    """

    def __init__(
        self, schedule: Schedule, rank: int, limit: Limit, turns: Turns, step: int = 0, start: int = 0
    ) -> None:
        self._limit, self._turns, self._ends = limit, turns, schedule.ends
        self._workers = len(schedule.hosted(rank))
        self._events: Iterator[Event] = schedule.row_after(rank, step, start)
        self._upcoming = next(self._events)
        self._ended = step * self._workers  # minibatches of its workers that are over when all given actions are

    def next(self) -> Event | None:
        """The next event; None at the row's end, or where the limit holds it."""
        end = self._limit.end
        while end is not None and not self._over and self._upcoming[1].minibatch >= end:
            self._upcoming = next(self._events)
        if self._over or self._upcoming[1].minibatch >= self._limit.fed:
            return None
        event, self._upcoming = self._upcoming, next(self._events)
        self._ended += self._ends(event[1])
        return event

    def more(self) -> bool:
        """Call when all events so far are done: wait until the limit has moved, and return whether there are more."""
        limit, upcoming = self._limit, self._upcoming[1].minibatch
        self._turns.wait(lambda: limit.end is not None or upcoming < limit.fed, lambda: "the next batch", idle=True)
        return not self._over

    @property
    def _over(self) -> bool:
        return self._limit.end is not None and self._ended >= self._limit.end * self._workers
