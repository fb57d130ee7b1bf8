"""Where a worker's first weights come from: the build, a checkpoint, or the user's model()."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from fxpipe.errors import BuildError
from fxpipe.messages import warn
from fxpipe.plan.packing import Layout
from fxpipe.plan.spec import BufferSpec, ParameterSpec, Plan, TensorSpec
from fxpipe.runtime.worker.checkpoint import Checkpoint
from fxpipe.runtime.worker.model_initial_values import initialised
from fxpipe.task.model_file import Task

AGAIN = "compile the model again: fxpipe compile MODEL -o BUILD"


def initial_weights(
    plan: Plan,
    folder: Path,
    worker: int,
    parameters: Sequence[ParameterSpec],
    buffers: Sequence[BufferSpec],
    task: Task,
    seed: int,
    device: torch.device | str,
    checkpoint: Checkpoint | None = None,
) -> dict[str, torch.Tensor]:
    """The values of one worker's parameters and buffers by first name, each in memory of its own; nothing else is read.

    Args:
        checkpoint: what a run starts from, if not from the build's own values.

    Raises:
        BuildError: the build's file or the checkpoint cannot be read, or does not fit the plan.
        TaskError: the build has no values of the parameters (`Plan.meta`), and the model does not initialise them.
    """
    found: dict[str, torch.Tensor] = {}
    if checkpoint is not None:
        if worker == 0:
            for warning in checkpoint.warnings:
                warn(warning)
        persistent = [b for b in buffers if b.persistent]
        found = dict(checkpoint.read([*parameters, *persistent], device))
    elif plan.meta and parameters:
        found = initialised(plan, parameters, task.model, seed, device)
    rows: list[ParameterSpec | BufferSpec] = [*parameters, *buffers]
    rest = [(row.name, row.tensor) for row in rows if row.name not in found]
    return found | read_tensors(folder / plan.weights_file, rest, device)


def read_tensors(
    path: str | Path, specs: Iterable[tuple[str, TensorSpec]], device: torch.device | str
) -> dict[str, torch.Tensor]:
    """Only the named tensors of a safetensors file, laid out as the specs say, each in memory of its own.

    Raises:
        BuildError: no such file, or tensors missing or of another shape or dtype (all are listed).
    """
    found: dict[str, torch.Tensor] = {}
    wrong: list[str] = []
    try:
        with safe_open(str(path), framework="pt") as file:
            present = set(file.keys())
            for name, spec in specs:
                if name not in present:
                    wrong.append(f"{name} is missing")
                    continue
                tensor = file.get_tensor(name)
                layout = Layout(spec, name)
                if tensor.shape != layout.shape or tensor.dtype != layout.dtype:
                    wrong.append(
                        f"{name} is {tensor.dtype}{list(tensor.shape)}, not {layout.dtype}{list(layout.shape)}"
                    )
                    continue
                found[name] = layout.empty(device).copy_(tensor)
    except Exception as error:
        raise BuildError(f"the weights cannot be read: {error}", where=str(path), hint=AGAIN) from error
    if wrong:
        raise BuildError("the weights do not fit the plan: " + "; ".join(wrong), where=str(path), hint=AGAIN)
    return found
