"""The step of one worker's optimizer, and what a policy does around it."""

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
    UnsavedState,
    load_optimizer_state,
    optimizer_state,
)
from fxpipe.checkpoint.shard import Count
from fxpipe.errors import PolicyError, RunError, listed
from fxpipe.optimizer.hook import make_optimizer
from fxpipe.policy.optimizers.predict import Predictor
from fxpipe.policy.optimizers.rules import rate_of
from fxpipe.policy.optimizers.update_repair import UpdateRepair
from fxpipe.policy.repair import REPAIRS
from fxpipe.random_state import random_state_kept, seed_generators, seed_of
from fxpipe.runtime.worker.between_replicas import check_optimizers_alike
from fxpipe.runtime.worker.part import UpdatePart
from fxpipe.runtime.worker.scheduler import Scheduler
from fxpipe.runtime.worker.setting import WorkerSetting
from fxpipe.task.callbacks import CALLBACKS
from fxpipe.task.one_optimizer import OptimizerRefused
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
    """The optimizer of what one worker updates, with its scheduler.

    The optimizer's random numbers depend on the run's seed, the worker and the update, and where replicas share the
    update on the replica. The process's random state does not change.

    Attributes:
        optimizer: None if nothing is trained: the worker owns no parameters, or the user's optimizer takes none.
        around: the context of the user's code in an update.

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
        self._used: float | None = None
        self.unsaved: UnsavedState | None = None
        self._set: list[tuple[int, list[float]]] = []  # updates, and the learning rates set for them
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        with random_state_kept():
            self._reseed(*self._place(), "optimizer")
            self.optimizer = make_optimizer(task.optimizer, list(updated.items())) if updated else None
            setting.optimizer = self.optimizer
            if frozen := [name for name in updated if name in self.updated and not updated[name].requires_grad]:
                raise freezes_or_thaws("optimizer()", listed(frozen, 6), task.file)
            self.scheduler = Scheduler(setting, self.optimizer)
        if self.optimizer is not None:
            callbacks = [function for name in CALLBACKS if (function := getattr(task.hooks, name)) is not None]
            self.unsaved = UnsavedState(self.optimizer, self.scheduler.user, callbacks)

    @classmethod
    def of(cls, setting: WorkerSetting) -> Iterator[UpdatePart]:
        yield cls(setting)

    def compare_replicas(self) -> None:
        """Check that all replicas of the worker have the same optimizer: they make the same update."""
        collective = self._setting.collective
        if collective is not None:
            check_optimizers_alike(self.worker, self.optimizer, self.scheduler.user, self._names, collective)

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

    def apply(self, minibatch: int) -> None:
        """Make the optimizer's step and the scheduler's, and free the gradients."""
        if self.optimizer is not None:
            with random_state_kept() if self._may_draw(self.optimizer) else nullcontext(), self.around():
                self.scheduler.step_by_metric()
                self.take_rates(minibatch)
                self._used = rate_of(self.groups[0])
                self._update(minibatch, self.optimizer)
        if not self._setting.keep_gradients:
            for parameter in self.parameters:
                parameter.grad = None

    def state(self, version: int) -> Any:
        if self.optimizer is None:
            return None
        state: dict[str, Any] = {"optimizer": optimizer_state(self.optimizer, self._names), **self.scheduler.state()}
        if self._set:
            state["set_rates"] = list(self._set)
        return state

    def load(self, states: Sequence[Any], version: int, same: bool) -> None:
        """Load the optimizer's state, then the scheduler's; where that could not be saved, repeat its steps first."""
        if self.optimizer is None or not states:
            return
        first: UpdaterState = states[0]
        if self.scheduler.user is not None and first["scheduler"] is None:
            self.scheduler.repeat(version)
        load_optimizer_state(self.optimizer, [state["optimizer"] for state in states], self._names)
        self.scheduler.load(states, len(self.groups))
        self._set = list(first.get("set_rates", []))

    def _update(self, minibatch: int, optimizer: torch.optim.Optimizer) -> None:
        if not (skips := any(part.skips for part in self._setting.parts)):
            self._step_optimizer(minibatch, optimizer)
        try:
            self.scheduler.step(minibatch, skips)
        except Exception as error:
            raise self._failed(error, minibatch, self.scheduler.user) from error

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
        while self._set and self._set[0][0] <= update and self.scheduler.metric_due is None:
            for group, rate in zip(self.groups, self._set.pop(0)[1], strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    def _may_draw(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the update may use random numbers; torch's optimizers do not. Keeping the state takes 0.2 ms."""
        return self.scheduler.user is not None or may_draw(optimizer)

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
