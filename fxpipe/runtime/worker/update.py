"""The step of one worker's optimizer and of its scheduler, and what a policy does around it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor

from fxpipe.checkpoint.optimizer_state import (
    OptimizerState,
    load_optimizer_state,
    load_scheduler_state,
    optimizer_state,
    scheduler_state,
)
from fxpipe.checkpoint.shard import Count
from fxpipe.checkpoint.unsaved import UnsavedState
from fxpipe.errors import PolicyError, RunError, TaskError, listed, near
from fxpipe.optimizer.hook import make_optimizer
from fxpipe.policy.optimizers.predict import Predictor
from fxpipe.policy.optimizers.rules import rate_of
from fxpipe.policy.optimizers.update_repair import UpdateRepair
from fxpipe.policy.repair import REPAIRS
from fxpipe.random_state import random_state_kept, seed_generators, seed_of
from fxpipe.runtime.worker.between_replicas import check_optimizers_alike
from fxpipe.runtime.worker.part import UpdatePart
from fxpipe.runtime.worker.setting import WorkerSetting
from fxpipe.task.callbacks import CALLBACKS
from fxpipe.task.one_optimizer import OptimizerRefused
from fxpipe.task.paced_scheduler import paced, without_order_warning
from fxpipe.task.several_optimizers import may_draw
from fxpipe.task.what_trains import freezes_or_thaws
from fxpipe.user_lines import user_traceback


class UpdaterState(TypedDict):
    """The state of a worker's optimizer, and what its next rates depend on."""

    optimizer: OptimizerState
    scheduler: dict[Any, Any] | None
    evaluated: NotRequired[Count]
    metric_due: NotRequired[tuple[Count, float]]
    set_rates: NotRequired[list[tuple[Count, list[float]]]]


class Updater(UpdatePart):
    """The optimizer of what one worker updates, with its scheduler, which makes a step every update, epoch or
    evaluation.

    The optimizer's random numbers depend on the run's seed, the worker and the update, and where replicas share the
    update on the replica; the scheduler's on the seed and the update only, so all workers have the same rates. The
    process's random state does not change.

    Attributes:
        optimizer: None if nothing is trained: the worker owns no parameters, or the user's optimizer takes none.
        per_epoch: the scheduler makes a step after every epoch.
        steps_per_epoch: updates in an epoch; known before the first update if `per_epoch`.
        around: the context of the user's code in an update.
        metric: the scheduler makes a step after every evaluation, with this metric; None if it does not.

    Raises:
        TaskError: a hook of the user returned no optimizer of these parameters, or no scheduler.
    """

    entry = "updater"
    form = UpdaterState

    def __init__(self, setting: WorkerSetting) -> None:
        # The setting has its parts: no cycle may hold the parameters.
        self._setting, self.worker = weakref.proxy(setting), setting.worker
        task, updated = setting.task, setting.updated
        self.parameters = list(setting.trained.values())
        self._names = {id(parameter): name for name, parameter in setting.trained.items()}
        self.scheduler: Any = None
        self.per_epoch = False
        self.steps_per_epoch = setting.options.steps_per_epoch
        self.metric: str | None = None
        self._evaluated = 0  # the newest version whose metric the scheduler has had
        self._metric_due: tuple[int, float] | None = None  # a version, and the metric for the scheduler's next step
        self._used: float | None = None
        self.unsaved: UnsavedState | None = None
        self._set: list[tuple[int, list[float]]] = []  # updates, and the learning rates set for them
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        with random_state_kept():
            self._reseed(*self._place(), "optimizer")
            self.optimizer = make_optimizer(task.optimizer, list(updated.items())) if updated else None
            setting.optimizer = self.optimizer
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

    @classmethod
    def of(cls, setting: WorkerSetting) -> Iterator[UpdatePart]:
        yield cls(setting)

    def compare_replicas(self) -> None:
        """Check that all replicas of the worker have the same optimizer: they make the same update."""
        collective = self._setting.collective
        if collective is not None:
            check_optimizers_alike(self.worker, self.optimizer, self.scheduler, self._names, collective)

    @property
    def groups(self) -> Sequence[dict[str, Any]]:
        """The optimizer's groups of parameters; none without an optimizer."""
        return () if self.optimizer is None else self.optimizer.param_groups

    @property
    def updated(self) -> set[str]:
        """The names of the parameters that the optimizer updates here."""
        return {self._names[id(parameter)] for group in self.groups for parameter in group["params"]}

    @property
    def lr(self) -> float | None:
        """The learning rate of the optimizer's first group in the last update, or before any, the first rate; None
        without an optimizer."""
        return self._used if self._used is not None else next(map(rate_of, self.groups), None)

    @property
    def rates(self) -> list[float]:
        """The learning rates of the optimizer's groups, or those set for the next update; none without an optimizer."""
        return self._set[-1][1] if self._set else [float(group["lr"]) for group in self.groups]

    def check_rates(self, rates: Sequence[float]) -> None:
        """Raise RunError if these cannot be rates: not finite, below 0, or neither one for all groups nor one each."""
        groups = len(self.groups) or len(rates)
        if not all(math.isfinite(rate) and rate >= 0 for rate in rates):
            raise RunError(f"a learning rate of {', '.join(map(str, rates))} makes no sense")
        if len(rates) not in (1, groups):
            raise RunError(
                f"{len(rates)} learning rates were given, and the optimizer has {groups} groups of parameters",
                hint="give one rate for all groups, or one for each",
            )

    def set_rates(self, update: int, rates: Sequence[float], made: int) -> None:
        """Set the learning rates of all groups from an update on.

        A scheduler continues from these rates, and may set others at its next step, as in a loop of plain PyTorch.

        Args:
            rates: `check_rates` has passed them.
            made: how many updates this worker has made.
        """
        groups = len(self.groups)
        self._set.append((update, list(rates) if len(rates) == groups else list(rates) * groups))
        self.take_rates(made)

    def scheduler_due(self, updates: int) -> bool:
        """Whether the scheduler makes a step after this many updates."""
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
        """
        if self.metric is None or version <= self._evaluated:
            return
        if self.metric not in metrics:
            raise TaskError(
                f"lr_scheduler() waits for the unknown metric {self.metric!r}{near(self.metric, metrics)}",
                hint=f"name one of {', '.join(metrics)}",
            )
        self._metric_due = version, metrics[self.metric]

    def apply(self, minibatch: int) -> None:
        """Make the optimizer's step and the scheduler's, and free the gradients."""
        if self.optimizer is not None:
            with random_state_kept() if self._may_draw(self.optimizer) else nullcontext(), self.around():
                if self._metric_due is not None:
                    self._step_by_metric(*self._metric_due)
                self.take_rates(minibatch)
                self._used = rate_of(self.groups[0])
                self._update(minibatch, self.optimizer)
        if not self._setting.keep_gradients:
            for parameter in self.parameters:
                parameter.grad = None

    def state(self, version: int) -> Any:
        if self.optimizer is None:
            return None
        scheduler = None if self.scheduler is None else scheduler_state(self.scheduler)
        state = UpdaterState(optimizer=optimizer_state(self.optimizer, self._names), scheduler=scheduler)
        if self.metric is not None:
            state["evaluated"] = self._evaluated
            if self._metric_due is not None:
                state["metric_due"] = self._metric_due
        if self._set:
            state["set_rates"] = list(self._set)
        return state

    def load(self, states: Sequence[Any], version: int, same: bool) -> None:
        """Load the optimizer's state, then the scheduler's; where that could not be saved, repeat its steps first."""
        if self.optimizer is None or not states:
            return
        first: UpdaterState = states[0]
        if self.scheduler is not None and first["scheduler"] is None:
            self._repeat_scheduler(version)
        load_optimizer_state(self.optimizer, [state["optimizer"] for state in states], self._names)
        if self.scheduler is not None and first["scheduler"] is not None:
            load_scheduler_state(self.scheduler, self._of_as_many_groups(states)["scheduler"])
            self._evaluated = int(first.get("evaluated", 0))
            self._metric_due = first.get("metric_due")
        self._set = list(first.get("set_rates", []))

    def _of_as_many_groups(self, known: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state of a worker whose optimizer had as many groups as this one."""
        groups = len(self.groups)
        numbers = [len(each["optimizer"]["groups"]) for each in known]
        if groups not in numbers:
            raise RunError(
                f"the checkpoint has the state of a scheduler for {' or '.join(map(str, sorted(set(numbers))))} groups "
                f"of parameters, and here the optimizer has {groups}",
                hint="keep the number of groups, and put new parameters into the groups that were there",
            )
        return known[numbers.index(groups)]

    def _repeat_scheduler(self, updates: int) -> None:
        """Repeat the steps of a scheduler whose state cannot be saved, from the optimizer's first rates."""
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
        if not (skips := any(part.skips for part in self._setting.parts)):
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
            for part in self._setting.parts:
                part.before_step()
            if self._may_draw(optimizer):
                self._reseed(*self._place(), "update", minibatch)
            optimizer.step()
            for part in self._setting.parts:
                part.after_step()
        except (PolicyError, OptimizerRefused):
            raise
        except Exception as error:
            raise self._failed(error, minibatch, optimizer) from error

    def take_rates(self, update: int) -> None:
        """Apply the learning rates that were set for this update, which is the next one.

        If a metric has arrived, the scheduler's step comes first.
        """
        while self._set and self._set[0][0] <= update and self._metric_due is None:
            for group, rate in zip(self.groups, self._set.pop(0)[1], strict=True):
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
                where=user_traceback(error) or f"{type(self.scheduler).__name__}.step({self.metric})",
            ) from error

    def _may_draw(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the update may use random numbers; torch's optimizers do not. Keeping the state takes 0.2 ms."""
        return self.scheduler is not None or may_draw(optimizer)

    def _place(self) -> tuple[int, ...]:
        """Whose random numbers are used."""
        replica = self._setting.replica
        return (self.worker, replica) if replica and self._setting.shares else (self.worker,)

    def _reseed(self, *place: object) -> None:
        seed_generators(seed_of(self._setting.options.seed, *place), self._setting.device.type)

    def _failed(self, error: Exception, minibatch: int, what: object) -> RunError:
        return RunError(
            f"the update after step {minibatch + 1} failed on worker {self.worker}: {type(error).__name__}: {error}",
            where=user_traceback(error) or f"{type(what).__name__}.step()",
            hint="fxpipe calls step() without arguments, the optimizer's once for every update",
        )


class AroundStep(UpdatePart):
    """One repair, or the predictor. A checkpoint keeps its state by the names of parameters, under its `entry`.

    Repairs come before the predictor, which sees the whole update.
    """

    def __init__(self, work: UpdateRepair | Predictor, setting: WorkerSetting) -> None:
        self.work = work
        self.entry = work.entry
        self._trained = setting.trained
        self._names = {id(parameter): name for name, parameter in self._trained.items()}

    @classmethod
    def of(cls, setting: WorkerSetting) -> Iterator[UpdatePart]:
        policy, optimizer = setting.recipe.policy, setting.optimizer
        if optimizer is None:
            return
        trained, lags = setting.trained, setting.recipe.demand.delays(setting.worker)
        delays: dict[Tensor, int] = {trained[name]: lag for name, lag in lags.items()}
        for repair in policy.repairs:
            yield cls(repair.kind(optimizer, delays), setting)
        if policy.predicts:
            yield cls(Predictor(optimizer, list(trained.values()), weight_form=policy.weight_form), setting)

    @classmethod
    def forms(cls) -> Mapping[str, Any]:
        kinds: list[type[UpdateRepair | Predictor]] = [Predictor, *(repair.kind for repair in REPAIRS.values())]
        return {kind.entry: kind.form for kind in kinds if kind.entry}

    def before_step(self) -> None:
        self.work.before_step()

    def after_step(self) -> None:
        self.work.after_step()

    def state(self, version: int) -> Any:
        if not self.entry:
            return None
        return {self._names[id(parameter)]: tuple(kept) for parameter, *kept in self.work.state()}

    def load(self, states: Sequence[Any], version: int, same: bool) -> None:
        kept = {name: row for state in states for name, row in state.items()}
        self.work.load([(self._trained[name], *row) for name, row in kept.items() if name in self._trained])
