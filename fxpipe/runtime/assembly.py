"""Loads one worker of a build: its stage, its own weights and buffers, its executor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fxpipe import policy as policies
from fxpipe import schedule as schedules
from fxpipe.backend.equip import engines_of, equip
from fxpipe.folder import ENGINES
from fxpipe.plan import Plan
from fxpipe.policy.base import Policy
from fxpipe.runtime.clip import make_clip
from fxpipe.runtime.demand import Demand
from fxpipe.runtime.executor import Executor
from fxpipe.runtime.final_weights import buffer_worker
from fxpipe.runtime.initial_weights import Start, initial_weights
from fxpipe.runtime.loaded_stage import load_stage
from fxpipe.runtime.transport import Transport
from fxpipe.runtime.update import MakeOptimizer, MakeScheduler
from fxpipe.runtime.weights import WeightStore
from fxpipe.schedule.base import Schedule


@dataclass(frozen=True)
class Recipe:
    """How a plan is run: the schedule, the policy, and what follows from them for the weights."""

    schedule: Schedule
    policy: Policy
    demand: Demand


def choose(plan: Plan, schedule: str | None = None, policy: str | Policy | None = None) -> Recipe:
    """The schedule and policy asked for, by default the plan's; another schedule brings its own default policy.

    Raises:
        ScheduleError, PolicyError: an unknown name, or a combination that makes no sense.
    """
    made = schedules.make(schedule or plan.schedule, plan.workers, plan.microbatches)
    if policy is None:
        policy = plan.policy if made.name == plan.schedule else policies.default_for(made)
    chosen = policies.make(policy) if isinstance(policy, str) else policy
    chosen.check(made)
    return Recipe(made, chosen, Demand(plan, made, chosen))


def open_worker(
    plan: Plan,
    folder: str | Path,
    worker: int,
    recipe: Recipe,
    transport: Transport,
    make_optimizer: MakeOptimizer,
    make_scheduler: MakeScheduler | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    keep_gradients: bool = False,
    clip_norm: float | None = None,
    backend: str | None = None,
    start: Start | None = None,
) -> Executor:
    """An executor for one worker, holding only that worker's tensors.

    Args:
        clip_norm: the greatest norm of all workers' gradients together that an update uses.
        backend: the engine of both functions; those of the plan where None or 'auto'.
        start: where the first weights come from; from the build where None.

    Raises:
        BuildError: the stage or the weights do not fit the plan.
        TaskError: the build has no values of the parameters, and the model does not initialise them.
        BackendError: the engine is not there, or cannot run the stage.
    """
    folder = Path(folder)
    stage = load_stage(folder / plan.stages[worker].file, plan.stages[worker])
    stage = equip(plan, worker, stage, engines_of(plan, worker, backend), folder / ENGINES, str(device))
    read = {recipe.demand.parameters[n].name for n in _weight_names(plan, worker)}
    parameters = [p for p in plan.parameters if p.owner == worker or p.name in read]
    buffers = [b for b in plan.buffers if worker in b.workers or (b.persistent and worker == buffer_worker(b))]
    tensors = initial_weights(plan, folder, worker, parameters, buffers, start or Start(seed=seed), device)
    held = {b.name: tensors.pop(b.name) for b in buffers}
    clip = make_clip(clip_norm, plan, worker, recipe.schedule, transport)
    store = WeightStore(
        plan, worker, recipe.demand, transport, tensors, make_optimizer, make_scheduler, keep_gradients, clip
    )
    return Executor(plan, worker, stage, store, held, transport, seed, device)


def _weight_names(plan: Plan, worker: int) -> set[str]:
    stage = plan.stages[worker]
    return {*stage.forward.weights, *stage.backward.weights}
