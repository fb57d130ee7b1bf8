"""The losses of all steps in every process: the loss worker tells them, and who does not ask does not wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fxpipe.plan.spec import Plan
from fxpipe.runtime.wires.addresses import LOSS, ProcessLine
from fxpipe.runtime.wires.transport import Transport
from fxpipe.task.metrics import named_numbers

MOST = 256
"""Losses that a worker has yet to receive: of that many steps ago, they have come."""


class StepLoss:
    """The loss of a step, which may be on its way: `float(loss)`, `loss.item()` and `f"{loss:.3f}"` wait for it.

    Asked for in every step, it makes each worker wait for the last one, so that a schedule without a flush gains
    nothing: ask every so many steps, or for that of some steps ago.
    """

    def __init__(self, find: Callable[[], Tensor], names: Sequence[str]) -> None:
        self._find = find
        self._names = names
        self._found: tuple[float, dict[str, float]] | None = None

    def __float__(self) -> float:
        return self._numbers[0]

    @property
    def metrics(self) -> dict[str, float]:
        """What `loss(model, batch)` returned next to the loss; waits, too."""
        return self._numbers[1]

    @property
    def _numbers(self) -> tuple[float, dict[str, float]]:
        if self._found is None:
            self.set(self._find())
            assert self._found is not None
        return self._found

    def set(self, numbers: Tensor) -> None:
        """It is known, with its metrics after it."""
        self._found = named_numbers(numbers, self._names)

    def item(self) -> float:
        """The number."""
        return float(self)

    def __format__(self, form: str) -> str:
        return format(float(self), form)

    def __repr__(self) -> str:
        return f"StepLoss({'on its way' if self._found is None else self._found[0]})"


class Losses:
    """The losses of all steps, as one process knows them.

    Args:
        transports: of the workers of this process.
    """

    def __init__(self, plan: Plan, line: ProcessLine, transports: Mapping[int, Transport]) -> None:
        self._source = plan.loss_worker
        self._names = plan.metrics
        self._others = line.others
        self._hears = transports[line.own]
        self._tells = transports.get(plan.loss_worker)  # None where that worker is not
        self._coming: dict[int, StepLoss] = {}

    def step(self, minibatch: int) -> StepLoss:
        """A step begins: its loss, to be asked for."""
        loss = self._coming[minibatch] = StepLoss(lambda: self._receive(minibatch), self._names)
        if self._tells is None:
            self._hears.expect_note(self._source, (LOSS, minibatch), 1 + len(self._names))
            if len(self._coming) > MOST:
                float(next(iter(self._coming.values())))
        return loss

    def tell(self, minibatch: int, loss: Tensor) -> None:
        """Where the loss worker is: a loss is known."""
        assert self._tells is not None
        numbers = loss.detach().reshape(-1).to("cpu", torch.float64)
        for other in self._others:
            self._tells.send_note(other, (LOSS, minibatch), numbers)
        self._coming.pop(minibatch).set(numbers)

    def settle(self) -> None:
        """The pipeline is empty: receive what has not been asked for."""
        for loss in list(self._coming.values()):
            float(loss)

    def _receive(self, minibatch: int) -> Tensor:
        found = self._hears.recv_note(self._source, (LOSS, minibatch))
        del self._coming[minibatch]
        return found
