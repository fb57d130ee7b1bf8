"""One worker's update: takes gradients, makes a step of the optimizer, and predicts later weights from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.checkpoint.optimizer_state import (
    load_optimizer_state,
    load_scheduler_state,
    optimizer_state,
    scheduler_state,
)
from fxpipe.checkpoint.unsaved import UnsavedState
from fxpipe.errors import PolicyError, RunError, TaskError, listed, near
from fxpipe.optimizer.hook import make_optimizer
from fxpipe.policy.base import Policy
from fxpipe.policy.optimizers.predict import Predictor
from fxpipe.policy.optimizers.rules import rate_of
from fxpipe.policy.optimizers.update_repair import UpdateRepair
from fxpipe.random_state import random_state_kept, seed_generators, seed_of
from fxpipe.runtime.wires.collective import Collective
from fxpipe.runtime.worker.between_replicas import check_optimizers_alike
from fxpipe.runtime.worker.clip import Clip
from fxpipe.runtime.worker.gradients import GradientSum
from fxpipe.runtime.worker.loss_scaler import LossScaler
from fxpipe.runtime.worker.update_notes import UpdateNotes
from fxpipe.task.callbacks import CALLBACKS
from fxpipe.task.model_file import Task
from fxpipe.task.paced_scheduler import paced, without_order_warning
from fxpipe.task.several_optimizers import may_draw
from fxpipe.task.what_trains import freezes_or_thaws


class Updater:
    """The optimizer of one worker's trained parameters, with its scheduler, clipping, prediction and repairs.

    Args:
        trained: the parameters by name; none on a worker that trains nothing.
        gradients: sums the backwards' gradients for the next update.
        delays: how many updates late each parameter's gradients are, for repairs.
        task: its `optimizer` is called with the (name, parameter) pairs, if there are any, and its `lr_scheduler` with
            that optimizer. The scheduler makes a step after every update, epoch or evaluation.
        notes: exchange numbers of clipping and loss scaling with other workers.
        keep_gradients: leave them in `grad` until the next update.
        own: the trained parameters that are updated here, if replicas share the update; None for all.
        replica: which replica this is, if they share the update: each has its own random numbers.
        seed: of the run. The optimizer's random numbers depend on it, the worker and the update; the scheduler's on it
            and the update only, so all workers have the same rates. The process's random state does not change.

    Attributes:
        optimizer: None if nothing is trained: the worker owns no parameters, or the user's optimizer takes none.
        per_epoch: the scheduler makes a step after every epoch.
        steps_per_epoch: updates in an epoch; known before the first update if `per_epoch`.
        metric: the scheduler makes a step after every evaluation, with this metric; None if it does not.

    Raises:
        TaskError: a hook of the user returned no optimizer of these parameters, or no scheduler.
        PolicyError: the policy has an option that does not work with this optimizer.
    """

    def __init__(
        self,
        *,
        worker: int,
        trained: Mapping[str, nn.Parameter],
        gradients: GradientSum,
        policy: Policy,
        delays: Mapping[Tensor, int],
        task: Task,
        clip: Clip | None,
        scaler: LossScaler | None,
        notes: UpdateNotes,
        keep_gradients: bool,
        seed: int,
        own: Mapping[str, nn.Parameter] | None = None,
        replica: int = 0,
    ) -> None:
        self.worker = worker
        self._place = (worker, replica) if replica else (worker,)
        updated = trained if own is None else own
        self.parameters = list(trained.values())
        self._names = {id(parameter): name for name, parameter in trained.items()}
        self._sum = gradients
        self.clip, self.scaler, self.notes = clip, scaler, notes
        self.scheduler: Any = None
        self.per_epoch = False
        self.steps_per_epoch: int | None = None
        self.metric: str | None = None
        self._evaluated = 0  # the newest version whose metric the scheduler has had
        self._metric_due: tuple[int, float] | None = None  # a version, and the metric for the scheduler's next step
        self._used: float | None = None
        self.unsaved: UnsavedState | None = None
        self.predictor: Predictor | None = None
        self.repairs: list[UpdateRepair] = []
        self._seed = seed
        self._set: list[tuple[int, list[float]]] = []  # updates, and the learning rates set for them
        self._device_type = self.parameters[0].device.type if self.parameters else "cpu"
        self._keeps = keep_gradients
        with random_state_kept():
            self._reseed(*self._place, "optimizer")
            self.optimizer = make_optimizer(task.optimizer, list(updated.items())) if updated else None
            if self.optimizer is None:
                return
            if frozen := [name for name in updated if name in self.updated and not updated[name].requires_grad]:
                raise freezes_or_thaws("optimizer()", listed(frozen, 6), task.file)
            self._reseed("lr_scheduler")
            made = paced(task.lr_scheduler(self.optimizer), self.optimizer)
            if made is not None:
                self.scheduler, self.per_epoch, self.metric = made.scheduler, made.per_epoch, made.metric
        callbacks = [function for name in CALLBACKS if (function := getattr(task.hooks, name)) is not None]
        self.unsaved = UnsavedState(self.optimizer, self.scheduler, callbacks)
        if policy.predicts:
            self.predictor = Predictor(self.optimizer, self.parameters, weight_form=policy.weight_form)
        self.repairs = [repair.kind(self.optimizer, delays) for repair in policy.repairs]

    def compare_replicas(self, collective: Collective | None, device: torch.device) -> None:
        """Check that all replicas of the worker have the same optimizer: they make the same update.

        Raises:
            RunError: a replica has a different one.
        """
        if collective is not None:
            check_optimizers_alike(self.worker, self.optimizer, self.scheduler, self._names, collective, device)

    @property
    def updated(self) -> set[str]:
        """The names of the parameters that the optimizer updates here."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return {self._names[id(parameter)] for group in groups for parameter in group["params"]}

    @property
    def lr(self) -> float | None:
        """The learning rate of the optimizer's first group in the last update, or before any, the first rate; None
        without an optimizer."""
        if self.optimizer is None or self._used is not None:
            return self._used
        return rate_of(self.optimizer.param_groups[0])

    @property
    def rates(self) -> list[float]:
        """The learning rates of the optimizer's groups, or those set for the next update; none without an optimizer."""
        if self._set:
            return self._set[-1][1]
        return [] if self.optimizer is None else [float(group["lr"]) for group in self.optimizer.param_groups]

    def unfit(self, rates: Sequence[float]) -> RunError | None:
        """Why these cannot be rates of the groups: not finite, below 0, or neither one for all nor one for each."""
        groups = len(rates) if self.optimizer is None else len(self.optimizer.param_groups)
        if not all(math.isfinite(rate) and rate >= 0 for rate in rates):
            return RunError(f"a learning rate of {', '.join(map(str, rates))} makes no sense")
        if len(rates) in (1, groups):
            return None
        return RunError(
            f"{len(rates)} learning rates were given, and the optimizer has {groups} groups of parameters",
            hint="give one rate for all groups, or one for each",
        )

    def set_rates(self, update: int, rates: Sequence[float], made: int) -> None:
        """Set the learning rates of all groups from an update on.

        A scheduler continues from these rates, and may set others at its next step, as in a loop of plain PyTorch.

        Args:
            rates: `unfit` returned None for them.
            made: how many updates this worker has made.
        """
        if self.optimizer is None:
            return
        groups = len(self.optimizer.param_groups)
        self._set.append((update, list(rates) if len(rates) == groups else list(rates) * groups))
        self.take_rates(made)

    @property
    def norm(self) -> float | None:
        """The norm of all workers' gradients at the last update, if they are clipped (see `Clip.norm`)."""
        return None if self.clip is None else self.clip.norm

    def scheduler_due(self, updates: int) -> bool:
        """Whether the scheduler makes a step after this many updates.

        Raises:
            TaskError: it makes a step every epoch, and the length of an epoch is unknown.
        """
        if not self.per_epoch:
            return self.metric is None
        if self.steps_per_epoch is None:
            raise TaskError(
                "lr_scheduler() returned a scheduler for every epoch, and the length of an epoch is unknown",
                hint="steps_per_epoch=len(DATA)",
            )
        return updates % self.steps_per_epoch == 0

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> None:
        """The live weights, after `version` updates, were evaluated: a scheduler that waits for a metric makes a step.

        It does so right before the next update, since predictions from this version use the old rate, here and on other
        workers.

        Raises:
            TaskError: the evaluation has no such metric.
        """
        if self.metric is None or version <= self._evaluated:
            return
        if self.metric not in metrics:
            raise TaskError(
                f"lr_scheduler() waits for the unknown metric {self.metric!r}{near(self.metric, metrics)}",
                hint=f"name one of {', '.join(metrics)}",
            )
        self._metric_due = version, metrics[self.metric]

    def gather(self) -> None:
        """A minibatch's backwards are over: put the gradients into `grad`."""
        for parameter, gradient in zip(self.parameters, self._sum.take(), strict=True):
            parameter.grad = gradient

    def step(self, minibatch: int) -> None:
        """The update itself; with exact clipping it waits for the other workers.

        Raises:
            RunError: the user's optimizer or scheduler failed.
        """
        self.notes.apply(minibatch)
        if self.optimizer is not None:
            with random_state_kept() if self._may_draw(self.optimizer) else nullcontext():
                if self._metric_due is not None:
                    self._step_by_metric(*self._metric_due)
                self.take_rates(minibatch)
                self._used = rate_of(self.optimizer.param_groups[0])
                self._update(minibatch, self.optimizer)
        if not self._keeps:
            for parameter in self.parameters:
                parameter.grad = None

    def state(self) -> dict[str, Any]:
        """What the next updates depend on, except the weights, by the names of parameters; live tensors."""
        found: dict[str, Any] = {"clip": next((field.state() for field in self.notes.fields), None)}
        if self.optimizer is None:
            return found
        name = self._names
        found["optimizer"] = optimizer_state(self.optimizer, name)
        found["scheduler"] = None if self.scheduler is None else scheduler_state(self.scheduler)
        if self.metric is not None:
            found["evaluated"] = self._evaluated
            if self._metric_due is not None:
                found["metric_due"] = self._metric_due
        if self.predictor is not None:
            found["last_updates"] = {name[id(p)]: (made, rate) for p, made, rate in self.predictor.state()}
        for repair in self.repairs:
            if repair.entry:
                found[repair.entry] = {name[id(p)]: tuple(kept) for p, *kept in repair.state()}
        if self._set:
            found["set_rates"] = list(self._set)
        return found

    def load(self, found: Sequence[dict[str, Any]], updates: int, same: bool) -> None:
        """Continue from what `state` gave after this many updates.

        Args:
            found: this worker's if the cuts are the `same`, else all workers'.

        Raises:
            RunError: the state does not fit the optimizer.
        """
        for field in self.notes.fields if found[0]["clip"] is not None else ():
            field.load(found[0]["clip"], same)
        known = [each for each in found if "optimizer" in each]
        if self.optimizer is None or not known:
            return
        if self.scheduler is not None and known[0]["scheduler"] is None:
            self._repeat_scheduler(updates)
        load_optimizer_state(self.optimizer, [each["optimizer"] for each in known], self._names)
        if self.scheduler is not None and known[0]["scheduler"] is not None:
            load_scheduler_state(self.scheduler, self._of_as_many_groups(known)["scheduler"])
            self._evaluated = int(known[0].get("evaluated", 0))
            self._metric_due = known[0].get("metric_due", known[0].get("heard"))  # its earlier name
        self._set = list(known[0].get("set_rates", []))

        def by_name(what: str) -> dict[str, Any]:
            return {name: value for each in known for name, value in each.get(what, {}).items()}

        own = {self._names[id(p)]: p for p in self.parameters}
        if self.predictor is not None:
            self.predictor.load([(own[n], *row) for n, row in by_name("last_updates").items() if n in own])
            every = range(len(self.parameters))
            self.predictor.give_back(self.predictor.predict(1, every), every)  # fails here if the state does not fit
        for repair in self.repairs:
            repair.load([(own[n], *row) for n, row in by_name(repair.entry).items() if n in own])

    def _of_as_many_groups(self, known: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state of a worker whose optimizer had as many groups as this one.

        Raises:
            RunError: there is none.
        """
        groups = len(self.optimizer.param_groups) if self.optimizer is not None else 0
        numbers = [len(each["optimizer"]["groups"]) for each in known]
        if groups not in numbers:
            raise RunError(
                f"the checkpoint has the state of a scheduler for {' or '.join(map(str, sorted(set(numbers))))} groups "
                f"of parameters, and here the optimizer has {groups}",
                hint="keep the number of groups, and put new parameters into the groups that were there",
            )
        return known[numbers.index(groups)]

    def _repeat_scheduler(self, updates: int) -> None:
        """Repeat the steps of a scheduler whose state cannot be saved, from the optimizer's first rates.

        Raises:
            RunError: its steps need metrics of evaluations, which are not repeated.
        """
        if self.metric is not None:
            raise RunError(
                f"the checkpoint has no state of {type(self.scheduler).__name__}, which waits for the metric "
                f"{self.metric!r}: it would start again",
                hint="for the next run, give it a state_dict() of plain values, or use a scheduler of steps or epochs",
            )
        with random_state_kept(), without_order_warning():
            for update in range(updates):
                if self.scheduler_due(update + 1):
                    self._reseed("lr_scheduler", update)
                    self.scheduler.step()

    def _update(self, minibatch: int, optimizer: torch.optim.Optimizer) -> None:
        if not (skips := self.scaler is not None and self.scaler.skips):
            self._step_optimizer(minibatch, optimizer)
        try:
            if self.scheduler is not None and self.scheduler_due(minibatch + 1):
                self._reseed("lr_scheduler", minibatch)
                with without_order_warning() if skips else nullcontext():
                    self.scheduler.step()
        except Exception as error:
            raise self._failed(error, minibatch, self.scheduler) from error

    def _step_optimizer(self, minibatch: int, optimizer: torch.optim.Optimizer) -> None:
        try:
            for repair in self.repairs:
                repair.before_step()
            if self.predictor is not None:
                self.predictor.before_step()
            if self._may_draw(optimizer):
                self._reseed(*self._place, "update", minibatch)
            optimizer.step()
            for repair in self.repairs:
                repair.after_step()
            if self.predictor is not None:
                self.predictor.observe()
        except PolicyError:
            raise
        except Exception as error:
            raise self._failed(error, minibatch, optimizer) from error

    def take_rates(self, update: int) -> None:
        """Apply the learning rates that were set for this update, which is the next one.

        If a metric has arrived, the scheduler's step comes first.
        """
        if self.optimizer is None or self._metric_due is not None:
            return
        while self._set and self._set[0][0] <= update:
            for group, rate in zip(self.optimizer.param_groups, self._set.pop(0)[1], strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    def _step_by_metric(self, version: int, value: float) -> None:
        self._evaluated, self._metric_due = version, None
        self._reseed("lr_scheduler", version)
        try:
            self.scheduler.step(value)
        except Exception as error:
            raise RunError(
                f"the scheduler failed on worker {self.worker}, after step {version}: {type(error).__name__}: {error}",
                where=f"{type(self.scheduler).__name__}.step({self.metric})",
            ) from error

    def _may_draw(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the update may use random numbers; torch's optimizers do not. Keeping the state takes 0.2 ms."""
        return self.scheduler is not None or may_draw(optimizer)

    def _reseed(self, *place: object) -> None:
        seed_generators(seed_of(self._seed, *place), self._device_type)

    def _failed(self, error: Exception, minibatch: int, what: object) -> RunError:
        return RunError(
            f"the update after step {minibatch + 1} failed on worker {self.worker}: {type(error).__name__}: {error}",
            where=f"{type(what).__name__}.step()",
            hint="fxpipe calls step() without arguments, the optimizer's once for every update",
        )
