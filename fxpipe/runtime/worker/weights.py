"""One worker's weights: the parameters it owns, copies of others', and what each action reads of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fxpipe.checkpoint.shard import Past, Sent
from fxpipe.observe.watch import Cause
from fxpipe.plan.spec import PHASES, ParameterSpec, Phase, Plan
from fxpipe.policy.copy_messages import CopyMessages, Filling
from fxpipe.policy.demand import Demand, WeightReads
from fxpipe.runtime.wires.collective import Collective
from fxpipe.runtime.wires.transport import Transport
from fxpipe.runtime.worker.averages import Averages, MovingAverage
from fxpipe.runtime.worker.clip import Clip
from fxpipe.runtime.worker.gradients import GradientSum, ReplicatedSum
from fxpipe.runtime.worker.loss_scaler import LossScaler
from fxpipe.runtime.worker.observer import Observer
from fxpipe.runtime.worker.outer_step import OuterStep
from fxpipe.runtime.worker.shared_update import SharedUpdate
from fxpipe.runtime.worker.staleness import StalenessLog
from fxpipe.runtime.worker.update import Updater
from fxpipe.runtime.worker.update_notes import UpdateNotes
from fxpipe.runtime.worker.weight_copies import Key, Predictions, Unread, WeightCopies
from fxpipe.schedule.action import Action
from fxpipe.task.model_file import Task

OUTER, OUTER_MOMENTUM = "outer", "outer_momentum"
"""Where the state has that of outer steps: what is each replica's own, and what replica 0 tells for all."""


@dataclass
class _Argument:
    """The `weights` argument of one phase; the weights that never change are already in `weights`."""

    weights: tuple[Any, ...]
    readings: list[WeightReads]
    keys: tuple[Key, ...] = ()  # those that `argument` was made from
    argument: tuple[Any, ...] = field(default=())
    storages: set[int] | None = None  # addresses of what an action reads, once they are asked for


class WeightStore:
    """What one worker's forward, backward and weight gradients read, and where its gradients go.

    Where these are parts of a stage, an action here is that of a part: W's, whether or not the schedule has it.

    Args:
        initial: the initial values of all parameters the worker owns or reads, by name; the store takes them over.
        task: makes the optimizer of the owned trained parameters, if there are any, and its scheduler.
        keep_gradients: `gradients()` is wanted; otherwise they are freed right after the update.
        clip: scales the gradients before every update; None leaves them as they are.
        seed: of the run, for random numbers in the optimizer.
        collective: this replica's end of what the worker's replicas exchange; None where it has no others.

    Attributes:
        parameters: the owned ones by name, live: the optimizer updates them in place.
        version: how many updates this worker has made.
        due: the minibatch whose update was begun; None between updates.
        summed: of how many minibatches it has all gradients: where updates are late, of one more between two actions.
        updater: makes them.
        predictions: of the live version.
        weight_copies: what other workers have of its weights, and it of theirs.
        averages: of the trained parameters; None unless they are asked for.
        staleness: compares what forwards used with what their updates met; None unless it is asked for.
        outer: brings the weights of replicas that train apart together; None where they do not.
        shared: what replicas exchange around an update that they share out; None where each makes all of it.
        observers: what follows this worker.
    """

    def __init__(
        self,
        plan: Plan,
        worker: int,
        demand: Demand,
        transport: Transport,
        initial: Mapping[str, Tensor],
        task: Task,
        keep_gradients: bool = False,
        clip: Clip | None = None,
        scaler: LossScaler | None = None,
        seed: int = 0,
        collective: Collective | None = None,
    ) -> None:
        self.worker = worker
        self.demand = demand
        self.transport = transport
        self.version = self.summed = 0
        self.averages: Averages | None = None
        self.staleness: StalenessLog | None = None
        self.outer: OuterStep | None = None
        self.observers: list[Observer] = []
        self.parameters: dict[str, nn.Parameter] = {
            p.name: nn.Parameter(initial[p.name], requires_grad=p.trained) for p in plan.owned(worker)
        }
        self.trained = {p.name: self.parameters[p.name] for p in plan.owned(worker) if p.trained}
        index = {name: i for i, name in enumerate(self.trained)}
        live = list(self.trained.values())
        order = [index[demand.parameters[n].name] for n in plan.stages[worker].gradients]
        divisor = 1 if plan.scales_loss else plan.loss_divisor
        self._sum = GradientSum(live, order, divisor)
        self._over_replicas: ReplicatedSum | None = None
        self.shared: SharedUpdate | None = None
        if collective is not None:
            buckets = {
                bucket.name: [index[demand.parameters[name].name] for name in bucket.parameters]
                for bucket in plan.stages[worker].buckets
            }
            updaters = plan.updaters(worker)
            self._sum = self._over_replicas = ReplicatedSum(
                live, order, divisor, collective, buckets, [updaters[name] for name in self.trained if updaters]
            )
            if updaters:
                self.shared = SharedUpdate(self.trained, updaters, buckets, collective)
                if clip is not None:
                    clip.measure_by(self.shared.norms)
        self.updater = Updater(
            worker=worker,
            trained=self.trained,
            gradients=self._sum,
            policy=demand.policy,
            delays={self.trained[name]: delay for name, delay in demand.delays(worker).items()},
            task=task,
            clip=clip,
            scaler=scaler,
            notes=UpdateNotes(worker, plan.workers, transport, [f for f in (scaler, clip) if f is not None], live),
            keep_gradients=keep_gradients,
            seed=seed,
            own=None if self.shared is None else self.shared.own,
            replica=0 if collective is None or self.shared is None else collective.replica,
        )
        self.predictions = Predictions(self.updater.predictor, self.trained, transport)
        self._readers = demand.readers(worker)
        self.weight_copies = WeightCopies(CopyMessages(demand), worker, transport, seed)
        self._copies: dict[Key, dict[str, Tensor]] = {}
        self._unread = Unread(demand, worker)
        own = demand.readings_of(worker, worker)
        self._counts_own = self.updater.predictor is not None or any(reading.past for reading in own)
        self._frozen = {n: t for n, t in initial.items() if not demand.parameters[n].trained}
        self._parts = {phase: self._part(plan, phase, self._frozen) for phase in PHASES}
        self._expected: dict[int, int] = {}
        self.due: int | None = None
        self._initial = {n: t for n, t in initial.items() if n not in self.parameters and demand.parameters[n].trained}

    def begin(self, start: int, stop: int | None = None) -> None:
        """Begin a segment: the pipeline is empty, every owner is at version `start`.

        The weight copies of version 0 are the initial weights; those of a later start are sent here.
        """
        assert self.version == start, f"worker {self.worker} is at version {self.version}, not {start}"
        owners = self._empty(start, stop, start)
        for each in self.updater.notes.fields:
            each.begin()
        if start > 0:
            self._send_copies()
        else:
            self.weight_copies.hold_initial(self._readers, self.trained, sorted(owners), self._initial)
            for owner in owners:
                for ahead, unread in self._unread.of(owner, 0).items():
                    self._copies[owner, 0, ahead] = {name: self._initial[name] for name in unread.message.names}
                self._expected[owner] = 0
            self._initial = {}
        if self.staleness is not None:
            self.staleness.begin()
            self.staleness.live(start, start, self.predictions.look)
            self.predictions.forget_all()

    def go_on(self, start: int, past: Past, sent: Sent, stop: int | None = None) -> None:
        """Go on in the middle of a segment that began at `start`, as if minibatches had been in flight all the time.

        Args:
            past: of this worker's parameters, what actions of the minibatches in flight read of earlier versions
                (see `Captures`); the store takes it over.
            sent: what other workers had of them, where that is something else.
        """
        if past and not self._counts_own:
            self._counts_own = True
            self._parts = {phase: self._part(self.demand.plan, phase, self._frozen) for phase in PHASES}
        owners = self._empty(start, stop, self.version)
        for owner in owners:
            self._expected[owner] = max(start, self.version - self.demand.reach(owner)) - 1
        for version in range(max(start, self.version - self.demand.reach(self.worker)), self.version):
            for ahead, unread in self._unread.of(self.worker, version).items():
                if self._counts_own:
                    held = past[version, ahead]
                    self._copies[self.worker, version, ahead] = {name: held[name] for name in unread.message.names}
            self._send_again(version, past, sent)
        self._initial = {}
        if sent:
            self._send_again(self.version, past, sent)
        else:
            self._send_copies()

    def _empty(self, start: int, stop: int | None, since: int) -> set[int]:
        """Forget all that a pipeline has in flight; return the owners of the weight copies that this worker reads."""
        self._unread.begin(start, stop, since)
        self._stop = stop
        self.weight_copies.begin(Filling(start, since))
        self.due = None
        self.summed = self.version
        self._copies.clear()
        self.predictions.forget_all()
        self._let_go()
        self._open_own()
        if self.outer is not None:
            self.outer.go_on()
        owners = {r.owner for part in self._parts.values() for r in part.readings} - {self.worker}
        self._expected = dict.fromkeys(owners, start - 1)
        return owners

    @property
    def start(self) -> int:
        """The minibatch that the segment began with."""
        return self._unread.start

    def state(self) -> dict[str, Any]:
        """What a run needs to go on, but for the parameters themselves and `past`; live tensors."""
        averages = self.averages.read() if isinstance(self.averages, MovingAverage) else None
        found = {"updater": self.updater.state(), "averages": averages}
        if self.outer is not None:
            found[OUTER] = self.outer.state(self.version)
            if self.outer.first:
                found[OUTER_MOMENTUM] = self.outer.momentum()
        return found

    @property
    def saved(self) -> dict[str, Tensor]:
        """The parameters as a checkpoint's model has them: with the common weights of replicas that train apart."""
        return {**self.parameters, **({} if self.outer is None else self.outer.common())}

    def load(self, found: Sequence[dict[str, Any]], version: int, same: bool) -> None:
        """Go on from what `state` gave; the parameters themselves have been loaded.

        Args:
            found: this worker's if the cuts are the `same`, else that of all workers.
        """
        self.version = version
        self.updater.load([each["updater"] for each in found], version, same)
        if self.outer is not None:
            self.outer.load(found[0].get(OUTER) if same else None, found[0].get(OUTER_MOMENTUM, {}), version)
        averages = {name: value for each in found for name, value in (each["averages"] or {}).items()}
        if isinstance(self.averages, MovingAverage) and averages:
            self.averages.load(averages, version)

    def end(self, stop: int, told: bool = True) -> None:
        """The segment's end is now known: forget what is kept for minibatches from `stop` on.

        Args:
            told: all workers hear of it at one version; else they still send each other what later ones would read.
        """
        if told:
            self._stop = stop
        for key in self._unread.end(stop):
            self._forget(key)

    def flushed(self) -> None:
        """The segment is over: the streams of weight copies end with it."""
        self.weight_copies.begin(self.weight_copies.filling)

    def expect(self, action: Action) -> None:
        """Tell the transport which weight copies an action could wait for: those of the newest versions it can see."""
        self.updater.notes.expect(action, self.updated_by(action))
        for reading in self._parts[action.phase].readings:
            owner = reading.owner
            if owner == self.worker:
                continue
            self._expect(owner, self.demand.newest(action, self.worker, owner, self._unread.start))

    def expect_all(self) -> None:
        """The pipeline is empty, and its owners did not know the end: tell the transport of all that they have sent."""
        for owner in self._expected:
            self._expect(owner, self.version)

    def read(self, action: Action) -> tuple[Any, ...]:
        """The `weights` argument for an action; waits for weight copies. Actions of the same versions share it."""
        part = self._parts[action.phase]
        if not part.readings:
            return part.weights
        keys = tuple([self._key(reading, action) for reading in part.readings])
        if part.keys != keys:
            weights = list(part.weights)
            for reading, key in zip(part.readings, keys, strict=True):
                tensors = self._take(key, reading.names)
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

    def add(self, phase: Phase, gradients: Sequence[Tensor | None], sent: set[int]) -> None:
        """Add a microbatch's gradients, made in a phase; weights that it read and what it `sent` are never written."""
        self._sum.add(gradients, self.storages(phase) | sent)

    def storages(self, phase: Phase) -> set[int]:
        """The addresses of the weights that the newest action of a phase has read."""
        part = self._parts[phase]
        if part.storages is None:
            weights = part.argument if part.readings else part.weights
            part.storages = {weight.untyped_storage().data_ptr() for weight in weights}
        return part.storages

    def updated_by(self, action: Action) -> int | None:
        """The minibatch whose update is part of an action; None if no update is, or it was made before a checkpoint."""
        return self.demand.schedule.updated_by(action, self._unread.since)

    @property
    def owed(self) -> int | None:
        """After the last action of a row: the minibatch whose update only a flush makes; None if all are made."""
        return self.version if self.due is None and self.version < self.summed else None

    def catch_up(self) -> None:
        """The pipeline is empty: begin the update that is owed, as `update`."""
        minibatch = self.owed
        assert minibatch is not None
        self.updater.notes.expect(None, minibatch)
        self.update(minibatch)

    def update(self, minibatch: int) -> None:
        """The minibatch's gradients are there: `gather`, the notes and `settle`, before the next action, update."""
        assert self.version == minibatch < self.summed, f"update {self.version} by minibatch {minibatch}"
        self.due = minibatch

    def reduce(self, bucket: str, minibatch: int, gradients: Sequence[Tensor | None]) -> None:
        """The last microbatch's gradients of a bucket are there: begin to add up the replicas' sums."""
        assert self._over_replicas is not None
        self._over_replicas.start(bucket, minibatch, gradients)

    def close_sum(self, minibatch: int) -> None:
        """All gradients of a minibatch are added up here."""
        self._sum.close(minibatch)
        self.summed = minibatch + 1

    def gather(self) -> None:
        """Take the gradients of the update that is due; waits for other replicas."""
        minibatch = self.due
        assert minibatch is not None
        self._keep_past()  # first: some predictions need the last update's gradient, which goes now
        self.updater.gather()
        if self.shared is not None and self.updater.clip is not None:
            self.shared.start_norms(minibatch)

    def settle(self) -> int:
        """Make the update that was announced, and send weight copies of the new version; returns its minibatch.

        Waits for other replicas, and for what the worker before tells.

        Raises:
            RunError: the user's optimizer or scheduler failed.
        """
        minibatch, self.due = self.due, None
        assert minibatch is not None
        if self.staleness is not None and self.updater.optimizer is not None:
            self.staleness.meets(minibatch, self.updater.optimizer.param_groups)
        self.updater.step(minibatch)
        if self.outer is not None:
            self.outer.begin(minibatch + 1)
            self.outer.end(minibatch + 1)
        if self.shared is not None:
            self.shared.start_weights(minibatch)
            self.shared.take_weights(minibatch)
        if self.averages is not None:
            self.averages.update()
        self.predictions.forget_all()
        self.version += 1
        self._open_own()
        self._send_copies()
        if self.staleness is not None:
            self.staleness.live(self.version, self._unread.start, self.predictions.look)
            self.predictions.forget_all()
        return minibatch

    def gradients(self) -> dict[str, Tensor]:
        """The mean gradients of the last update, by parameter name (needs `keep_gradients`)."""
        return {name: p.grad.detach().clone() for name, p in self.trained.items() if p.grad is not None}

    def _expect(self, owner: int, version: int) -> None:
        while self._expected[owner] < version:
            self._expected[owner] += 1
            for ahead, size in self.weight_copies.coming(owner, self._expected[owner], self._stop):
                self.transport.expect_weights(owner, self._expected[owner], ahead, size)

    def _part(self, plan: Plan, phase: Phase, frozen: Mapping[str, Tensor]) -> _Argument:
        names = plan.stages[self.worker].part(phase).weights
        specs: list[ParameterSpec] = [self.demand.parameters[name] for name in names]
        weights = tuple(
            self.parameters[p.name] if p.owner == self.worker else None if p.trained else frozen[p.name] for p in specs
        )
        readings = [
            reading
            for reading in self.demand.readings(self.worker, phase)
            if reading.owner != self.worker or self._counts_own
        ]
        return _Argument(weights, readings)

    def _key(self, reading: WeightReads, action: Action) -> Key:
        version = self.demand.version(reading, action, self._unread.start)
        return (reading.owner, version, self.demand.ahead(reading, action, version))

    def _open_own(self) -> None:
        """The worker's own weights have a new live version: count its reads from now on."""
        if self._counts_own:
            self._unread.of(self.worker, self.version)

    def _take(self, key: Key, names: Sequence[str]) -> Mapping[str, Tensor]:
        owner, version, ahead = key
        if owner == self.worker and version == self.version:
            return self.predictions.look(names, ahead)
        if key not in self._copies:
            assert owner != self.worker, f"version {version} was not kept, live is {self.version}"
            watch = self.transport.watch
            watch.open("receive", Cause("weights", "weights", owner))
            for each, weights in self.weight_copies.receive(owner, version, ahead):
                if each == version or ahead in self._unread.of(owner, each):
                    self._copies[owner, each, ahead] = weights
            watch.close()
        return self._copies[key]

    def _forget(self, key: Key) -> None:
        """Nothing reads these weights any more; later predictions reuse the memory of a prediction."""
        owner, version, ahead = key
        copies = self._copies.pop(key, {})
        if owner == self.worker and ahead:
            if version == self.version:
                self.predictions.forget(ahead)
            else:
                self.predictions.give_back(copies)
        self._let_go()

    def _let_go(self) -> None:
        for part in self._parts.values():
            part.keys, part.argument = (), ()

    def _send_copies(self) -> None:
        self._send_copies_of(self.version, lambda reader, names, ahead: self.predictions.look(names, ahead))
        self.predictions.forget_all()

    def _send_again(self, version: int, past: Past, sent: Sent) -> None:
        """Send what readers had of a version before the store went on."""
        encoded = self.weight_copies.encoded
        self._send_copies_of(
            version, lambda reader, names, ahead: sent[version, ahead, reader] if encoded else past[version, ahead]
        )

    def _send_copies_of(self, version: int, look: Callable[[int, tuple[str, ...], int], Mapping[str, Tensor]]) -> None:
        watch = self.transport.watch
        for reader in self._readers:
            for message, sent in self.weight_copies.due(reader, version, self._stop):
                weights = look(reader, message.names, message.ahead)
                watch.open("send", Cause("weights", "weights", reader))
                block = self.weight_copies.write(reader, message, weights)
                if sent:
                    self.transport.send_weights(reader, version, message.ahead, block)
                watch.close()
        self.weight_copies.written(version)

    def _keep_past(self) -> None:
        """Before the live version changes: keep what this worker's actions have yet to read of it."""
        for observer in self.observers:
            observer.leaving(self.version)
        for ahead, unread in self._unread.kept(self.worker, self.version).items():
            self._copies[self.worker, self.version, ahead] = self.predictions.keep(unread.names, ahead)
        self._let_go()
