"""A `comm` for one process: everything that a part receives has arrived, and what it sends or hands over is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fxpipe.codecs.codec import EdgeState


@dataclass(frozen=True)
class Handed:
    """The gradients of a bucket that a part has handed over to be added up, and by which call."""

    call: Literal["all_reduce", "reduce_scatter"]
    gradients: tuple[Tensor | None, ...]


class ReadyComm:
    """A `comm` on which everything has arrived already; it keeps what is sent, and what is to be added up.

    Attributes:
        sent: by edge.
        handed: by bucket, in the order in which they were handed over; nothing is added up.
    """

    def __init__(self, received: Mapping[str, Tensor]) -> None:
        self.received = received
        self.sent: dict[str, Tensor] = {}
        self.handed: dict[str, Handed] = {}

    def recv(self, name: str) -> Tensor:
        return self.received[name]

    def state(self, name: str) -> EdgeState:
        """A new one: nothing was sent before."""
        return EdgeState(place=lambda: (name,))

    def send(self, name: str, value: Tensor) -> None:
        self.sent[name] = value

    def all_reduce(self, name: str, gradients: Sequence[Tensor | None]) -> None:
        self.handed[name] = Handed("all_reduce", tuple(gradients))

    def reduce_scatter(self, name: str, gradients: Sequence[Tensor | None]) -> None:
        self.handed[name] = Handed("reduce_scatter", tuple(gradients))
