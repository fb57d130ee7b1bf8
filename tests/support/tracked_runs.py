"""Runs whose workers' tracked allocations are counted, a thread a worker, over the messages of processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import strict_wires
import torch
from strict_wires import Hub, Message, run_in_threads
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fxpipe.costs.allocations import TrackedAllocations
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.process.training_loop import train


class Batches:
    """Made when they are asked for, so that no more of them exist than a worker holds."""

    def __init__(self, make: Callable[[int], Any], count: int) -> None:
        self._make, self._count = make, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._make(index)


class _UntrackedHub(Hub):
    """A message is copied by one of its ends; the memory of the other end is not that one's."""

    def put(self, queue: Any, key: Any, flat: Tensor) -> Message:
        with _disable_current_modes():
            return super().put(queue, key, flat)


def tracked_peaks(
    folder: Path,
    make: Callable[[int], Any],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    steps: int,
    schedule: str | None = None,
    policy: str | None = None,
) -> list[int]:
    """The most bytes that each worker of a build holds while it trains.

    Args:
        make: the batch of a step.
        steps: as many as fill the pipeline.
    """
    found: dict[int, int] = {}
    once = threading.Lock()

    def tracked(executors: Any, *rest: Any) -> None:
        with TrackedAllocations() as memory:
            train(executors, *rest)
        with once:
            found[executors[0].setting.plan.rank_of(executors[0].worker)] = memory.peak

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strict_wires, "train", tracked)
        patch.setattr(strict_wires, "Hub", _UntrackedHub)
        options = PipelineOptions(policy=policy)
        run = run_in_threads(folder, Batches(make, steps), optimizer, False, schedule, options=options)  # type: ignore[arg-type]
    assert not run.failures, run.failures
    return [found[rank] for rank in range(len(found))]
