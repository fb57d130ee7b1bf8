"""A `comm` for one process: everything that a part receives is given, and what it sends or adds up is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from fxpipe.codecs.codec import EdgeState

OneDraw = Callable[[str], AbstractContextManager[Any]]
"""Takes the name of a draw: inside, torch draws the same numbers in every microbatch of the minibatch."""


@dataclass(frozen=True)
class Handed:
    """The gradients of a bucket that a part has given to be added up over replicas, and the call that it used."""

    call: Literal["all_reduce", "reduce_scatter"]
    gradients: tuple[Tensor | None, ...]


class ReadyComm:
    """A `comm` on which everything has already arrived; it keeps what is sent, and what is to be added up.

    Args:
        one_draw: as in the stage's own `comm`; by default, draws that microbatches share are like any others.

    Attributes:
        sent: by edge.
        handed: gradients by bucket, in the order of the calls; nothing is added up.
    """

    def __init__(self, received: Mapping[str, Tensor], one_draw: OneDraw = nullcontext) -> None:
        self.received = received
        self.one_draw = one_draw
        self.sent: dict[str, Tensor] = {}
        self.handed: dict[str, Handed] = {}

    def recv(self, name: str) -> Tensor:
        return self.received[name]

    def state(self, name: str) -> EdgeState:
        """A new state: nothing was sent before."""
        return EdgeState(place=lambda: (name,))

    def send(self, name: str, value: Tensor) -> None:
        self.sent[name] = value

    def all_reduce(self, name: str, gradients: Sequence[Tensor | None]) -> None:
        self.handed[name] = Handed("all_reduce", tuple(gradients))

    def reduce_scatter(self, name: str, gradients: Sequence[Tensor | None]) -> None:
        self.handed[name] = Handed("reduce_scatter", tuple(gradients))
