"""One worker's weights and the parts of their updates; `versions.py` has the versions that actions read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fxpipe.checkpoint.shard import Past, Sent
from fxpipe.plan.spec import Phase
from fxpipe.policy.optimizers.predict import Predictor
from fxpipe.runtime.wires.transport import Transport
from fxpipe.runtime.worker.averages import Averages
from fxpipe.runtime.worker.between_replicas import OneReplica
from fxpipe.runtime.worker.clip import Clip
from fxpipe.runtime.worker.gradients import GradientSum, ReplicatedSum, SharedUpdate, buckets_of
from fxpipe.runtime.worker.loss_scaler import LossScaler
from fxpipe.runtime.worker.outer_step import OuterMomentum, OuterStep
from fxpipe.runtime.worker.part import UpdateNotes, UpdatePart
from fxpipe.runtime.worker.setting import Kind, WorkerSetting
from fxpipe.runtime.worker.staleness import StalenessLog
from fxpipe.runtime.worker.update import AroundStep, Updater
from fxpipe.runtime.worker.versions import ReadVersions
from fxpipe.schedule.action import Action
from fxpipe.task.parameter_attributes import hang

PARTS: tuple[type[UpdatePart], ...] = (
    LossScaler,
    Clip,
    Updater,
    AroundStep,
    OuterStep,
    OuterMomentum,
    SharedUpdate,
    Averages,
    OneReplica,
    StalenessLog,
)
"""The parts of an update, in the order that its numbers depend on; each may ask the setting for those before it."""


def forms() -> dict[str, Any]:
    """The types of the states of all parts, by their names in checkpoints."""
    return {name: form for kind in PARTS for name, form in kind.forms().items()}


class WeightStore:
    """The parameters that one worker owns, their gradients, and their updates.

    Args:
        setting: gets the owned parameters and the parts of their updates here.
        initial: the initial values of all parameters the worker owns or reads, by name; the store takes them over.

    Attributes:
        parameters: the owned ones by name, live: the optimizer updates them in place.
        trained: those of them that are trained.
        versions: the versions that actions read, of these weights and of other workers'.
        due: the minibatch whose update was begun; None between updates.
        summed: the number of minibatches whose gradients are complete; with late updates it may be one more than
            `version` between two actions.
        parts: of the updates, in their order; `updater`, which has the optimizer, is one of them.
        notes: exchange the parts' numbers with other workers.
        observers: what follows this worker.
    """

    def __init__(self, setting: WorkerSetting, transport: Transport, initial: Mapping[str, Tensor]) -> None:
        plan, worker = setting.plan, setting.worker
        self.worker, self.setting, self.transport = worker, setting, transport
        self.demand = demand = setting.recipe.demand
        self.summed = 0
        self.due: int | None = None
        self.observers = setting.observers
        setting.parameters |= {
            p.name: hang(nn.Parameter(initial[p.name], requires_grad=p.trained), p.name, p.attributes)
            for p in plan.owned(worker)
        }
        self.parameters, self.trained = setting.parameters, setting.trained
        index = {name: i for i, name in enumerate(self.trained)}
        live = list(self.trained.values())
        order = [index[demand.parameters[n].name] for n in plan.stages[worker].gradients]
        divisor = 1 if plan.scales_loss else plan.loss_divisor
        self._sum = GradientSum(live, order, divisor)
        self._over_replicas: ReplicatedSum | None = None
        if setting.collective is not None and plan.outer is None:
            self._sum = self._over_replicas = ReplicatedSum(
                live, order, divisor, setting.collective, buckets_of(setting), list(setting.shares.values())
            )
        for kind in PARTS:
            setting.parts.extend(kind.of(setting))
        self.parts = setting.parts
        updater = setting.part(Updater)
        assert updater is not None
        self.updater = updater
        self.notes = UpdateNotes(worker, plan.workers, transport, self.parts)
        around = [part.work for part in self.parts if isinstance(part, AroundStep)]
        predictor = next((work for work in around if isinstance(work, Predictor)), None)
        seed = setting.options.seed
        self.versions = ReadVersions(plan, worker, demand, transport, initial, self.parameters, predictor, seed)

    def part(self, kind: type[Kind]) -> Kind | None:
        """The part of the updates of a class; None if they have none."""
        return self.setting.part(kind)

    def begin(self, start: int, stop: int | None = None, past: Past | None = None, sent: Sent | None = None) -> None:
        """Begin a segment with an empty pipeline, or go on in the middle of it; see `ReadVersions.begin`."""
        self.due = None  # of an interrupted pipeline
        self.summed = self.version
        for part in self.parts:
            part.begin()
        self.versions.begin(start, stop, past, sent)
        for part in self.parts if past is None else ():
            part.emptied()
            part.reached(self.versions)

    @property
    def version(self) -> int:
        """How many updates this worker has made."""
        return self.versions.live

    @property
    def norm(self) -> float | None:
        """The norm of all workers' gradients at the last update, if they are clipped (see `Clip.norm`)."""
        clip = self.part(Clip)
        return None if clip is None else clip.norm

    def state(self) -> dict[str, Any]:
        """By part's entry, what a run needs to continue, except the parameters and what `versions` keeps; live tensors.

        Another replica than the first leaves out what all have alike.
        """
        parts = [part for part in self.parts if part.entry and not (part.alike and self.setting.replica)]
        states = {part.entry: part.state(self.version) for part in parts}
        return {name: state for name, state in states.items() if state is not None}

    @property
    def saved(self) -> dict[str, Tensor]:
        """The parameters for a checkpoint; if replicas train separately, their common weights."""
        return dict(self.parameters) | {name: value for part in self.parts for name, value in part.common().items()}

    def load(self, states: Sequence[Mapping[str, Any]], version: int, same: bool) -> None:
        """Continue from what `state` gave; the parameters themselves have been loaded.

        Args:
            states: this worker's if the cuts are the `same`, else all workers'.
        """
        self.versions.live = version
        for part in self.parts:
            part.load([state[part.entry] for state in states if part.entry in state], version, same)

    def expect(self, action: Action) -> None:
        """Announce the notes and weight copies that an action needs, some actions before it."""
        self.notes.expect(action, self.updated_by(action))
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
        self.notes.expect(None, minibatch)
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
        self.versions.leave()  # first: some predictions need the last update's gradient, which is replaced here
        for parameter, gradient in zip(self.trained.values(), self._sum.take(), strict=True):
            parameter.grad = gradient
        for part in self.parts:
            part.gathered(minibatch)

    def settle(self) -> int:
        """Make the announced update, and send weight copies of the new version; returns the minibatch.

        Waits for other replicas, and for the note of the worker before.
        """
        minibatch, self.due = self.due, None
        assert minibatch is not None
        self.notes.apply(minibatch)
        self.versions.advance()
        for part in self.parts:
            part.reached(self.versions)
        return minibatch

    def gradients(self) -> dict[str, Tensor]:
        """The mean gradients of the last update, by parameter name (needs `keep_gradients`)."""
        return {name: p.grad.detach().clone() for name, p in self.trained.items() if p.grad is not None}
