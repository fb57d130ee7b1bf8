"""One worker's update: gradients in, a step of the optimizer, and what that step tells about later weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import RunError, TaskError
from fxpipe.policy.base import Policy
from fxpipe.policy.optimizers.learning_rates import LearningRates
from fxpipe.policy.optimizers.predict import Predictor
from fxpipe.policy.optimizers.spike import SpikeCompensation
from fxpipe.runtime.worker.clip import Clip
from fxpipe.runtime.worker.gradients import GradientSum
from fxpipe.task.hooks import TrainingTask


class Updater:
    """The optimizer of one worker's trained parameters, with its scheduler, clipping, prediction and compensation.

    Args:
        trained: the parameters by name; none on a worker that trains nothing.
        gradients: sums the backwards' gradients for the next update.
        delays: how many updates old each parameter's gradients are, for spike compensation.
        task: its `optimizer` is called with the (name, parameter) pairs, if there are any; its `lr_scheduler` with that
            optimizer; the scheduler that it returns, if any, makes a step after every update.
        keep_gradients: leave them in `grad` until the next update.

    Raises:
        TaskError: the user's hooks returned something other than an optimizer of these parameters, or a scheduler.
        PolicyError: the policy has an option that does not work with this optimizer.
    """

    def __init__(
        self,
        *,
        worker: int,
        trained: Mapping[str, nn.Parameter],
        gradients: GradientSum,
        divisor: int,
        policy: Policy,
        delays: Mapping[Tensor, int],
        task: TrainingTask,
        clip: Clip | None,
        keep_gradients: bool,
    ) -> None:
        self.worker = worker
        self.parameters = list(trained.values())
        self._sum = gradients
        self.clip = clip
        self.scheduler: Any = None
        self.predictor: Predictor | None = None
        self._divisor = divisor
        self._spike: SpikeCompensation | None = None
        self._rates: LearningRates | None = None
        self.optimizer = task.optimizer(list(trained.items())) if trained else None
        if self.optimizer is None:
            self._keeps = False
            return
        self._refuse_foreign_parameters(self.optimizer)
        self.scheduler = _scheduler(task, self.optimizer)
        if policy.predicts:
            self._rates = LearningRates(self.optimizer, self.scheduler)
            self.predictor = Predictor(
                self.optimizer,
                self.parameters,
                weight_form=policy.weight_form,
                decay=policy.decay,
                rates=self._rates,
            )
        if policy.sc:
            self._spike = SpikeCompensation(self.optimizer, delays)
        self._keeps = keep_gradients or (self.predictor is not None and self.predictor.keeps_gradients)

    @property
    def lr(self) -> float | None:
        """The learning rate of the optimizer's first group; None on a worker that trains nothing."""
        return None if self.optimizer is None else float(self.optimizer.param_groups[0]["lr"])

    @property
    def norm(self) -> float | None:
        """The norm of all workers' gradients at the last update, if they are clipped (see `Clip.norm`)."""
        return None if self.clip is None else self.clip.norm

    def begin(self, minibatch: int) -> None:
        """The first forward of a minibatch is about to run."""
        if self.clip is not None:
            self.clip.forward(minibatch)

    def gather(self, minibatch: int) -> None:
        """The minibatch's backwards are over: put the gradients into `grad`, and send their norms on."""
        for parameter, gradient in zip(self.parameters, self._sum.take(self._divisor), strict=True):
            parameter.grad = gradient
        if self.clip is not None:
            self.clip.announce(minibatch, self.parameters)

    def step(self, minibatch: int) -> None:
        """The update itself; with exact clipping it waits for the other workers.

        Raises:
            RunError: the user's optimizer or scheduler failed.
        """
        if self.clip is not None:
            self.clip.apply(minibatch, self.parameters)
        if self.optimizer is None:
            return
        try:
            if self.predictor is not None:
                self.predictor.before_step()
            self.optimizer.step()
            if self._spike is not None:
                self._spike.after_step()
            if self.predictor is not None:
                self.predictor.observe()
        except Exception as error:
            raise self._failed(error, minibatch, self.optimizer) from error
        try:
            if self.scheduler is not None:
                self.scheduler.step()
        except Exception as error:
            raise self._failed(error, minibatch, self.scheduler) from error
        if self._rates is not None:
            self._rates.stepped()
        if not self._keeps:
            for parameter in self.parameters:
                parameter.grad = None

    def gradients(self) -> list[Tensor | None]:
        """The last update's mean gradients, if they are kept."""
        return [parameter.grad for parameter in self.parameters]

    def _failed(self, error: Exception, minibatch: int, what: object) -> RunError:
        return RunError(
            f"the update after step {minibatch + 1} failed on worker {self.worker}: {type(error).__name__}: {error}",
            where=f"{type(what).__name__}.step()",
            hint="it is called once after every update, without arguments",
        )

    def _refuse_foreign_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer over other tensors: it would train nothing here, and no one would notice."""
        own = {id(parameter) for parameter in self.parameters}
        foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
        if foreign:
            raise TaskError(
                f"optimizer() holds {len(foreign)} parameters that it was not given: they are not the worker's own",
                hint="build it from named_parameters: [p for _, p in named_parameters]",
            )


def _scheduler(task: TrainingTask, optimizer: torch.optim.Optimizer) -> Any:
    scheduler = task.lr_scheduler(optimizer)
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise TaskError(
            f"lr_scheduler() returned {type(scheduler).__name__}, which has no step()",
            hint="return a torch.optim.lr_scheduler, or None",
        )
    return scheduler
