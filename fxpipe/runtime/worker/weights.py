"""One worker's weights and their updates; `versions.py` has the versions that actions read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fxpipe.checkpoint.shard import Past, Sent
from fxpipe.observe.staleness import StalenessLog
from fxpipe.plan.spec import Phase, Plan
from fxpipe.policy.demand import Demand
from fxpipe.runtime.wires.collective import Collective
from fxpipe.runtime.wires.transport import Transport
from fxpipe.runtime.worker.averages import Averages, MovingAverage
from fxpipe.runtime.worker.clip import Clip
from fxpipe.runtime.worker.gradients import GradientSum, ReplicatedSum, SharedUpdate
from fxpipe.runtime.worker.loss_scaler import LossScaler
from fxpipe.runtime.worker.observer import Observer
from fxpipe.runtime.worker.outer_step import OuterStep
from fxpipe.runtime.worker.update import Updater
from fxpipe.runtime.worker.update_notes import UpdateNotes
from fxpipe.runtime.worker.versions import ReadVersions
from fxpipe.schedule.action import Action
from fxpipe.task.model_file import Task

OUTER, OUTER_MOMENTUM = "outer", "outer_momentum"
"""Keys of the state of outer steps: each replica's own, and the momentum, which replica 0 saves for all."""


class WeightStore:
    """The parameters that one worker owns, their gradients, and their updates.

    Args:
        initial: the initial values of all parameters the worker owns or reads, by name; the store takes them over.
        task: makes the optimizer of the owned trained parameters, if there are any, and its scheduler.
        keep_gradients: keep gradients for `gradients()`; otherwise they are freed right after the update.
        clip: scales the gradients before every update; None leaves them as they are.
        seed: of the run, for random numbers in the optimizer.
        collective: what this replica exchanges with the worker's other replicas; None if there are none.

    Attributes:
        parameters: the owned ones by name, live: the optimizer updates them in place.
        versions: the versions that actions read, of these weights and of other workers'.
        due: the minibatch whose update was begun; None between updates.
        summed: the number of minibatches whose gradients are complete; with late updates it may be one more than
            `version` between two actions.
        updater: makes the updates.
        averages: of the trained parameters; None unless the run asks for them.
        staleness: compares the weights of forwards with those that their updates change; None unless asked for.
        outer: makes outer steps, if replicas train separately; else None.
        shared: the exchange of an update that replicas share; None if each replica makes all of it.
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
        self.summed = 0
        self.due: int | None = None
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
        predictor = self.updater.predictor
        self.versions = ReadVersions(plan, worker, demand, transport, initial, self.parameters, predictor, seed)

    def begin(self, start: int, stop: int | None = None) -> None:
        """Begin a segment: the pipeline is empty, every owner is at version `start`; see `ReadVersions.begin`."""
        self._empty()
        for field in self.updater.notes.fields:
            field.begin()
        self.versions.begin(start, stop)
        if self.staleness is not None:
            self.staleness.begin()
            self._log_staleness()

    def go_on(self, start: int, past: Past, sent: Sent, stop: int | None = None) -> None:
        """Resume in the middle of a segment; see `ReadVersions.go_on`."""
        self._empty()
        self.versions.go_on(start, past, sent, stop)

    def _empty(self) -> None:
        """Forget the begun update of an interrupted pipeline."""
        self.due = None
        self.summed = self.version
        if self.outer is not None:
            self.outer.go_on()

    @property
    def version(self) -> int:
        """How many updates this worker has made."""
        return self.versions.live

    def state(self) -> dict[str, Any]:
        """What a run needs to continue, except the parameters and what `versions` keeps; live tensors."""
        averages = self.averages.read() if isinstance(self.averages, MovingAverage) else None
        found = {"updater": self.updater.state(), "averages": averages}
        if self.outer is not None:
            found[OUTER] = self.outer.state(self.version)
            if self.outer.first:
                found[OUTER_MOMENTUM] = self.outer.momentum()
        return found

    @property
    def saved(self) -> dict[str, Tensor]:
        """The parameters for a checkpoint; if replicas train separately, their common weights."""
        return {**self.parameters, **({} if self.outer is None else self.outer.common())}

    def load(self, found: Sequence[dict[str, Any]], version: int, same: bool) -> None:
        """Continue from what `state` gave; the parameters themselves have been loaded.

        Args:
            found: this worker's if the cuts are the `same`, else all workers'.
        """
        self.versions.live = version
        self.updater.load([each["updater"] for each in found], version, same)
        if self.outer is not None:
            self.outer.load(found[0].get(OUTER) if same else None, found[0].get(OUTER_MOMENTUM, {}), version)
        averages = {name: value for each in found for name, value in (each["averages"] or {}).items()}
        if isinstance(self.averages, MovingAverage) and averages:
            self.averages.load(averages, version)

    def expect(self, action: Action) -> None:
        """Announce the notes and weight copies that an action needs, some actions before it."""
        self.updater.notes.expect(action, self.updated_by(action))
        self.versions.expect(action)

    def add(self, phase: Phase, gradients: Sequence[Tensor | None], sent: set[int]) -> None:
        """Add a microbatch's gradients of a phase; never writes to weights that it read or values that it `sent`."""
        self._sum.add(gradients, self.versions.storages(phase) | sent)

    def updated_by(self, action: Action) -> int | None:
        """The minibatch whose update is part of an action; None if no update is, or it was made before a checkpoint."""
        return self.demand.schedule.updated_by(action, self.versions.since)

    @property
    def owed(self) -> int | None:
        """After the last action of a row: the minibatch that only a flush updates; None if all updates are made."""
        return self.version if self.due is None and self.version < self.summed else None

    def catch_up(self) -> None:
        """The pipeline is empty: begin the update of the minibatch `owed`, as `update`."""
        minibatch = self.owed
        assert minibatch is not None
        self.updater.notes.expect(None, minibatch)
        self.update(minibatch)

    def update(self, minibatch: int) -> None:
        """The minibatch's gradients are complete: begin its update, which `gather`, notes and `settle` then make."""
        assert self.version == minibatch < self.summed, f"update {self.version} by minibatch {minibatch}"
        self.due = minibatch

    def reduce(self, bucket: str, minibatch: int, gradients: Sequence[Tensor | None]) -> None:
        """The last microbatch's gradients of a bucket are made: begin to add up the replicas' sums."""
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
        for observer in self.observers:
            observer.leaving(self.version)
        self.versions.leave()  # first: some predictions need the last update's gradient, which `gather` replaces
        self.updater.gather()
        if self.shared is not None and self.updater.clip is not None:
            self.shared.start_norms(minibatch)

    def settle(self) -> int:
        """Make the announced update, and send weight copies of the new version; returns the minibatch.

        Waits for other replicas, and for the note of the worker before.

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
        self.versions.advance()
        if self.staleness is not None:
            self._log_staleness()
        return minibatch

    def _log_staleness(self) -> None:
        assert self.staleness is not None
        self.staleness.live(self.version, self.versions.start, self.versions.predictions.look)
        self.versions.predictions.forget_all()

    def gradients(self) -> dict[str, Tensor]:
        """The mean gradients of the last update, by parameter name (needs `keep_gradients`)."""
        return {name: p.grad.detach().clone() for name, p in self.trained.items() if p.grad is not None}
