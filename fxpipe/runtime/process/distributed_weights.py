"""The final weights of a distributed run: rank 0 writes what the others send, as often as its disk needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fxpipe.observe.pulse import Pulse
from fxpipe.plan.packing import Layout
from fxpipe.plan.spec import Plan
from fxpipe.runtime.wires.group import peers
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.final_weights import FinalFiles, FinalTensor, final_tensors, held


class DistributedFinalFiles:
    """`FinalFiles` on rank 0, and what the other processes do for it; all call the same at the same time. Replicas of a
    worker have the same weights: the first gives them.

    Args:
        executors: of the workers of this rank.
        pulse: this process's; every tensor is progress.
        pauses: as those of `FinalFiles`.

    Attributes:
        files: those that rank 0 writes; None elsewhere.
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
        self.plan = plan
        self.executors = {executor.worker: executor for executor in executors if executor.replica == 0}
        self.rank = rank
        self.pulse = pulse
        self.files = FinalFiles(out, plan, self._agree, pauses) if self.rank == 0 else None

    def write(self, name: str, averages: Sequence[Mapping[str, Tensor]] | None = None) -> None:
        """Write a file of the trained weights, or of the `averages` of them that each worker here has."""
        instead: dict[int, Mapping[str, Tensor]] = {}
        if averages is not None and self.executors:
            instead = dict(zip(self.executors, averages, strict=True))
        if self.files is not None:
            self.files.write(name, lambda tensor: self._fetch(tensor, instead))
            return
        again = True
        while again:
            for tensor in final_tensors(self.plan):
                self.pulse.move()
                if tensor.worker in self.executors:
                    with peers(self.rank):
                        dist.send(self._held(tensor, instead).cpu().contiguous(), 0)
            again = self._agree(False)

    def check(self) -> None:
        """Go on only if all files are in the run's folder.

        Raises:
            RunError: on rank 0, as `FinalFiles.check`; the others wait for it, and lose it.
        """
        if self.files is not None:
            self.files.check()
        self._agree(False)

    def _agree(self, again: bool) -> bool:
        """Rank 0 tells the others whether it wants the tensors of a file once more."""
        self.pulse.move()
        box = [again]
        with peers(self.rank):
            dist.broadcast_object_list(box, 0)
        return box[0]

    def _held(self, tensor: FinalTensor, instead: Mapping[int, Mapping[str, Tensor]]) -> Tensor:
        return held(self.executors[tensor.worker], tensor, instead.get(tensor.worker))

    def _fetch(self, tensor: FinalTensor, instead: Mapping[int, Mapping[str, Tensor]]) -> Tensor:
        self.pulse.move()
        if tensor.worker in self.executors:
            return self._held(tensor, instead)
        value = torch.empty(tensor.spec.shape, dtype=Layout(tensor.spec).dtype)
        with peers(self.rank):
            dist.recv(value, self.plan.process_of(tensor.worker, 0))
        return value
