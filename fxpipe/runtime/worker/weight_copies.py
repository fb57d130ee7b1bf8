"""What workers read of a version: copies of other workers' weights, predictions, and the reads still to come.

Where messages hold differences (`CopyMessages`), both ends keep what the reader decoded from the last message: the
owner for the next difference, and for checkpoints. No tensor here is ever written to; a later version has its own
memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fxpipe.policy.copy_messages import CopyMessages, Filling
from fxpipe.policy.demand import Demand, Reader, WeightMessage
from fxpipe.policy.optimizers.predict import Predictor
from fxpipe.runtime.wires.transport import Transport


class WeightCopies:
    """What one worker sends as an owner, and receives as a reader."""

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
        """Whether a reader's copy may differ from the owner's weights."""
        return self.messages.codec is not None

    @torch.no_grad()
    def hold_initial(
        self,
        readers: Sequence[int],
        owned: Mapping[str, Tensor],
        owners: Sequence[int],
        read: Mapping[str, Tensor],
    ) -> None:
        """Hold version 0, which every worker begins with, as the base of the first differences.

        Args:
            readers, owned: the workers that read from this one, and the weights that it owns.
            owners, read: the workers that it reads from, and their weights.
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
        """The messages of a version to a reader that must be written, in this order, and whether each is sent.

        Args:
            stop: the first minibatch that will not run; None while it is unknown. What a longer run would send is
                written, too, so that the run can be continued with the same bits.
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
            weights: by name; for a version that is sent again, the reader's copy.
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
            weights: this worker's own, predicted equally far ahead.
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


Key = tuple[int, int, int]  # owner, version, ahead


@dataclass
class Weights:
    """The weights of one key."""

    message: WeightMessage
    left: dict[Reader, int]

    @property
    def names(self) -> list[str]:
        """The names of weights that will still be read."""
        wanted = (self.message.by_reader[reader] for reader, left in self.left.items() if left)
        return list(dict.fromkeys(name for names in wanted for name in names))


class Unread:
    """The weights that one worker will still read in one segment of a run, its own and other workers'.

    The first request for a version opens it, with the counts of all its reads. Once all its reads are done, it must not
    be requested again.
    """

    def __init__(self, demand: Demand, worker: int) -> None:
        self.demand = demand
        self.worker = worker
        self.begin(0, None)

    def begin(self, start: int, stop: int | None, since: int = 0) -> None:
        """Begin a segment: the minibatches from `start` up to, not including, `stop`; None while it is unknown."""
        self.start, self.stop, self.since = start, stop, since
        self._versions: dict[tuple[int, int], dict[int, Weights]] = {}

    def of(self, owner: int, version: int) -> dict[int, Weights]:
        """The unread weights of a version, by prediction distance."""
        if (owner, version) not in self._versions:
            found = self.demand.messages(owner, self.worker, version, self.start, self.stop, self.since)
            self._versions[owner, version] = {m.ahead: Weights(m, dict(m.uses)) for m in found}
        return self._versions[owner, version]

    def kept(self, owner: int, version: int) -> dict[int, Weights]:
        """As `of`, for a version that was opened; empty if all of it has been read."""
        return self._versions.get((owner, version), {})

    def read(self, key: Key, reader: Reader) -> bool:
        """An action has read these weights, or was left out; return whether it was the last."""
        owner, version, ahead = key
        self.of(owner, version)[ahead].left[reader] -= 1
        return self._over(key)

    def end(self, stop: int) -> list[Key]:
        """The end is now known; return the weights that no action will read any more."""
        over: list[Key] = []
        for (owner, version), opened in list(self._versions.items()):
            ending = self.demand.messages(owner, self.worker, version, self.start, stop, self.since)
            coming = {message.ahead: message.uses for message in ending}
            for ahead, weights in list(opened.items()):
                for reader, count in weights.message.uses.items():
                    weights.left[reader] -= count - coming.get(ahead, {}).get(reader, 0)
                if self._over((owner, version, ahead)):
                    over.append((owner, version, ahead))
        self.stop = stop
        return over

    def _over(self, key: Key) -> bool:
        owner, version, ahead = key
        opened = self._versions[owner, version]
        if any(opened[ahead].left.values()):
            return False
        del opened[ahead]
        if not opened:
            del self._versions[owner, version]
        return True


class Predictions:
    """Predictions from the live version, each computed once; later predictions reuse their memory."""

    def __init__(self, predictor: Predictor | None, trained: Mapping[str, nn.Parameter], transport: Transport) -> None:
        self.made: dict[int, dict[str, Tensor]] = {}
        self.predictor = predictor
        self.trained = trained
        self._transport = transport
        self._index = {name: i for i, name in enumerate(trained)}

    def look(self, names: Sequence[str], ahead: int) -> Mapping[str, Tensor]:
        """The live weights, predicted `ahead` updates ahead."""
        if ahead == 0 or self.predictor is None:
            return self.trained
        found = self.made.setdefault(ahead, {})
        missing = [name for name in names if name not in found]
        if missing:
            watch = self._transport.watch
            watch.open("predict")
            values = self.predictor.predict(ahead, [self._index[name] for name in missing])
            found.update(zip(missing, values, strict=True))
            watch.close()
        return found

    def keep(self, names: Sequence[str], ahead: int) -> dict[str, Tensor]:
        """The same, for use after the live version: predictions themselves, and copies of live weights."""
        found = self.look(names, ahead)
        predicted = self.made.get(ahead, {})
        kept: dict[str, Tensor] = {}
        for name in names:
            live = found[name] is self.trained[name]  # also if no update to predict from was made yet
            kept[name] = found[name].detach().clone() if live else predicted.pop(name)
        return kept

    def forget(self, ahead: int) -> None:
        """Free a prediction that nothing reads any more."""
        self.give_back(self.made.pop(ahead, {}))

    def forget_all(self) -> None:
        """Free all predictions: the live weights are about to change, or have changed."""
        for ahead in list(self.made):
            self.forget(ahead)

    def give_back(self, predicted: Mapping[str, Tensor]) -> None:
        """Take back the memory of predictions that `keep` returned."""
        if predicted and self.predictor is not None:
            self.predictor.give_back(list(predicted.values()), [self._index[name] for name in predicted])
