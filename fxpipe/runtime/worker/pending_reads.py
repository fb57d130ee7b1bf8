"""What a worker's actions have yet to read of every version, counted down as they read it."""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.policy.demand import Demand, Reader, WeightMessage

Key = tuple[int, int, int]  # owner, version, ahead


@dataclass
class Weights:
    """The weights of one key.

    Attributes:
        left: how many actions have yet to read them, by `WeightReads.key`.
    """

    message: WeightMessage
    left: dict[Reader, int]

    @property
    def names(self) -> list[str]:
        """The names of those that will still be read."""
        wanted = (self.message.by_reader[reader] for reader, left in self.left.items() if left)
        return list(dict.fromkeys(name for names in wanted for name in names))


class Unread:
    """The weights that one worker has yet to read, its own and others', in one segment of a run.

    The first request for a version opens it, with the counts of all its reads. Once all of it has been read, it must
    not be requested again.
    """

    def __init__(self, demand: Demand, worker: int) -> None:
        self.demand = demand
        self.worker = worker
        self.begin(0, None)

    def begin(self, start: int, stop: int | None, since: int = 0) -> None:
        """Begin a segment: the minibatches from `start` up to, not including, `stop`; None while it is unknown.

        Args:
            since: the first of them that is not over.
        """
        self.start, self.stop, self.since = start, stop, since
        self._versions: dict[tuple[int, int], dict[int, Weights]] = {}

    def of(self, owner: int, version: int) -> dict[int, Weights]:
        """What is unread of a version, by prediction distance."""
        if (owner, version) not in self._versions:
            found = self.demand.messages(owner, self.worker, version, self.start, self.stop, self.since)
            self._versions[owner, version] = {m.ahead: Weights(m, dict(m.uses)) for m in found}
        return self._versions[owner, version]

    def kept(self, owner: int, version: int) -> dict[int, Weights]:
        """As `of`, for a version that was opened: nothing if all of it has been read."""
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
