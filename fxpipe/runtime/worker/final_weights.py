"""The trained model as one file, with the tensors of all workers under the model's own names."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import sleep

import torch
import torch.distributed as dist
from torch import Tensor

from fxpipe.checkpoint.safetensors_file import safetensors_writer
from fxpipe.checkpoint.shard import buffer_worker
from fxpipe.errors import FxpipeError, PeerLost, RunError, listed
from fxpipe.messages import warn
from fxpipe.observe.pulse import Pulse
from fxpipe.observe.record import FINAL_WEIGHTS
from fxpipe.plan.packing import Layout
from fxpipe.plan.spec import Plan, TensorSpec
from fxpipe.planner.quantity import size
from fxpipe.runtime.wires.group import alone, peers
from fxpipe.runtime.worker.executor import Executor

PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Seconds between two attempts to write a file."""

SHORT_PAUSES = (1.0,)
"""The same, for a file that training waits for."""


@dataclass(frozen=True)
class FinalTensor:
    """A tensor of the final file: its names (the file has a copy under each) and the worker that holds it."""

    names: tuple[str, ...]
    spec: TensorSpec
    worker: int


Fetch = Callable[[FinalTensor], Tensor | None]


def final_tensors(plan: Plan) -> Iterator[FinalTensor]:
    """Every parameter and persistent buffer, in the order that all workers use."""
    for parameter in plan.parameters:
        yield FinalTensor(parameter.names, parameter.tensor, parameter.owner)
    for buffer in plan.buffers:
        if buffer.persistent:
            yield FinalTensor(buffer.names, buffer.tensor, buffer_worker(buffer))


def held(executor: Executor, tensor: FinalTensor, averages: Mapping[str, Tensor] | None = None) -> Tensor:
    """The tensor as `executor`'s worker holds it, or its average where there is one."""
    if averages is not None and tensor.names[0] in averages:
        return averages[tensor.names[0]]
    parameter = executor.store.parameters.get(tensor.names[0])
    return executor.buffers[tensor.names[0]] if parameter is None else parameter.detach()


def copies(plan: Plan, executors: Sequence[Executor], parameters: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Copies of all final tensors under all their names; all workers must be in this process.

    Args:
        parameters: each worker's, or the values to use instead.
    """
    found: dict[str, Tensor] = {}
    for tensor in final_tensors(plan):
        value = held(executors[tensor.worker], tensor, parameters[tensor.worker]).detach().clone()
        found |= dict.fromkeys(tensor.names, value)
    return found


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


def warn_of_little_room(out: str | None, plan: Plan, averages: bool) -> None:
    """Warn, before training, if the disk of `out` has less space than the trained weights need.

    Args:
        averages: averages of the weights are written, too.
    """
    if out is None:
        return
    names = [(tensor.spec, len(tensor.names)) for tensor in final_tensors(plan)]
    needed = sum(count * math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize for spec, count in names)
    needed *= 1 + averages
    try:
        free = shutil.disk_usage(out).free
    except OSError:
        return
    if free < needed:
        warn(
            f"{out} has {size(free)} free, and the trained weights need {size(needed)}: free space before the run ends"
        )


class FinalFiles:
    """Writes `model.safetensors` and `ema.safetensors`, even if the disk is full or fails.

    All processes of a run call each method together: rank 0 writes, and the others send it what their workers hold.
    Replicas of a worker have the same weights: replica 0 sends them.

    The workers keep the tensors until their file is written. A write that fails is repeated for a minute; then the file
    is written to a temporary folder, and `check` raises an error that names the folder.

    Args:
        executors: of the workers of this rank.
        pulse: of this process; every tensor counts as progress.
        pauses: seconds between two attempts; None for `PAUSES`.
    """

    def __init__(
        self,
        out: str | Path,
        plan: Plan,
        executors: Sequence[Executor],
        rank: int,
        pulse: Pulse,
        pauses: Sequence[float] | None = None,
    ) -> None:
        self.out = Path(out)
        self._plan, self._rank, self._pulse = plan, rank, pulse
        self._executors = {executor.worker: executor for executor in executors if executor.replica == 0}
        self._pauses = PAUSES if pauses is None else pauses
        self._tensors = list(final_tensors(plan))
        self._elsewhere: Path | None = None
        self._problems: list[str] = []
        self._lost: list[str] = []

    def write(self, name: str, averages: Sequence[Mapping[str, Tensor]] | None = None) -> None:
        """Write a file of the trained weights, or of their `averages`, which are given for each worker here."""
        instead: dict[int, Mapping[str, Tensor]] = {}
        if averages is not None and self._executors:
            instead = dict(zip(self._executors, averages, strict=True))
        fetch = partial(self._fetch, instead)
        if self._rank == 0:
            self._write(name, fetch)
            return
        again = True
        while again:
            for tensor in self._tensors:
                if (value := fetch(tensor)) is not None:
                    with peers(self._rank):
                        dist.send(value.cpu().contiguous(), 0)
            again = self._agree(False)

    def check(self) -> None:
        """Return only if all files are in the run's folder.

        Raises:
            RunError: on rank 0; names the temporary folder, or the files that are lost. The other ranks wait for rank
                0, and raise PeerLost.
        """
        if (problem := self.problem) is not None:
            raise problem
        self._agree(False)

    @property
    def problem(self) -> RunError | None:
        """The error that `check` raises here; None if all files are written."""
        if not self._problems:
            return None
        if self._lost:
            hint = f"{listed(self._lost)} could not be written anywhere: free space, and train again"
        else:
            hint = f"the trained weights are in {self._elsewhere}: move them before that folder is cleared"
        return RunError("; ".join(self._problems), hint=hint)

    def _write(self, name: str, fetch: Fetch) -> None:
        path = self.out / name
        if self._elsewhere is None:
            for pause in (*self._pauses, None):
                error = self._attempt(path, fetch)
                if error is None:
                    self._agree(False)
                    return
                why = error.strerror or str(error)
                self._agree(True)
                if pause is None:
                    self._problems.append(f"{path} cannot be written: {why}")
                    break
                warn(f"{path} cannot be written: {why}; the weights stay in memory; next attempt in {pause:g} s")
                sleep(pause)
        try:
            if self._elsewhere is None:
                self._elsewhere = Path(tempfile.mkdtemp(prefix="fxpipe-weights-"))
            error = self._attempt(self._elsewhere / name, fetch)
        except OSError as refused:
            for tensor in self._tensors:
                fetch(tensor)
            error = refused
        if error is not None:
            self._lost.append(name)
            self._problems.append(f"{name} cannot be written to a temporary folder: {error.strerror or error}")
        self._agree(False)

    def _attempt(self, path: Path, fetch: Fetch) -> OSError | None:
        """Write the file, and fetch all tensors even if that fails; returns the error."""
        values = ((tensor, fetch(tensor)) for tensor in self._tensors)
        try:
            with safetensors_writer(path, [(name, t.spec) for t in self._tensors for name in t.names]) as file:
                for tensor, value in values:
                    assert value is not None, "rank 0 gets it from the worker's process"
                    for _ in tensor.names:
                        file.write(value)
        except OSError as error:
            for _ in values:
                pass
            return error
        return None

    def _fetch(self, instead: Mapping[int, Mapping[str, Tensor]], tensor: FinalTensor) -> Tensor | None:
        """A tensor of a worker here; on rank 0 of any worker, received from its process. Else None."""
        self._pulse.move()
        if tensor.worker in self._executors:
            return held(self._executors[tensor.worker], tensor, instead.get(tensor.worker))
        if self._rank:
            return None
        value = torch.empty(tensor.spec.shape, dtype=Layout(tensor.spec).dtype)
        with peers(self._rank):
            dist.recv(value, self._plan.process_of(tensor.worker, 0))
        return value

    def _agree(self, again: bool) -> bool:
        """Rank 0 sends the others whether it needs the tensors of a file again."""
        self._pulse.move()
        if alone():
            return again
        box = [again]
        with peers(self._rank):
            dist.broadcast_object_list(box, 0)
        return box[0]
