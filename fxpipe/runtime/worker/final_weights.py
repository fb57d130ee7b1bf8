"""The trained model as one file, with the tensors of all workers under the model's own names."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fxpipe.checkpoint.safetensors_file import safetensors_writer
from fxpipe.checkpoint.shard import buffer_worker
from fxpipe.errors import FxpipeError, PeerLost, RunError, listed
from fxpipe.messages import warn
from fxpipe.observe.out_folder import FINAL_WEIGHTS
from fxpipe.observe.pulse import Pulse
from fxpipe.plan.packing import Layout
from fxpipe.plan.plan import Plan
from fxpipe.plan.spec import TensorSpec
from fxpipe.planner.quantity import size
from fxpipe.runtime.wires.exchange import of_worker_0
from fxpipe.runtime.wires.group import peers
from fxpipe.runtime.worker.averages import Averages
from fxpipe.runtime.worker.executor import Executor


@dataclass(frozen=True)
class FinalTensor:
    """A tensor of the final file: its names there (the file has a copy under each) and the worker that holds it."""

    name: str
    names: tuple[str, ...]
    spec: TensorSpec
    worker: int


def final_tensors(plan: Plan) -> Iterator[FinalTensor]:
    """Every parameter and saved buffer, in the order that all workers use."""
    for parameter in plan.parameters:
        yield FinalTensor(parameter.name, parameter.saved, parameter.tensor, parameter.owner)
    for buffer in plan.buffers:
        if buffer.saved:
            yield FinalTensor(buffer.name, buffer.saved, buffer.tensor, buffer_worker(buffer))


def held(executor: Executor, tensor: FinalTensor, averages: Mapping[str, Tensor] | None = None) -> Tensor:
    """The tensor as `executor`'s worker holds it, or its average where there is one."""
    if averages is not None and tensor.name in averages:
        return averages[tensor.name]
    parameter = executor.store.parameters.get(tensor.name)
    return executor.buffers[tensor.name] if parameter is None else parameter.detach()


def averages_of(executors: Sequence[Executor]) -> list[dict[str, Tensor]] | None:
    """The present averages of each worker; None if there are none."""
    averages = [executor.store.part(Averages) for executor in executors]
    return [each.read() for each in averages if each is not None] or None


def copies(plan: Plan, executors: Sequence[Executor], parameters: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Copies of the final tensors that these workers hold, under all their names.

    Args:
        parameters: each worker's, or the values to use instead.
    """
    hosted = {executor.worker: (executor, values) for executor, values in zip(executors, parameters, strict=True)}
    tensors: dict[str, Tensor] = {}
    for tensor in final_tensors(plan):
        if tensor.worker in hosted:
            executor, values = hosted[tensor.worker]
            tensors |= dict.fromkeys(tensor.names, held(executor, tensor, values).detach().clone())
    return tensors


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
    """Warn, before training, if the disk of `out` has less space than the trained weights need."""
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

    If the run's folder does not take a file, it and the later ones are written to a temporary folder, and `check`
    raises an error that names it.

    Args:
        out: the run's folder; made again if it was deleted.
        executors: of the workers of this rank.
        pulse: of this process; every tensor counts as progress.
    """

    def __init__(self, out: str | Path, plan: Plan, executors: Sequence[Executor], rank: int, pulse: Pulse) -> None:
        self.out = Path(out)
        self._plan, self._rank, self._pulse = plan, rank, pulse
        self._executors = {executor.worker: executor for executor in executors if executor.replica == 0}
        self._tensors = list(final_tensors(plan))
        self._elsewhere: Path | None = None
        self._problems: list[str] = []
        self._lost: list[str] = []

    def write(self, name: str, averages: Sequence[Mapping[str, Tensor]] | None = None) -> None:
        """Write a file of the trained weights, or of their `averages`, which are given for each worker here."""
        instead: dict[int, Mapping[str, Tensor]] = {}
        if averages is not None and self._executors:
            instead = dict(zip(self._executors, averages, strict=True))
        again = True
        while again:
            values = ((tensor, self._fetch(instead, tensor)) for tensor in self._tensors)
            if self._rank == 0:
                again = self._write(name, values)
            else:
                for _, value in values:
                    if value is not None:
                        with peers():
                            dist.send(value.cpu().contiguous(), 0)
            again = self._agree(again)

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

    def _write(self, name: str, values: Iterator[tuple[FinalTensor, Tensor | None]]) -> bool:
        """Write a file of all `values`; returns whether they are needed again, for the temporary folder."""
        first = not self._problems
        try:
            if first:
                self.out.mkdir(parents=True, exist_ok=True)
            elif self._elsewhere is None:
                self._elsewhere = Path(tempfile.mkdtemp(prefix="fxpipe-weights-"))
            path = (self._elsewhere or self.out) / name
            with safetensors_writer(path, [(name, t.spec) for t in self._tensors for name in t.names]) as file:
                for tensor, value in values:
                    assert value is not None, "rank 0 gets it from the worker's process"
                    for _ in tensor.names:
                        file.write(value)
        except OSError as error:
            for _ in values:  # the others send them all
                pass
            place = self.out / name if first else f"{name} in a temporary folder"
            self._problems.append(f"{place} cannot be written: {error.strerror or error}")
            if not first:
                self._lost.append(name)
            return first
        if not first:
            warn(f"{name} is in {self._elsewhere}: move it before that folder is cleared")
        return False

    def _fetch(self, instead: Mapping[int, Mapping[str, Tensor]], tensor: FinalTensor) -> Tensor | None:
        """A tensor of a worker here; on rank 0 of any worker, received from its process. Else None."""
        self._pulse.move()
        if tensor.worker in self._executors:
            return held(self._executors[tensor.worker], tensor, instead.get(tensor.worker))
        if self._rank:
            return None
        value = torch.empty(tensor.spec.shape, dtype=Layout(tensor.spec).dtype)
        with peers():
            dist.recv(value, self._plan.mesh.process_of(tensor.worker, 0))
        return value

    def _agree(self, again: bool) -> bool:
        """Rank 0 sends the others whether it needs the tensors of a file again."""
        self._pulse.move()
        return of_worker_0(again)
