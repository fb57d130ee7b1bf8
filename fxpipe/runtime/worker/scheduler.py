"""The user's scheduler on one worker: when it makes a step, and its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from fxpipe.checkpoint.optimizer_state import load_scheduler_state, scheduler_state
from fxpipe.errors import RunError, TaskError, near
from fxpipe.random_state import random_state_kept, seed_generators, seed_of
from fxpipe.runtime.worker.setting import WorkerSetting
from fxpipe.task.paced_scheduler import PacedScheduler, paced, without_order_warning
from fxpipe.user_lines import user_traceback


class Scheduler:
    """Makes the steps of what the hook `lr_scheduler` returned, every update, epoch or evaluation.

    Its random numbers depend on the run's seed and the update only, so all workers have the same rates.

    Attributes:
        user: what the hook returned; None if it returned nothing, or was not called, for lack of an optimizer.
        per_epoch: it makes a step after every epoch.
        steps_per_epoch: updates in an epoch; known before the first update if `per_epoch`.
        metric: it makes a step after every evaluation, with this metric; None if it does not.
        metric_due: a version, and the metric for the next step; None if none has arrived since the last one.
    """

    def __init__(self, setting: WorkerSetting, optimizer: torch.optim.Optimizer | None) -> None:
        self.steps_per_epoch = setting.options.steps_per_epoch
        self.metric_due: tuple[int, float] | None = None
        self._evaluated = 0  # the newest version whose metric it has had
        self._worker, self._seed, self._device = setting.worker, setting.options.seed, setting.device.type
        result = PacedScheduler(None)
        if optimizer is not None:
            self._reseed()
            result = paced(setting.task.lr_scheduler(optimizer), optimizer) or result
        self.user, self.per_epoch, self.metric = result.scheduler, result.per_epoch, result.metric

    def due(self, updates: int) -> bool:
        """Whether it makes a step after this many updates."""
        if not self.per_epoch:
            return self.metric is None
        if self.steps_per_epoch is None:
            raise TaskError(
                "lr_scheduler() returned a scheduler for every epoch, and the length of an epoch is unknown",
                hint="steps_per_epoch=len(DATA)",
            )
        return updates % self.steps_per_epoch == 0

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> None:
        """The live weights, after `version` updates, were evaluated: one that waits for a metric makes a step.

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
        self.metric_due = version, metrics[self.metric]

    def step_by_metric(self) -> None:
        """An update is about to be made: make the step that waited for a metric, if one has arrived."""
        if self.metric_due is None:
            return
        (version, value), self.metric_due = self.metric_due, None
        self._evaluated = version
        self._reseed(version)
        try:
            self.user.step(value)
        except Exception as error:
            raise RunError(
                f"the scheduler failed on worker {self._worker}, after step {version}: {type(error).__name__}: {error}",
                where=user_traceback(error) or f"{type(self.user).__name__}.step({self.metric})",
            ) from error

    def step(self, minibatch: int, skipped: bool) -> None:
        """The minibatch's update was made, or skipped: make a step if one is due."""
        if self.user is not None and self.due(minibatch + 1):
            self._reseed(minibatch)
            with without_order_warning() if skipped else nullcontext():
                self.user.step()

    def state(self) -> dict[str, Any]:
        """Its part of the updater's state."""
        state: dict[str, Any] = {"scheduler": None if self.user is None else scheduler_state(self.user)}
        if self.metric is not None:
            state["evaluated"] = self._evaluated
            if self.metric_due is not None:
                state["metric_due"] = self.metric_due
        return state

    def load(self, states: Sequence[Any], groups: int) -> None:
        """Continue from a state, of a worker whose optimizer has as many groups, if it was saved."""
        first = states[0]
        if self.user is None or first["scheduler"] is None:
            return
        numbers = [len(state["optimizer"]["groups"]) for state in states]
        if groups not in numbers:
            raise RunError(
                f"the checkpoint has the state of a scheduler for {' or '.join(map(str, sorted(set(numbers))))} groups "
                f"of parameters, and here the optimizer has {groups}",
                hint="keep the number of groups, and put new parameters into the groups that were there",
            )
        load_scheduler_state(self.user, states[numbers.index(groups)]["scheduler"])
        self._evaluated = int(first.get("evaluated", 0))
        self.metric_due = first.get("metric_due")

    def repeat(self, updates: int) -> None:
        """Repeat the steps of one whose state could not be saved, from the optimizer's first rates."""
        if self.metric is not None:
            raise RunError(
                f"the checkpoint has no state of {type(self.user).__name__}, which waits for the metric "
                f"{self.metric!r}: it would start again",
                hint="for the next run, give it a state_dict() of plain values, or use a scheduler of steps or epochs",
            )
        with random_state_kept(), without_order_warning():
            for update in range(updates):
                if self.due(update + 1):
                    self._reseed(update)
                    self.user.step()

    def _reseed(self, *place: int) -> None:
        seed_generators(seed_of(self._seed, "lr_scheduler", *place), self._device)
