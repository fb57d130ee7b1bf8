"""The versions of weights that one worker's actions read: of its own, and of copies of other workers' weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fxpipe.checkpoint.shard import Past, Sent
from fxpipe.observe.watch import Cause
from fxpipe.plan.plan import Plan
from fxpipe.plan.spec import PHASES, Phase
from fxpipe.policy.copy_messages import CopyMessages, Filling
from fxpipe.policy.demand import Demand, WeightReads
from fxpipe.policy.optimizers.predict import Predictor
from fxpipe.runtime.wires.transport import Transport
from fxpipe.runtime.worker.weight_casts import WeightCasts
from fxpipe.runtime.worker.weight_copies import Key, Predictions, Unread, WeightCopies
from fxpipe.schedule.action import Action


@dataclass
class _Argument:
    """The `weights` argument of one phase; frozen weights are already in `weights`."""

    weights: tuple[Any, ...]
    readings: list[WeightReads]
    keys: tuple[Key, ...] = ()  # of the weights in `argument`
    argument: tuple[Any, ...] = field(default=())
    storages: set[int] | None = None  # addresses of what an action reads; None until first used


class ReadVersions:
    """The weights that one worker's forward, backward and weight gradients read.

    Here each part of a stage has its own action: weight gradients are W, even if the schedule runs them in B. Weights
    that stages read in a type of fewer bits are cast once a version, at its first read.

    Args:
        initial: the initial values of all parameters the worker owns or reads, by name.
        parameters: the owned ones by name, live.
        predictor: of the owned trained parameters; None if there are none, or the policy does not predict.
        seed: of the run.

    Attributes:
        live: how many updates the worker's own weights have had.
        predictions: of the live version.
        copies: of its weights on other workers, and of theirs on this one.
    """

    def __init__(
        self,
        plan: Plan,
        worker: int,
        demand: Demand,
        transport: Transport,
        initial: Mapping[str, Tensor],
        parameters: Mapping[str, nn.Parameter],
        predictor: Predictor | None,
        seed: int,
    ) -> None:
        self.worker, self.demand, self.transport = worker, demand, transport
        self.live = 0
        self._readers = demand.readers(worker)
        trained = {name: p for name, p in parameters.items() if demand.parameters[name].trained}
        self.predictions = Predictions(predictor, trained, transport)
        self.copies = WeightCopies(CopyMessages(demand), worker, transport, seed)
        self._held: dict[Key, dict[str, Tensor]] = {}
        self._casts = WeightCasts(plan)
        self._unread = Unread(demand, worker)
        own = demand.readings_of(worker, worker)
        self._counts_own = predictor is not None or any(
            reading.past or self._casts.types.keys() & set(reading.names) for reading in own
        )
        frozen = {n: parameters.get(n, t) for n, t in initial.items() if not demand.parameters[n].trained}
        frozen = {n: self._casts.cast(n, t) for n, t in frozen.items()}
        self._parts: dict[Phase, _Argument] = {}
        for phase in PHASES:
            specs = [demand.parameters[name] for name in plan.stages[worker].part(phase).weights]
            weights = [frozen.get(p.name, parameters.get(p.name)) for p in specs]
            self._parts[phase] = _Argument(tuple(weights), self._readings(phase))
        self._expected: dict[int, int] = {}
        self._initial = {n: t for n, t in initial.items() if n not in parameters and demand.parameters[n].trained}

    def begin(self, start: int, stop: int | None = None, past: Past | None = None, sent: Sent | None = None) -> None:
        """Begin a segment with an empty pipeline, or go on in the middle, as if minibatches had stayed in flight.

        Weight copies of version 0 are the initial weights; those of a later version are sent here.

        Args:
            start: the version of all owners when the segment began.
            past: what actions of the minibatches in flight read of earlier versions of this worker's parameters (see
                `Captures`); kept here from then on.
            sent: what other workers had of them, if it differs.
        """
        assert past is not None or self.live == start, f"worker {self.worker} is at {self.live}, not {start}"
        past, sent = past or {}, sent or {}
        if past and not self._counts_own:
            self._counts_own = True
            self._parts = {p: _Argument(part.weights, self._readings(p)) for p, part in self._parts.items()}
        owners, initial = self._empty(start, stop, self.live), self._initial
        self._initial = {}
        if self.live == 0:
            self.copies.hold_initial(self._readers, self.predictions.trained, sorted(owners), initial)
            for owner in owners:
                for ahead, unread in self._unread.of(owner, 0).items():
                    self._held[owner, 0, ahead] = {name: initial[name] for name in unread.message.names}
                self._expected[owner] = 0
            return
        for owner in owners:
            self._expected[owner] = max(start, self.live - self.demand.reach(owner)) - 1
        for version in range(max(start, self.live - self.demand.reach(self.worker)), self.live):
            for ahead, unread in self._unread.of(self.worker, version).items():
                if self._counts_own:
                    held = past[version, ahead]
                    self._held[self.worker, version, ahead] = {name: held[name] for name in unread.message.names}
            self._send_again(version, past, sent)
        if sent:
            self._send_again(self.live, past, sent)
        else:
            self._send_copies()

    def _empty(self, start: int, stop: int | None, since: int) -> set[int]:
        """Forget what the pipeline has in flight; return the owners of the weight copies that this worker reads."""
        self._unread.begin(start, stop, since)
        self._stop = stop
        self.copies.begin(Filling(start, since))
        self._held.clear()
        self._casts.forget()
        self.predictions.forget_all()
        self._let_go()
        self._open_own()
        owners = {r.owner for part in self._parts.values() for r in part.readings} - {self.worker}
        self._expected = dict.fromkeys(owners, start - 1)
        return owners

    @property
    def start(self) -> int:
        """The first minibatch of the segment."""
        return self._unread.start

    @property
    def since(self) -> int:
        """The first minibatch of the segment that was not over when the worker began or resumed it."""
        return self._unread.since

    def end(self, stop: int, known_to_all: bool = True) -> None:
        """The segment's end is now known: forget what is kept for minibatches from `stop` on.

        If all workers learn it at the same version (`known_to_all`), they stop sending what later minibatches would
        read.
        """
        if known_to_all:
            self._stop = stop
        for key in self._unread.end(stop):
            self._forget(key)

    def flushed(self) -> None:
        """The segment is over: the streams of weight copies end with it."""
        self.copies.begin(self.copies.filling)

    def expect(self, action: Action) -> None:
        """Announce to the transport the weight copies that an action could wait for: the newest that it can read."""
        for reading in self._parts[action.phase].readings:
            owner = reading.owner
            if owner == self.worker:
                continue
            self._expect(owner, self.demand.newest(action, self.worker, owner, self._unread.start))

    def expect_all(self) -> None:
        """The pipeline is empty, and owners did not know the end: announce to the transport all that they have sent."""
        for owner in self._expected:
            self._expect(owner, self.live)

    def read(self, action: Action) -> tuple[Any, ...]:
        """The `weights` argument of an action; waits for weight copies. Actions of the same versions share it."""
        part = self._parts[action.phase]
        if not part.readings:
            return part.weights
        keys = tuple([self._key(reading, action) for reading in part.readings])
        if part.keys != keys:
            weights = list(part.weights)
            for reading, key in zip(part.readings, keys, strict=True):
                tensors = self._casts.read(key, reading.names, self._take)
                for name, position in zip(reading.names, reading.positions, strict=True):
                    weights[position] = tensors[name]
            part.keys, part.argument, part.storages = keys, tuple(weights), None
        return part.argument

    def release(self, action: Action) -> None:
        """An action is over, or left out: forget what no later action reads."""
        for reading in self._parts[action.phase].readings:
            key = self._key(reading, action)
            if self._unread.read(key, reading.key):
                self._forget(key)

    def storages(self, phase: Phase) -> set[int]:
        """The addresses of the weights that the newest action of a phase has read."""
        part = self._parts[phase]
        if part.storages is None:
            weights = part.argument if part.readings else part.weights
            part.storages = {weight.untyped_storage().data_ptr() for weight in weights}
        return part.storages

    def leave(self) -> None:
        """Before the live version changes: keep what this worker's actions will still read of it."""
        live = self.worker, self.live
        for ahead, unread in self._unread.kept(*live).items():
            whole = self._casts.keep((*live, ahead), unread.names, self._take)
            self._held[*live, ahead] = self.predictions.keep(whole, ahead)
        self._casts.forget(lambda key: key[:2] != live or key in self._held)
        self._let_go()

    def advance(self) -> None:
        """The worker's own weights have had another update: send what others read of the new version."""
        self.predictions.forget_all()
        self.live += 1
        self._open_own()
        self._send_copies()

    def _expect(self, owner: int, version: int) -> None:
        while self._expected[owner] < version:
            self._expected[owner] += 1
            for ahead, size in self.copies.coming(owner, self._expected[owner], self._stop):
                self.transport.expect_weights(owner, self._expected[owner], ahead, size)

    def _readings(self, phase: Phase) -> list[WeightReads]:
        readings = self.demand.readings(self.worker, phase)
        return [reading for reading in readings if reading.owner != self.worker or self._counts_own]

    def _key(self, reading: WeightReads, action: Action) -> Key:
        version = self.demand.version(reading, action, self._unread.start)
        return (reading.owner, version, self.demand.ahead(reading, action, version))

    def _open_own(self) -> None:
        """The worker's own weights have a new live version: count its reads from now on."""
        if self._counts_own:
            self._unread.of(self.worker, self.live)

    def _take(self, key: Key, names: Sequence[str]) -> Mapping[str, Tensor]:
        owner, version, ahead = key
        if owner == self.worker and version == self.live:
            return self.predictions.look(names, ahead)
        if key not in self._held:
            assert owner != self.worker, f"version {version} was not kept, live is {self.live}"
            watch = self.transport.watch
            watch.open("receive", Cause("weights", "weights", owner))
            for each, weights in self.copies.receive(owner, version, ahead):
                if each == version or ahead in self._unread.of(owner, each):
                    self._held[owner, each, ahead] = weights
            watch.close()
        return self._held[key]

    def _forget(self, key: Key) -> None:
        """Nothing reads these weights any more; later predictions reuse the memory of a prediction."""
        self._casts.forget(lambda other: other != key)
        owner, version, ahead = key
        copies = self._held.pop(key, {})
        if owner == self.worker and ahead:
            if version == self.live:
                self.predictions.forget(ahead)
            else:
                self.predictions.give_back(copies)
        self._let_go()

    def _let_go(self) -> None:
        for part in self._parts.values():
            part.keys, part.argument = (), ()

    def _send_copies(self) -> None:
        self._send_copies_of(self.live, lambda reader, names, ahead: self.predictions.look(names, ahead))
        self.predictions.forget_all()

    def _send_again(self, version: int, past: Past, sent: Sent) -> None:
        """Send what readers had of a version before the run resumed."""
        encoded = self.copies.encoded
        self._send_copies_of(
            version, lambda reader, names, ahead: sent[version, ahead, reader] if encoded else past[version, ahead]
        )

    def _send_copies_of(self, version: int, look: Callable[[int, tuple[str, ...], int], Mapping[str, Tensor]]) -> None:
        watch = self.transport.watch
        for reader in self._readers:
            for message, sent in self.copies.due(reader, version, self._stop):
                weights = look(reader, message.names, message.ahead)
                watch.open("send", Cause("weights", "weights", reader))
                block = self.copies.write(reader, message, weights)
                if sent:
                    self.transport.send_weights(reader, version, message.ahead, block)
                watch.close()
        self.copies.written(version)
