"""A `comm` for one process: what a stage receives is there already, what it sends is kept."""

from __future__ import annotations

from torch import Tensor


class Replay:
    """A `comm` on which everything has arrived; keeps what is sent."""

    def __init__(self, received: dict[str, Tensor]) -> None:
        self.received = received
        self.sent: dict[str, Tensor] = {}

    def recv(self, name: str) -> Tensor:
        return self.received[name]

    def send(self, name: str, value: Tensor) -> None:
        self.sent[name] = value
