"""Loads one worker of a build: its stage, its own weights and buffers, its executor."""

from __future__ import annotations

from pathlib import Path

import torch

from fxpipe.engines.attach import engines_of, equip
from fxpipe.observe.run_folder import staleness_file
from fxpipe.plan.build_folder import ENGINES
from fxpipe.plan.spec import Plan
from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.wires.transport import Transport
from fxpipe.runtime.worker.clip import make_clip
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.final_weights import buffer_worker
from fxpipe.runtime.worker.initial_weights import Start, initial_weights
from fxpipe.runtime.worker.staleness import StalenessLog
from fxpipe.runtime.worker.weights import WeightStore
from fxpipe.stages.loaded import load_stage
from fxpipe.task.model_file import MakeOptimizer, MakeScheduler


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


def watch_staleness(store: WeightStore, folder: str | Path | None) -> None:
    """Log a worker's staleness from now on, into its own file of `folder` if there is one."""
    path = None if folder is None else Path(folder) / staleness_file(store.worker)
    store.staleness = StalenessLog(store.demand, store.worker, store.trained, path)
