"""The bytes of weights that a worker holds in addition to the live ones, action by action, as the runtime does.

It counts copies of other workers' weights, from the posted receive until the last action that reads them; own versions
that later actions read; predictions, whose memory is reused and never freed; weights in the types in which stages read
them, from the first to the last read of a version; and what predictions and repairs remember of past steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType

from fxpipe.policy.copy_messages import CopyMessages, Filling
from fxpipe.policy.demand import Demand, WeightReads
from fxpipe.schedule.action import LOOKAHEAD, Action
from fxpipe.schedule.base import Schedule

Key = tuple[int, int, int]
"""Owner, version, and how far ahead it is predicted."""

Reads = dict[str, list[int]]
"""By name, the places in a row of the first and the last action that read a weight."""


@dataclass(frozen=True)
class HeldWeights:
    """Bytes of weights around one action.

    Attributes:
        during: while its code runs.
        after: after that, during its update, if it has one.
        sent: in the blocks of weight copies that its update sends.
    """

    during: int
    after: int
    sent: int


def held_weights(demand: Demand, worker: int, row: Sequence[Action]) -> list[HeldWeights]:
    """What the worker holds in each of its actions, starting from an empty pipeline."""
    return _WeightsOfRow(demand, worker, row).all()


class HeldInRow:
    """Intervals of places, [first, end), in which a worker holds weights of so many bytes, by name.

    Each action of its row has two places: while its code runs, and after that. `casts` are the bytes of weights that
    stages read in another type: then later actions read these, and not copies.
    """

    def __init__(
        self,
        schedule: Schedule,
        row: Sequence[Action],
        sizes: Mapping[str, int],
        casts: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        updated = ((schedule.updated_by(action), place) for place, action in enumerate(row))
        self.updates = {minibatch: place for minibatch, place in updated if minibatch is not None}
        self.row, self._bytes, self._casts = row, sizes, casts
        self.reads: dict[Key, Reads] = defaultdict(dict)
        self._changes = [0] * (2 * len(row) + 1)
        self._predicted: dict[str, list[int]] = defaultdict(lambda: [0] * (2 * len(row) + 1))

    def read(self, key: Key, names: Iterable[str], place: int) -> None:
        """An action reads these weights."""
        for name in names:
            self.reads[key].setdefault(name, [place, place])[1] = place

    def own(self, version: int, ahead: int, reads: Reads) -> None:
        """Hold what is read of a version of the worker's own weights."""
        replaced = self.updates.get(version, len(self.row))
        last = max(end for _, end in reads.values())

        def over(kept: bool) -> int:
            return 2 * last + 1 if last <= replaced or kept else 2 * replaced + 1

        for name in reads.keys() & self._casts.keys():
            first, end = reads[name]
            self._hold(min(2 * first, 2 * replaced + 1), over(kept=end > replaced), self._casts[name])
        if not ahead:  # copies of what is read after the version was replaced; all are freed after the last read
            if last > replaced:
                later = (name for name, (_, end) in reads.items() if end > replaced and name not in self._casts)
                self._hold(2 * replaced + 1, 2 * last + 1, sum(self._bytes[name] for name in later))
            return
        for name, (first, end) in reads.items():
            until = over(kept=end > replaced and name not in self._casts)
            # Before the first update nothing is predicted: the live weights are read, and copied if read later.
            begin = 2 * replaced + 1 if version == 0 else min(2 * first, 2 * replaced + 1)
            if until > begin:
                self._predict(name, begin, until)

    def _hold(self, first: int, end: int, size: int) -> None:
        self._changes[first] += size
        self._changes[min(end, len(self._changes) - 1)] -= size

    def _predict(self, name: str, first: int, end: int) -> None:
        counts = self._predicted[name]
        counts[first] += 1
        counts[min(end, len(counts) - 1)] -= 1

    def totals(self) -> list[int]:
        """The bytes by place."""
        held = list(accumulate(self._changes))
        for name, changes in self._predicted.items():
            most = accumulate(accumulate(changes), max)  # memory for predictions is kept
            held = [size + count * self._bytes[name] for size, count in zip(held, most, strict=True)]
        return held


class _WeightsOfRow(HeldInRow):
    """As `HeldInRow`, by the plan: other workers' weights, too, and what is sent and remembered."""

    def __init__(self, demand: Demand, worker: int, row: Sequence[Action]) -> None:
        rows = demand.plan.parameters
        casts = {p.name: p.read.bytes for p in rows if p.cast}
        super().__init__(demand.schedule, row, {p.name: p.tensor.bytes for p in rows}, casts)
        self.demand, self.worker = demand, worker
        self._messages = CopyMessages(demand)
        self._filling = Filling()
        self._sent = [0] * len(row)
        self._initial: dict[str, int] = {}  # by name, until when it holds another worker's initial weight

    def all(self) -> list[HeldWeights]:
        """The row's."""
        for place, action in enumerate(self.row):
            for part, reading in self._readings(action):
                version = self.demand.version(reading, part, 0)
                self.read((reading.owner, version, self.demand.ahead(reading, part, version)), reading.names, place)
        for key, reads in self.reads.items():
            if key[0] == self.worker:
                self.own(*key[1:], reads)
            else:
                self._weight_copy(key, reads)
        for name, end in self._initial.items():
            self._hold(0, end, self._bytes[name])
        for minibatch, place in self.updates.items():
            self._send(minibatch + 1, place)
        held, fixed = self.totals(), self._remembered()
        return [HeldWeights(fixed + held[2 * i], fixed + held[2 * i + 1], sent) for i, sent in enumerate(self._sent)]

    def _readings(self, action: Action) -> Iterable[tuple[Action, WeightReads]]:
        for phase in self.demand.plan.stages[self.worker].parts:
            if self.demand.schedule.runs_in(phase) == action.phase:
                for reading in self.demand.readings(self.worker, phase):
                    yield replace(action, phase=phase), reading

    def _weight_copy(self, key: Key, reads: Reads) -> None:
        owner, version, ahead = key
        last = max(end for _, end in reads.values())
        pack = self._messages.pack(owner, self.worker, version, ahead, self._filling) if version else None
        for name in reads.keys() & self._casts.keys():
            if pack is None or pack.sizes[name] != self._casts[name]:  # it came in its own type
                self._hold(2 * reads[name][0], 2 * last + 1, self._casts[name])
        if pack is None:  # the initial weights, predicted or not
            self._initial |= {name: max(2 * last + 1, self._initial.get(name, 0)) for name in reads}
            return
        posted = next(
            place
            for place, action in enumerate(self.row)
            for part, reading in self._readings(action)
            if reading.owner == owner and self.demand.newest(part, self.worker, owner, 0) >= version
        )
        self._hold(max(0, 2 * (posted - LOOKAHEAD) - 1), 2 * last + 1, pack.bytes)
        if pack.differences:  # decoded weights have their own memory
            first = min(begin for begin, _ in reads.values())
            self._hold(2 * first, 2 * last + 1, sum(map(self._bytes.__getitem__, reads)))

    def _send(self, version: int, place: int) -> None:
        predicted: set[tuple[int, str]] = set()
        for reader in self.demand.readers(self.worker):
            for message in self.demand.messages(self.worker, reader, version, 0, None):
                pack = self._messages.pack(self.worker, reader, version, message.ahead, self._filling)
                self._sent[place] += pack.bytes
                if message.ahead:
                    predicted |= {(message.ahead, name) for name in message.names}
        for _, name in predicted:
            self._predict(name, 2 * place + 1, 2 * place + 2)

    def _remembered(self) -> int:
        """The last update for the weight form, what repairs keep, and the bases of encoded copies."""
        trained = [p for p in self.demand.plan.owned(self.worker) if p.trained]
        policy, workers = self.demand.policy, range(self.demand.plan.workers)
        held = sum(p.tensor.bytes for p in trained) if policy.weight_form else 0
        for repair in policy.repairs:
            delays = self.demand.delays(self.worker)
            held += sum(repair.copies(late) * self._bytes[name] for name, late in delays.items())
        steady = 4 * self.demand.plan.workers
        for other in workers:
            for owner, reader in {(self.worker, other), (other, self.worker)}:
                if reader in self.demand.readers(owner):
                    held += self._messages.base_bytes(owner, reader, steady, self._filling)
        return held
