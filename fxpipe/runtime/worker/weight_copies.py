"""One worker's ends of the streams of copies: what it has sent its readers, and what it makes of others' messages.

Where messages hold differences (`CopyMessages`), both ends keep what the reader made of the last message: the owner
for the next difference, and for checkpoints. Nothing here is ever written to; a later version has memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fxpipe.policy.copy_messages import CopyMessages, Filling
from fxpipe.policy.demand import WeightMessage
from fxpipe.runtime.wires.transport import Transport


class WeightCopies:
    """What one worker sends as an owner, and receives as a reader.

    Args:
        seed: of the run.
    """

    def __init__(self, messages: CopyMessages, worker: int, transport: Transport, seed: int) -> None:
        self.seed = seed
        self.messages = messages
        self.worker = worker
        self.transport = transport
        self.begin(Filling())

    def begin(self, filling: Filling) -> None:
        """The pipeline is empty: all streams begin again."""
        self.filling = filling
        self._made: dict[tuple[int, int], tuple[int, dict[str, Tensor]]] = {}
        self._bases: dict[tuple[int, int, int], dict[str, Tensor]] = {}

    @property
    def encoded(self) -> bool:
        """Whether readers may see something else than what their owners have."""
        return self.messages.codec is not None

    @torch.no_grad()
    def hold_initial(
        self,
        readers: Sequence[int],
        owned: Mapping[str, Tensor],
        owners: Sequence[int],
        read: Mapping[str, Tensor],
    ) -> None:
        """Version 0 is what every worker begins with: the base of the first differences.

        Args:
            readers, owned: the workers that read of this one, and the weights that it owns.
            owners, read: the workers that it reads of, and their weights.
        """
        for reader in readers:
            for message in self._kept_up(reader, 0):
                names = self._changes(self.worker, reader, 1, message.ahead)
                held = {name: owned[name].detach().clone() for name in names}
                self._made[reader, message.ahead] = 0, held
        for owner in owners:
            for message in self.messages.kept_up(owner, self.worker, 0, self.filling):
                names = self._changes(owner, self.worker, 1, message.ahead)
                if names:
                    self._bases[owner, 0, message.ahead] = {name: read[name] for name in names}

    def due(self, reader: int, version: int, stop: int | None) -> list[tuple[WeightMessage, bool]]:
        """The messages of a version to a reader that must be written, in this order, and whether each is to be sent.

        Args:
            stop: the first minibatch that never comes; None while it is unknown. What a longer run would send is
                written, too, for it to go on from here with the same bits.
        """
        sent = self.messages.sent(self.worker, reader, version, self.filling, stop)
        if not self.encoded:
            return [(message, True) for message in sent]
        aheads = {message.ahead for message in sent}
        return [(message, message.ahead in aheads) for message in self._kept_up(reader, version)]

    @torch.no_grad()
    def write(self, reader: int, message: WeightMessage, weights: Mapping[str, Tensor]) -> Tensor:
        """A message as it is sent; versions are written in their order.

        Args:
            weights: by name; for a version that is sent again, what the reader had.
        """
        version, ahead = message.version, message.ahead
        pack = self.messages.pack(self.worker, reader, version, ahead, self.filling)
        _, base = self._made.pop((reader, ahead), (version - 1, {}))
        block, made = pack.pack(weights, base, (self.seed, self.worker, reader, version, ahead))
        later = self._changes(self.worker, reader, version + 1, ahead)
        kept = {name: made[name] for name in made if name in pack.differences or name in later}
        if kept:
            self._made[reader, ahead] = version, kept
        return block

    def written(self, version: int) -> None:
        """All messages of a version have been written: forget what nothing will build on."""
        self._made = {stream: made for stream, made in self._made.items() if made[0] == version}

    def of_reader(
        self, reader: int, ahead: int, names: Sequence[str], weights: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """What a reader has of the live version.

        Args:
            weights: what this worker has of it, as far ahead.
        """
        _, made = self._made.get((reader, ahead), (0, {}))
        return {name: made.get(name, weights[name]) for name in names}

    def coming(self, owner: int, version: int, stop: int | None) -> Iterator[tuple[int, int]]:
        """The messages of a version to this worker, in the order in which they are sent: how far ahead, and bytes."""
        for message in self.messages.sent(owner, self.worker, version, self.filling, stop):
            pack = self.messages.pack(owner, self.worker, version, message.ahead, self.filling)
            yield message.ahead, pack.bytes

    @torch.no_grad()
    def receive(self, owner: int, version: int, ahead: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Wait for a message, and for those before it that it builds on; yield their versions and weights.

        Actions may read versions in another order than they were sent in.
        """
        first = version
        while self._changes(owner, self.worker, first, ahead) and (owner, first - 1, ahead) not in self._bases:
            first -= 1
        for each in range(first, version + 1):
            pack = self.messages.pack(owner, self.worker, each, ahead, self.filling)
            block = self.transport.recv_weights(owner, each, ahead)
            found = pack.unpack(block, self._bases.pop((owner, each - 1, ahead), {}))
            if later := self._changes(owner, self.worker, each + 1, ahead):
                self._bases[owner, each, ahead] = {name: found[name] for name in later}
            yield each, found

    def _kept_up(self, reader: int, version: int) -> list[WeightMessage]:
        return self.messages.kept_up(self.worker, reader, version, self.filling)

    def _changes(self, owner: int, reader: int, version: int, ahead: int) -> tuple[str, ...]:
        return self.messages.differences(owner, reader, version, ahead, self.filling)
