"""Loads one worker of a build: its stage, its own weights and buffers, its executor."""

from __future__ import annotations

from pathlib import Path

import torch

from fxpipe.checkpoint.shard import buffer_worker
from fxpipe.checkpoint.starting_weights import Checkpoint
from fxpipe.engines.attach import engines_of, equip
from fxpipe.errors import RunError
from fxpipe.plan.build_folder import ENGINES
from fxpipe.plan.plan import Plan
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.wires.transport import Transport
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.initial_weights import initial_weights
from fxpipe.runtime.worker.offload import Offload, check_offload
from fxpipe.runtime.worker.setting import WorkerSetting
from fxpipe.runtime.worker.weights import WeightStore
from fxpipe.stages.loaded import LoadedStage, load_stage
from fxpipe.task.model_file import Task
from fxpipe.task.reset_buffers import BuffersReset


def open_worker(
    setting: WorkerSetting,
    folder: str | Path,
    transport: Transport,
    continue_after: int | None = None,
    checkpoint: Checkpoint | None = None,
) -> Executor:
    """An executor for one worker, holding only that worker's tensors.

    Args:
        folder: of the build.
        continue_after: the step after which an interrupted run continues; None starts a new run.
        checkpoint: the weights to start from; None takes the build's, or the model's own.

    Raises:
        BuildError: the stage or the weights do not fit the plan.
        TaskError: the build has no values of the parameters, and the model does not initialise them; or a hook of the
            user returned no optimizer of these parameters, or no scheduler.
        PolicyError: the policy has an option that does not work with this optimizer.
        BackendError: the engine is not available, or cannot run the stage.
        RunError: saved values are to be offloaded, and the device is not a CUDA device.
    """
    plan, worker, task, options, device = setting.plan, setting.worker, setting.task, setting.options, setting.device
    if plan.sharded:
        _check_shares(options, task)
    folder = Path(folder)
    if options.offload:
        check_offload(device)
    stages = []
    for of_shape in plan.of_shapes:
        spec = of_shape.stages[worker]
        stages.append(on_engines(of_shape, worker, load_stage(folder / spec.file, spec), folder, options, device))
    parts = plan.stages[worker].parts.values()
    read = {setting.recipe.demand.parameters[name].name for part in parts for name in part.weights}
    if continue_after is not None:  # the owners send the others
        read = {p.name for p in plan.parameters if p.name in read and not p.trained}
    parameters = [p for p in plan.parameters if p.owner == worker or p.name in read]
    buffers = [b for b in plan.buffers if worker in b.workers or (b.saved and worker == buffer_worker(b))]
    tensors = initial_weights(plan, folder, worker, parameters, buffers, task, options.seed, device, checkpoint)
    setting.buffers |= {b.name: tensors.pop(b.name) for b in buffers}
    executor = Executor(setting, stages, WeightStore(setting, transport, tensors), transport)
    if options.offload:
        executor.saved = Offload(device)
    executor.resets = BuffersReset(plan, task.reset, options.seed) if task.resets else None
    return executor


def on_engines(
    of_shape: Plan,
    worker: int,
    stage: LoadedStage,
    folder: str | Path,
    options: PipelineOptions,
    device: torch.device | str,
) -> LoadedStage:
    """A stage for one shape of batch on the engines that the options or the plan name."""
    engines = engines_of(of_shape, worker, options.backend)
    return equip(of_shape, worker, stage, engines, Path(folder) / ENGINES, str(device))


def _check_shares(options: PipelineOptions, task: Task) -> None:
    """Refuse what needs one optimizer of all parameters of a worker: here each replica has one of its share."""
    if task.averages and options.ema is None:
        what = "the hook averaged() reads the averages of all of a worker's weights from its optimizer"
        hint = "--ema keeps averages without the optimizer"
    elif options.log_staleness:
        what = "the staleness log follows the parameter groups of a worker's optimizer"
        hint = "leave out --log-staleness"
    else:
        return
    raise RunError(
        f"{what}, and in a build with --shard optimizer each replica has only a share of it",
        hint=f"{hint}; or compile without --shard",
    )
