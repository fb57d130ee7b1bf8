"""The losses of a user's own loop over processes: the loss worker tells them, and nobody waits before he asks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fxpipe.runtime.wires.addresses import LOSS
from fxpipe.runtime.wires.transport import Transport

MOST = 256
"""Losses that a worker has yet to receive: of that many steps ago, they have come."""


class StepLoss:
    """The loss of a step, which may be on its way: `float(loss)`, `loss.item()` and `f"{loss:.3f}"` wait for it.

    Asked for in every step, it makes each worker wait for the last one, so that a schedule without a flush gains
    nothing: ask every so many steps, or for that of some steps ago.
    """

    def __init__(self, find: Callable[[], float]) -> None:
        self._find = find
        self._found: float | None = None

    def __float__(self) -> float:
        if self._found is None:
            self._found = self._find()
        return self._found

    def set(self, loss: float) -> None:
        """It is known."""
        self._found = loss

    def item(self) -> float:
        """The number."""
        return float(self)

    def __format__(self, form: str) -> str:
        return format(float(self), form)

    def __repr__(self) -> str:
        return f"StepLoss({'on its way' if self._found is None else self._found})"


class Losses:
    """The losses of all steps, as one process knows them.

    Args:
        source: the loss worker.
        workers: how many there are.
    """

    def __init__(self, worker: int, source: int, workers: int, transport: Transport) -> None:
        self._worker = worker
        self._source = source
        self._others = [other for other in range(workers) if other != source]
        self._transport = transport
        self._coming: dict[int, StepLoss] = {}

    def step(self, minibatch: int) -> StepLoss:
        """A step begins: its loss, to be asked for."""
        loss = self._coming[minibatch] = StepLoss(lambda: self._receive(minibatch))
        if self._worker != self._source:
            self._transport.expect_note(self._source, (LOSS, minibatch), 1)
            if len(self._coming) > MOST:
                float(next(iter(self._coming.values())))
        return loss

    def tell(self, minibatch: int, loss: Tensor) -> None:
        """On the loss worker: a loss is known."""
        numbers = loss.detach().reshape(1).to("cpu", torch.float64)
        for other in self._others:
            self._transport.send_note(other, (LOSS, minibatch), numbers)
        self._coming.pop(minibatch).set(float(numbers))

    def settle(self) -> None:
        """The pipeline is empty: receive what has not been asked for."""
        for loss in list(self._coming.values()):
            float(loss)

    def _receive(self, minibatch: int) -> float:
        found = float(self._transport.recv_note(self._source, (LOSS, minibatch))[0])
        del self._coming[minibatch]
        return found
