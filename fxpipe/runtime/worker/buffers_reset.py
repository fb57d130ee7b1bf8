"""The hook `reset(model)` on one worker: before the first forward of an epoch, and where an evaluation begins."""

from __future__ import annotations

import torch
from torch import Tensor

from fxpipe.errors import TaskError, listed
from fxpipe.plan.spec import Plan
from fxpipe.random_state import random_state_kept, seed_generators, seed_of
from fxpipe.task.model_file import Task


class BuffersReset:
    """Calls the hook on the buffers that a worker has.

    Args:
        seed: of the run: torch, `random` and numpy are seeded from it and the place of the call, alike on all workers.

    Attributes:
        every: how many steps an epoch has; None where epochs are the user's.
    """

    def __init__(self, plan: Plan, task: Task, seed: int) -> None:
        self._rows = {b.name: b for b in plan.buffers}
        self._task = task
        self._seed = seed
        self._device = torch.device(plan.device)
        self.every: int | None = None

    def due(self, minibatch: int) -> bool:
        """Whether a minibatch, counted from 0, is the first of an epoch."""
        return self.every is not None and minibatch % self.every == 0

    def __call__(self, state: dict[str, Tensor], *place: object) -> None:
        """Put what the hook makes in the place of a worker's buffers; the tensors themselves stay as they are.

        Args:
            state: buffers by their first names; whatever else it has is left alone.
            place: of the call, for random numbers: a minibatch, or an evaluation.

        Raises:
            TaskError: the hook failed, or may not do what it does.
        """
        rows = {self._rows[name].names: value for name, value in state.items() if name in self._rows}
        with random_state_kept():
            seed_generators(seed_of(self._seed, "reset", *place), self._device.type)
            before = torch.get_rng_state()
            found = self._task.reset(rows)
            drew = not torch.equal(before, torch.get_rng_state())
        shared = [n for n, v in found.items() if len(self._rows[n].workers) > 1 and not torch.equal(v, state[n])]
        if drew and shared:
            raise TaskError(
                f"reset(model) draws random numbers and changes {listed(shared)}, of which several workers have copies "
                "that must stay alike",
                hint="take random numbers for a buffer that training changes, which has one worker; or none",
            )
        state.update(found)
