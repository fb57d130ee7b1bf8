"""The trained model as one file under the model's own names, whichever worker holds each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fxpipe.checkpoint.safetensors_writer import SafetensorsWriter
from fxpipe.errors import FxpipeError, PeerLost, RunError
from fxpipe.observe.record import FINAL_WEIGHTS
from fxpipe.plan.spec import BufferSpec, Plan, TensorSpec
from fxpipe.runtime.worker.executor import Executor


@dataclass(frozen=True)
class FinalTensor:
    """A tensor of the final file: its names (the file has a copy under each) and the worker that holds it."""

    names: tuple[str, ...]
    spec: TensorSpec
    worker: int


def final_tensors(plan: Plan) -> Iterator[FinalTensor]:
    """Every parameter and persistent buffer, in the order that all workers use."""
    for parameter in plan.parameters:
        yield FinalTensor(parameter.names, parameter.tensor, parameter.owner)
    for buffer in plan.buffers:
        if buffer.persistent:
            yield FinalTensor(buffer.names, buffer.tensor, buffer_worker(buffer))


def buffer_worker(buffer: BufferSpec) -> int:
    """The worker whose copy of a buffer counts: its home, else its first reader, else worker 0."""
    return buffer.home if buffer.home is not None else min(buffer.workers, default=0)


def held(executor: Executor, tensor: FinalTensor, averages: Mapping[str, Tensor] | None = None) -> Tensor:
    """The tensor as `executor`'s worker holds it, or its average where there is one."""
    if averages is not None and tensor.names[0] in averages:
        return averages[tensor.names[0]]
    parameter = executor.store.parameters.get(tensor.names[0])
    return executor.buffers[tensor.names[0]] if parameter is None else parameter.detach()


@contextmanager
def weights_are_safe(out: str | None) -> Iterator[None]:
    """Errors raised inside say that the trained weights were already written."""
    try:
        yield
    except PeerLost:
        raise
    except FxpipeError as error:
        safe = None if out is None else f"the trained weights are safe in {Path(out) / FINAL_WEIGHTS}"
        error.hint = "; ".join(text for text in (error.hint, safe) if text) or None
        raise


def write_final_weights(path: str | Path, plan: Plan, fetch: Callable[[FinalTensor], Tensor]) -> None:
    """Write `model.safetensors` or `ema.safetensors`; `fetch` gives one tensor
    after the other, in `final_tensors`' order.

    Raises:
        RunError: the file cannot be written.
    """
    tensors = list(final_tensors(plan))
    try:
        with SafetensorsWriter(path, [(name, t.spec) for t in tensors for name in t.names]) as file:
            for tensor in tensors:
                value = fetch(tensor)
                for _ in tensor.names:
                    file.write(value)
    except OSError as error:
        raise RunError(
            f"{path} cannot be written: {error.strerror}", hint="make room, or choose another --out"
        ) from error
