"""The interface of a transport, and the `comm` object that emitted code sends and receives with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from fxpipe.codecs.codec import EdgeState
from fxpipe.errors import RunError
from fxpipe.observe.watch import Cause, Watch
from fxpipe.plan.spec import EdgeSpec
from fxpipe.random_state import seed_of, torch_seeded

Note = tuple[str, int]


class Transport(ABC):
    """Carries one worker's messages. Every message is known beforehand, by its edge, minibatch and microbatch.

    `expect…` announces what will be received soon, in the order of the worker's actions, so that a transport can post
    receives early.

    Attributes:
        watch: the worker's own; the transport records a 'wait' in it whenever the worker waits for another worker.
    """

    watch: Watch

    def add(self, edges: Sequence[EdgeSpec]) -> None:
        """Carry the edges of one more shape of batch.

        Args:
            edges: all edges of the shape, including other workers'.

        Raises:
            RunError: connections were set up before, and there is none for an edge.
        """
        raise NotImplementedError(f"{type(self).__name__} carries the edges that it was made with")

    def expect(self, edge: EdgeSpec, minibatch: int, microbatch: int) -> None:  # noqa: B027
        """A value of `edge` will be received soon."""

    def expect_weights(self, owner: int, version: int, ahead: int, size: int) -> None:  # noqa: B027
        """A block of weights of `size` bytes will be received; called in the order in which the owner sends."""

    @abstractmethod
    def send(self, edge: EdgeSpec, minibatch: int, microbatch: int, value: torch.Tensor) -> None:
        """Begin to send a value, without waiting for the receiver; the value must not change afterwards."""

    @abstractmethod
    def recv(self, edge: EdgeSpec, minibatch: int, microbatch: int) -> torch.Tensor:
        """Receive a value, waiting for it.

        Raises:
            PeerLost: the other end is gone.
        """

    @abstractmethod
    def send_weights(self, reader: int, version: int, ahead: int, block: torch.Tensor) -> None:
        """Begin to send a packed block of weights to a reader."""

    @abstractmethod
    def recv_weights(self, owner: int, version: int, ahead: int) -> torch.Tensor:
        """Receive a packed block of weights, waiting for it."""

    def expect_note(self, source: int, what: Note, count: int) -> None:  # noqa: B027
        """A note of `count` numbers will be received; called in the order in which `source` sends notes of a kind."""

    @abstractmethod
    def send_note(self, to: int, what: Note, numbers: torch.Tensor) -> None:
        """Begin to send numbers (a float64 vector on the CPU); `what` is their kind and minibatch."""

    @abstractmethod
    def recv_note(self, source: int, what: Note) -> torch.Tensor:
        """Receive a note, waiting for it."""

    def drop_weights(self) -> None:  # noqa: B027
        """Receive the announced blocks of weights that no action will read."""

    def begin(self, minibatch: int) -> None:  # noqa: B027
        """Set the first minibatch of this worker."""

    def done(self, phase: str, minibatch: int, microbatch: int) -> None:  # noqa: B027
        """The worker has finished an action: forget messages that must have been received by now."""

    def finish(self) -> None:  # noqa: B027
        """Wait until everything sent has been received."""


class EdgeComm:
    """The `comm` that emitted code sends and receives with, bound to one action or one batch at a time.

    Args:
        seed: of the run.
        number: maps a microbatch of this replica to its number in the whole minibatch.
        share: which replica this is, if replicas train separately: each has its own minibatch.

    Attributes:
        sent: the memory (storage addresses) of what the action has sent.
        memories: by edge of a gradient, what its codec remembers from one message to the next.
        reduce: takes the name of a bucket, a minibatch, a microbatch and its gradients, to add them up over
            microbatches and replicas; None if the worker has no replicas.
    """

    __slots__ = (
        "_edges",
        "_microbatch",
        "_minibatch",
        "_number",
        "_seed",
        "_share",
        "_transport",
        "_watch",
        "memories",
        "reduce",
        "sent",
    )

    def __init__(
        self,
        edges: dict[str, EdgeSpec],
        transport: Transport,
        watch: Watch,
        seed: int = 0,
        number: Callable[[int], int] = int,
        share: int = 0,
    ) -> None:
        self._edges = edges
        self._number = number
        self._seed = seed
        self._share = share
        self.memories: dict[str, dict[str, torch.Tensor]] = {}
        self._transport = transport
        self._watch = watch
        self._minibatch = 0
        self._microbatch = 0
        self.sent: set[int] = set()
        self.reduce: Callable[[str, int, int, Sequence[torch.Tensor | None]], None] | None = None

    @property
    def edges(self) -> set[str]:
        """The names of the edges at this worker."""
        return set(self._edges)

    def bind(self, minibatch: int, microbatch: int) -> None:
        """Begin an action; in an evaluation, `minibatch` is the number of the batch."""
        self._minibatch = minibatch
        self._microbatch = microbatch
        self.sent.clear()

    def recv(self, name: str) -> torch.Tensor:
        """The value of the edge `name` for the current microbatch."""
        edge = self._edges[name]
        self._watch.open("receive", Cause(edge.kind, name, edge.src))
        value = self._transport.recv(edge, self._minibatch, self._microbatch)
        self._watch.close()
        return value

    def state(self, name: str) -> EdgeState:
        """The state of the codec of the edge `name`, at its sender.

        Only gradients have a memory: forwards run ahead of updates, and a run that resumes repeats them.
        """
        memory = self.memories.setdefault(name, {}) if self._edges[name].src_phase == "B" else {}
        return EdgeState(memory, lambda: (self._seed, name, self._minibatch, self._number(self._microbatch)))

    def one_draw(self, name: str) -> AbstractContextManager[None]:
        """Inside, torch draws the same numbers in every microbatch of the minibatch; other draws are not affected."""
        return torch_seeded(seed_of(self._seed, self._share, name, self._minibatch))

    def send(self, name: str, value: torch.Tensor) -> None:
        """Send `value` along the edge `name`; it must not be changed in place afterwards."""
        edge = self._edges[name]
        self._watch.open("send", Cause(edge.kind, name, edge.dst))
        self.sent.add(value.untyped_storage().data_ptr())
        self._transport.send(edge, self._minibatch, self._microbatch, value)
        self._watch.close()

    def all_reduce(self, name: str, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add up the gradients of the bucket `name` over the replicas; None for a parameter without a gradient.

        Raises:
            RunError: the code was compiled for replicas, and this worker has none.
        """
        if self.reduce is None:
            raise RunError(
                f"the stage sums the gradients of {name} over replicas, and this worker has none",
                hint="compile the model again: fxpipe compile MODEL -o BUILD",
            )
        self.reduce(name, self._minibatch, self._microbatch, gradients)

    def reduce_scatter(self, name: str, gradients: Sequence[torch.Tensor | None]) -> None:
        """As `all_reduce`, but each replica receives only its own part of the sums.

        Raises:
            RunError: as `all_reduce`.
        """
        self.all_reduce(name, gradients)
