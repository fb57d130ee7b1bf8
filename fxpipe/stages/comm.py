"""A `comm` for one process: everything that a part receives has arrived, and what it sends or hands over is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from fxpipe.codecs.codec import EdgeState

OneDraw = Callable[[str], AbstractContextManager[Any]]
"""Given the name of a draw: inside, torch draws what it draws in every microbatch of the minibatch."""


@dataclass(frozen=True)
class Handed:
    """The gradients of a bucket that a part has handed over to be added up, and by which call."""

    call: Literal["all_reduce", "reduce_scatter"]
    gradients: tuple[Tensor | None, ...]


class ReadyComm:
    """A `comm` on which everything has arrived already; it keeps what is sent, and what is to be added up.

    Args:
        one_draw: that of the stage's own `comm`; by default, what microbatches have in common is drawn as all else is.

    Attributes:
        sent: by edge.
        handed: by bucket, in the order in which they were handed over; nothing is added up.
    """

    def __init__(self, received: Mapping[str, Tensor], one_draw: OneDraw = nullcontext) -> None:
        self.received = received
        self.one_draw = one_draw
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
