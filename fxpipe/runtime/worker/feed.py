"""Worker 0's data: epochs of the user's iterable, with random numbers separate from those of the stages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from fxpipe.errors import FxpipeError, TaskError
from fxpipe.messages import say
from fxpipe.random_state import random_state, random_state_kept, seed_everything, set_random_state
from fxpipe.task.hooks import TrainingTask
from fxpipe.task.model_file import hook_raised

COUNTING_SECONDS = 30.0
SAY_SECONDS = 5.0


class Feed:
    """The user's batches, epoch after epoch.

    The process's random state is seeded once, before the first `train_data()`. Torch's is kept apart from
    the stages, which reseed it, so that the data are the same whatever the pipeline does between two batches.

    Attributes:
        marks: whether `mark` will be asked after so many batches; known before the next batch is read.
    """

    def __init__(self, task: TrainingTask, seed: int) -> None:
        self._task = task
        outside = torch.get_rng_state()
        seed_everything(seed)
        self._state = torch.get_rng_state()
        torch.set_rng_state(outside)
        self._data: Any = None
        self._batches: Iterator[Any] | None = None
        self._given = 0
        self._marks: dict[int, dict[str, Any]] = {}
        self._handed = -1  # the latest that was asked for
        self.marks: Callable[[int], bool] = lambda batches: False

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

    def go_on(self, batches: int, mark: Mapping[str, Any] | None) -> None:
        """Go to where so many batches have been given.

        Args:
            mark: what `mark` gave there. Without one, the batches are made again, and forgotten; after some seconds
                that is said.

        Raises:
            TaskError: the data are empty, or producing them failed.
        """
        if mark is not None:
            self._load(batches, mark)
            return
        begin = said = perf_counter()
        with self._own_random():
            for number in range(batches):
                self._read()
                if (now := perf_counter()) - said > SAY_SECONDS:
                    said = now
                    left = (now - begin) / (number + 1) * (batches - number - 1)
                    say(f"skipping the data of the first {batches} steps: {number + 1} so far, {left:.0f} s left")

    def mark(self, batches: int) -> dict[str, Any] | None:
        """Where the data stood after so many batches; None if `train_data()` gives no object with a `state_dict`."""
        if batches == self._given:  # no later batch was read: the run ends here, or a flush is between
            self._mark()
        self._handed = batches
        found = self._marks.get(batches)
        self._marks = {at: mark for at, mark in self._marks.items() if at > batches}
        return found

    def _mark(self) -> None:
        if self._batches is None or not hasattr(self._data, "load_state_dict"):
            return
        state, numpy = random_state(), None
        if state.numpy is not None:
            kind, keys, *rest = state.numpy
            numpy = (kind, torch.from_numpy(keys.copy()), *rest)
        data, generator = copy.deepcopy(self._data.state_dict()), _generator(self._data)
        own = None if generator is None else generator.get_state()
        mark = {"data": data, "torch": self._state, "python": state.python, "numpy": numpy, "generator": own}
        self._marks[self._given] = mark

    def _load(self, batches: int, mark: Mapping[str, Any]) -> None:
        self._given = batches
        try:
            with self._own_random():
                self._data = self._task.train_data()
                self._data.load_state_dict(mark["data"])
                self._batches = iter(self._data)
        except FxpipeError:
            raise
        except Exception as error:
            raise hook_raised("train_data", error, getattr(self._task, "path", None)) from error
        if mark.get("generator") is not None and (generator := _generator(self._data)) is not None:
            generator.set_state(mark["generator"])
        numpy = mark["numpy"]
        if numpy is not None:
            numpy = (numpy[0], numpy[1].numpy(), *numpy[2:])
        set_random_state(random_state()._replace(python=mark["python"], numpy=numpy))
        self._state = mark["torch"]

    def _next(self) -> Any:
        if self._given > self._handed and self.marks(self._given):
            self._mark()
        return self._read()

    def _read(self) -> Any:
        self._given += 1
        for _ in range(2):
            fresh = self._batches is None
            try:
                if self._batches is None:
                    self._data = self._task.train_data()
                    self._batches = iter(self._data)
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


def _generator(data: Any) -> torch.Generator | None:
    """The generator that a loader of torch's or torchdata's draws from.

    Without a process of its own for the data, torchdata 0.11 draws once more from it where a loader goes on than where
    it did not stop: later epochs of the same loader would have another order.
    """
    found = getattr(data, "generator", None)
    return found if isinstance(found, torch.Generator) else None


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
