"""The losses of all steps, and how they travel: from the loss worker's process to worker 0's, or to all."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from fxpipe.device_copies import ToCpu, widened
from fxpipe.plan.plan import Plan
from fxpipe.runtime.wires.addresses import LOSS, ProcessLine
from fxpipe.runtime.wires.one_process import Turns
from fxpipe.runtime.worker.executor import Executor, MinibatchLoss
from fxpipe.task.hooks import named_numbers

MOST = 256
"""Losses that a worker may not have received yet; those of more steps ago have come."""


class StepLoss:
    """The loss of a step, which may be on its way: `float(loss)`, `loss.item()` and `f"{loss:.3f}"` wait for it.

    If you read the loss in every step, each worker waits for the last one, and a schedule without a flush gains
    nothing: read it every few steps, or read the loss of some steps ago.

    Args:
        wait: returns when the loss has come into this process.
        names: of the metrics.
    """

    def __init__(self, wait: Callable[[], None], names: Sequence[str]) -> None:
        self._wait, self._names = wait, names
        self._come: ToCpu | None = None
        self._read: tuple[float, dict[str, float]] | None = None

    def comes(self, numbers: ToCpu) -> None:
        """The loss, followed by its metrics, is in this process, perhaps on its device."""
        self._come, self._wait = numbers, lambda: None  # which refers to no worker

    @property
    def computing(self) -> bool:
        """Whether reading it now would wait for the device of this process."""
        return self._come is not None and not self._come.here

    def __float__(self) -> float:
        return self._numbers[0]

    @property
    def metrics(self) -> dict[str, float]:
        """What `loss(model, batch)` returned next to the loss; waits like `float(loss)`."""
        return self._numbers[1]

    @property
    def _numbers(self) -> tuple[float, dict[str, float]]:
        if self._read is None:
            self._wait()
            assert self._come is not None
            self._read = named_numbers(self._come.read(), self._names)
        return self._read

    def item(self) -> float:
        """The number."""
        return float(self)

    def __format__(self, form: str) -> str:
        return format(float(self), form)

    def __repr__(self) -> str:
        return f"StepLoss({'on its way' if self._read is None else self._read[0]})"


class Losses:
    """The losses of all steps: each is sent once to every process that reads losses.

    A process that does not read a loss does not wait for it.

    Args:
        executors: the first replica here of each worker of this process.
        turns: in which its rows wait for each other.
        everywhere: all processes read losses, not only those of worker 0.

    Attributes:
        newest: the newest loss, where the loss worker is.
    """

    def __init__(
        self, plan: Plan, line: ProcessLine, executors: Sequence[Executor], turns: Turns, everywhere: bool
    ) -> None:
        of_worker = {executor.worker: executor for executor in executors}
        readers = line.speakers if everywhere else line.speakers[:1]
        self._source, self._names, self._turns = plan.loss.worker, plan.metrics, turns
        self._computer = of_worker.get(plan.loss.worker)
        self._receives = self._computer is None and line.own in readers
        self._others = [reader for reader in readers if reader != line.own]
        self._transport = (self._computer or of_worker[line.own]).transport
        self._executors = executors
        self._steps: dict[int, StepLoss] = {}
        self._coming: dict[int, StepLoss] = {}  # those that this process lacks
        self._leaving: deque[tuple[int, ToCpu]] = deque()
        self._begun = -1
        self.newest: Tensor | None = None

    def __getitem__(self, minibatch: int) -> StepLoss:
        """The loss of a minibatch that has begun; of old ones, only the newest is kept."""
        return self._steps[minibatch]

    def begins(self, minibatch: int) -> None:
        """A minibatch is fed, or its first forward is about to run in a row of this process."""
        if minibatch <= self._begun:
            return
        self._begun = minibatch
        if not self._receives and self._computer is None:
            return
        self._steps[minibatch] = self._coming[minibatch] = StepLoss(lambda: self._await(minibatch), self._names)
        if self._receives:
            self._transport.expect_note(self._source, (LOSS, minibatch), 1 + len(self._names))
            if len(self._coming) > MOST:
                float(next(iter(self._coming.values())))
        last = min(executor.store.version for executor in self._executors) - 1
        for old in [each for each in self._steps if each < last]:
            del self._steps[old]

    def update(self, executor: Executor, loss: MinibatchLoss | None) -> None:
        """A worker here has made an update, after which it may know a loss over all replicas: send it."""
        if self._take(executor, loss):
            self.send()

    def action(self, executor: Executor, loss: MinibatchLoss | None) -> None:
        """A worker here has launched an action, which may compute a loss: send those of actions before.

        So the device has more to compute while its losses are waited for.
        """
        self.send()
        if self._take(executor, loss) and self._leaving[-1][1].here:
            self.send()

    def _take(self, executor: Executor, loss: MinibatchLoss | None) -> bool:
        """Take a loss that counts: replicas here have the same, or one of their own."""
        if loss is None or executor is not self._computer:
            return False
        numbers = ToCpu(widened(loss.value.reshape(-1)))
        self.newest = loss.value.reshape(-1)[0]
        self._coming.pop(loss.minibatch).comes(numbers)
        self._leaving.append((loss.minibatch, numbers))
        return True

    def send(self) -> None:
        """Send the losses that have not left, waiting for the device."""
        while self._leaving:
            minibatch, numbers = self._leaving.popleft()
            for reader in self._others:
                self._transport.send_note(reader, (LOSS, minibatch), numbers.read())

    def settle(self) -> None:
        """The pipeline is empty: receive the losses that were not read."""
        for step in list(self._coming.values()) if self._receives else ():
            float(step)

    def _await(self, minibatch: int) -> None:
        if self._receives:
            numbers = self._transport.recv_note(self._source, (LOSS, minibatch))
            self._coming.pop(minibatch).comes(ToCpu(numbers))
        else:
            self._turns.wait(lambda: minibatch not in self._coming, lambda: f"the loss of step {minibatch + 1}")
