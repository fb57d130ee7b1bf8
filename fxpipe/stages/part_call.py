"""A call of one part of a stage in one process: its arguments, and what it returns, sends and gives to be added up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fxpipe.codecs.codec import EdgeState
from fxpipe.plan.spec import PartSpec, Phase

Function = Callable[[Sequence[Any], Sequence[Any], Any, Any], Any]
"""An emitted function, or what takes its place: `(weights, buffers, batch or saved or deferred, comm)`."""


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


@dataclass(frozen=True)
class PartResult:
    """What a part returned, what it sent by edge, and the gradients by bucket that it gave to be added up."""

    loss: Tensor | None = None
    updates: tuple[Tensor, ...] = ()
    saved: list[Any] = field(default_factory=list)
    deferred: list[Any] = field(default_factory=list)
    gradients: tuple[Tensor, ...] = ()
    sent: Mapping[str, Tensor] = field(default_factory=dict)
    handed: Mapping[str, Handed] = field(default_factory=dict)

    def flat(self) -> list[Tensor]:
        """What it returned and sent, in the order of `PurePart.outputs`."""
        loss = [] if self.loss is None else [self.loss]
        return [*loss, *self.updates, *self.saved, *self.deferred, *self.gradients, *self.sent.values()]


@dataclass(frozen=True)
class PartCall:
    """The arguments of a part.

    Attributes:
        third: the batch of a forward, the saved values of a backward, or the deferred values of weight gradients.
        received: by edge.
    """

    worker: int
    phase: Phase
    spec: PartSpec
    weights: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    third: tuple[Any, ...]
    received: Mapping[str, Tensor]

    def inputs(self) -> list[Any]:
        """All arguments in the order of `PurePart.inputs`, without masks."""
        return [*self.weights, *self.buffers, *self.third, *(self.received[name] for name in self.spec.receives)]

    def run(self, function: Function, seed: int | None = None, one_draw: OneDraw = nullcontext) -> PartResult:
        """Make the call.

        Args:
            seed: of torch's generators; None leaves them as they are.
            one_draw: as in `ReadyComm`.
        """
        if seed is not None:
            torch.manual_seed(seed)
        comm = ReadyComm(self.received, one_draw)
        result = function(self.weights, self.buffers, list(self.third), comm)
        return replace(self.result(result, comm.sent), handed=comm.handed)

    def result(self, returned: Any, sent: Mapping[str, Tensor]) -> PartResult:
        """What the part's function returned and sent, as a `PartResult`."""
        sent = {name: sent[name] for name in self.spec.sends}
        if self.phase == "B" and self.spec.deferred:
            return PartResult(deferred=list(returned), sent=sent)
        if self.phase != "F":
            return PartResult(gradients=tuple(returned), sent=sent)
        loss, updates, saved = returned
        return PartResult(loss, tuple(updates), list(saved), sent=sent)
