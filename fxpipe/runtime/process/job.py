"""What is trained, by which rules, and where: a run and a user's own loop make all else of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from fxpipe.plan.spec import Plan
from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.process.resume import Options, recipe_of
from fxpipe.runtime.process.world import World
from fxpipe.runtime.wires.addresses import Addresses
from fxpipe.task.model_file import Task

Given = TypeVar("Given", bound=PipelineOptions, covariant=True)


@dataclass(frozen=True)
class Job(Generic[Given]):
    """What one process knows of a pipeline before it opens workers, and does not change as long as there are some.

    Attributes:
        folder: of the build.
        task: the user's hooks.
        out: the folder for checkpoints and results; None without one.
        world: to be opened with the `addresses`.
    """

    folder: str
    plan: Plan
    recipe: Recipe
    task: Task
    options: Given
    out: str | None
    world: World

    @staticmethod
    def of(folder: str, plan: Plan, task: Task, options: Options, out: str | None, world: World) -> Job[Options]:
        """With the recipe that the options or the plan name; errors as `recipe_of`."""
        return Job(folder, plan, recipe_of(plan, options), task, options, out, world)

    @property
    def process(self) -> int:
        """The number of this process; 0 if it has all workers."""
        return self.world.here[0]

    @cached_property
    def addresses(self) -> Addresses:
        """Of all messages."""
        return Addresses(self.plan, self.recipe.demand)
