"""Worker 0's data: epochs of the user's iterable, with random numbers separate from those of the stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from fxpipe.errors import FxpipeError, TaskError
from fxpipe.random_state import random_state_kept, seed_everything
from fxpipe.task.hooks import TrainingTask
from fxpipe.task.model_file import hook_raised

COUNTING_SECONDS = 30.0


class Feed:
    """The user's batches, epoch after epoch.

    The process's random state is seeded once, before the first `train_data()`. Torch's is kept apart from
    the stages, which reseed it, so that the data are the same whatever the pipeline does between two batches.
    """

    def __init__(self, task: TrainingTask, seed: int) -> None:
        self._task = task
        outside = torch.get_rng_state()
        seed_everything(seed)
        self._state = torch.get_rng_state()
        torch.set_rng_state(outside)
        self._batches: Iterator[Any] | None = None

    def total(self, steps: int | None, epochs: int | None) -> int:
        """How many minibatches a run has; those of one epoch if neither is given.

        Raises:
            TaskError: the data are empty; or have no length, and counting them takes too long.
        """
        if steps is not None:
            return steps
        with random_state_kept():
            torch.set_rng_state(self._state)
            data = self._task.train_data()
            try:
                count = len(data)  # type: ignore[arg-type]
            except TypeError:
                count = _count(data)
        if not count:
            raise _empty()
        return count * (1 if epochs is None else epochs)

    def next_batch(self) -> Any:
        """The next batch, of a new epoch after the last one.

        Raises:
            TaskError: the data are empty, or producing them failed.
        """
        with self._own_random():
            return self._next()

    def _next(self) -> Any:
        for _ in range(2):
            fresh = self._batches is None
            try:
                if self._batches is None:
                    self._batches = iter(self._task.train_data())
                return next(self._batches)
            except StopIteration:
                self._batches = None
                if fresh:
                    raise _empty() from None
            except FxpipeError:
                raise
            except Exception as error:
                raise hook_raised("train_data", error, getattr(self._task, "path", None)) from error
        raise _empty()

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        outside = torch.get_rng_state()
        torch.set_rng_state(self._state)
        try:
            yield
        finally:
            self._state = torch.get_rng_state()
            torch.set_rng_state(outside)


def _count(data: Iterable[Any]) -> int:
    begin, count = perf_counter(), 0
    for count, _ in enumerate(data, 1):  # noqa: B007
        if perf_counter() - begin > COUNTING_SECONDS:
            raise TaskError(
                f"train_data() has no length, and counting its batches took more than {COUNTING_SECONDS:.0f} s",
                hint="say how many steps to train: --steps N",
            )
    return count


def _empty() -> TaskError:
    return TaskError(
        "train_data() gave no batch",
        hint="return a new iterable at every call: it is called once for each epoch",
    )
