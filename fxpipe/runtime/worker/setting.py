"""What one worker of a run is made from; the parts of its update take from it what they need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fxpipe.plan.plan import Plan
from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.wires.collective import Collective
from fxpipe.runtime.worker.observer import Observer
from fxpipe.task.model_file import Task

CPU = torch.device("cpu")
Kind = TypeVar("Kind")


@dataclass
class WorkerSetting:
    """One worker, or one of its replicas.

    Attributes:
        recipe: of the run, or of this worker (`Recipe.of_worker`), which it becomes.
        task: its `optimizer` gets the (name, parameter) pairs of what is updated here, if there are any, and its
            `lr_scheduler` that optimizer.
        collective: what this replica exchanges with the worker's other replicas; None if there are none.
        keep_gradients: leave those of the last update in `grad` until the next one.
        parameters: the owned ones by name, live: the optimizer updates them in place.
        buffers: the worker's, by their first names; forwards replace their values, never in place.
        observers: what follows this worker.
        optimizer: of what is updated here; None if that is nothing, and until the update's `Updater` is made.
        parts: of its update, in their order: each is a `UpdatePart`.
    """

    plan: Plan
    worker: int
    recipe: Recipe
    task: Task
    options: PipelineOptions
    device: torch.device = CPU
    collective: Collective | None = None
    keep_gradients: bool = False
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    observers: list[Observer] = field(default_factory=list)
    optimizer: torch.optim.Optimizer | None = None
    parts: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.recipe = self.recipe.of_worker(self.worker)

    @property
    def replica(self) -> int:
        """Which replica of the worker this is."""
        return 0 if self.collective is None else self.collective.replica

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The owned parameters that are trained, by name."""
        return {p.name: self.parameters[p.name] for p in self.plan.owned(self.worker) if p.trained}

    @property
    def shares(self) -> dict[str, int]:
        """The replica that updates each trained parameter; empty if all update all."""
        return {} if self.collective is None else self.plan.updaters(self.worker)

    @property
    def updated(self) -> dict[str, nn.Parameter]:
        """The trained parameters that are updated here: all, or those of this replica's share."""
        shares, replica = self.shares, self.replica
        return {name: p for name, p in self.trained.items() if shares.get(name, replica) == replica}

    def part(self, kind: type[Kind]) -> Kind | None:
        """The part of a class; None if this update has none."""
        return next((part for part in self.parts if isinstance(part, kind)), None)
