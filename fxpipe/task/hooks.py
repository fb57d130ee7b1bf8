"""The user's hooks as a run asks for them: of a model file (`fxpipe.task.model_file.Task`), or given as objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fxpipe.errors import TaskError
from fxpipe.plan.build_folder import model_path
from fxpipe.plan.spec import Plan
from fxpipe.task.callbacks import Callbacks
from fxpipe.task.model_file import MakeOptimizer, MakeScheduler, Task, default_optimizer, load_task
from fxpipe.task.one_optimizer import one_optimizer
from fxpipe.task.reset_buffers import ResetBuffers, Rows
from fxpipe.task.step_hooks import StepHooks


class TrainingTask(Protocol):
    """What a run needs of the user: a `Task` has it, and an `ObjectTask`."""

    def model(self) -> nn.Module: ...

    def train_data(self) -> Iterable[Any]: ...

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer: ...

    def lr_scheduler(self, optimizer: torch.optim.Optimizer) -> Any | None: ...

    @property
    def loss_weight(self) -> Callable[[Any], Any] | None:
        """How much a microbatch counts in its minibatch's loss."""

    @property
    def step_hooks(self) -> StepHooks | None:
        """What a step can be captured of during a run; None where the model or the loss is not there."""

    @property
    def averages(self) -> bool:
        """Whether there is `averaged`."""

    def averaged(self, optimizer: torch.optim.Optimizer, named_parameters: Any) -> Any: ...

    @property
    def callbacks(self) -> Callbacks:
        """What the run calls while it trains."""

    @property
    def resets(self) -> bool:
        """Whether there is `reset`."""

    def reset(self, buffers: Rows) -> dict[str, Tensor]: ...

    @property
    def validates(self) -> bool:
        """Whether there is `eval_data`."""

    def eval_data(self) -> Iterable[Any]: ...


@dataclass(frozen=True)
class ObjectTask:
    """The hooks of the Python interface: functions, of which all but the data have defaults."""

    make_optimizer: MakeOptimizer | None = None
    make_scheduler: MakeScheduler | None = None
    make_model: Callable[[], nn.Module] | None = None
    train_batches: Callable[[], Iterable[Any]] | None = None
    eval_batches: Callable[[], Iterable[Any]] | None = None
    loss_weight: Callable[[Any], Any] | None = None
    read_averages: Callable[[torch.optim.Optimizer, Any], Any] | None = None
    step_hooks: StepHooks | None = None
    callbacks: Callbacks = field(default_factory=Callbacks)
    reset_buffers: ResetBuffers | None = None

    def model(self) -> nn.Module:
        if self.make_model is None:
            raise TaskError(
                "the build has no values of the parameters (--meta), and there is no model to initialise them",
                hint="give a checkpoint (weights=...), or model=, a function that makes the model",
            )
        return self.make_model()

    @property
    def averages(self) -> bool:
        return self.read_averages is not None

    def averaged(self, optimizer: torch.optim.Optimizer, named_parameters: Any) -> Any:
        assert self.read_averages is not None
        return self.read_averages(optimizer, named_parameters)

    @property
    def resets(self) -> bool:
        return self.reset_buffers is not None

    def reset(self, buffers: Rows) -> dict[str, Tensor]:
        assert self.reset_buffers is not None
        return self.reset_buffers(buffers)

    @property
    def validates(self) -> bool:
        return self.eval_batches is not None

    def train_data(self) -> Iterable[Any]:
        assert self.train_batches is not None
        return self.train_batches()

    def eval_data(self) -> Iterable[Any]:
        assert self.eval_batches is not None
        return self.eval_batches()

    def optimizer(self, named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        made = (self.make_optimizer or default_optimizer)(named_parameters)
        return one_optimizer(made)

    def lr_scheduler(self, optimizer: torch.optim.Optimizer) -> Any | None:
        return self.make_scheduler(optimizer) if self.make_scheduler else None


def task_of_build(plan: Plan, folder: str, model_file: str | None = None) -> Task:
    """The model file given, else the one that the plan of the build in `folder` names, loaded.

    Raises:
        TaskError: no file is known, or it cannot be loaded.
    """
    path = model_path(plan, folder, model_file)
    if path is None:
        raise TaskError(
            "the build was compiled from objects, so there is no file with train_data()",
            hint="use the Python API: fxpipe.load(BUILD).local(...)",
        )
    return load_task(path)
