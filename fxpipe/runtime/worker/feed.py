"""Worker 0's data: epochs of the user's iterable, with random numbers separate from those of the stages.

And how many steps an epoch has, which all workers must know for what they do every epoch.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch.utils.data import SequentialSampler

from fxpipe.checkpoint.shard import Shard
from fxpipe.errors import FxpipeError, TaskError
from fxpipe.messages import say, warn
from fxpipe.random_state import (
    TorchState,
    random_state,
    random_state_kept,
    seed_everything,
    set_random_state,
    set_torch_state,
    torch_state,
)
from fxpipe.runtime.options import PipelineOptions, RunOptions, steps_or_epoch
from fxpipe.runtime.wires.exchange import gathered, of_worker_0
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.observer import Observer
from fxpipe.task.model_file import Task, hook_raised
from fxpipe.task.paced_scheduler import EPOCH

COUNTING_SECONDS = 30.0
SAY_SECONDS = 5.0


class Feed(Observer):
    """The user's batches, epoch after epoch.

    The process's random state is seeded once, before the first `train_data()`. Torch's is kept apart from
    the stages, which reseed it, so that the data are the same whatever the pipeline does between two batches.

    Attributes:
        length: what `epoch` gives, once something has asked for it.
        steps_per_epoch: if it is set, what is done once an epoch counts on it: an epoch of another length is told.
    """

    def __init__(self, task: Task, seed: int) -> None:
        self._task, self._seed = task, seed
        self._state = torch_state()
        with self._own_random():
            seed_everything(seed)
        self._data: Any = None
        self._batches: Iterator[Any] | None = None
        self._given = 0
        self._marks: dict[int, dict[str, Any]] = {}
        self._handed = -1  # the latest that was asked for
        self.length: int | None = None
        self._order = _Order()
        self._since_begin: int | None = 0  # the batches of the present epoch; None if it began before a checkpoint
        self.steps_per_epoch: int | None = None

    def epoch(self) -> int:
        """How many batches an epoch has: the data's length, or, where they have none, counted once.

        Raises:
            TaskError: the data are empty; or have no length, and counting them takes too long.
        """
        if self.length is None:
            with random_state_kept():
                set_torch_state(self._state)
                data = self._task.train_data()
                try:
                    self.length = len(data)  # type: ignore[arg-type]
                except TypeError:
                    self.length = _count(data)
            if not self.length:
                raise _empty()
        return self.length

    def next_batch(self, marked: bool = False) -> Any:
        """The next batch, of a new epoch after the last one.

        Args:
            marked: `mark` will be asked after the batches before it.

        Raises:
            TaskError: the data are empty, or producing them failed.
        """
        with self._own_random():
            if marked and self._given > self._handed:
                self._mark()
            return self._read()

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

    def cut(self, worker: int, shard: Shard) -> None:
        """Worker 0's shard has where the data stand."""
        if worker == 0:
            shard.data = self.mark(shard.step)

    def _mark(self) -> None:
        if self._batches is None or not hasattr(self._data, "load_state_dict"):
            return
        state, numpy = random_state(), None
        if state.numpy is not None:
            kind, keys, *rest = state.numpy
            numpy = (kind, torch.from_numpy(keys.copy()), *rest)
        data, generator = copy.deepcopy(self._data.state_dict()), _generator(self._data)
        own = None if generator is None else generator.get_state()
        mark = {"data": data, "torch": self._state.cpu, "python": state.python, "numpy": numpy, "generator": own}
        if self._state.cuda is not None:
            mark["cuda"] = self._state.cuda
        self._marks[self._given] = mark

    def _load(self, batches: int, mark: Mapping[str, Any]) -> None:
        self._given = batches
        self._since_begin = None
        try:
            with self._own_random():
                self._data = self._task.train_data()
                self._data.load_state_dict(mark["data"])
                self._batches = iter(self._data)
        except FxpipeError:
            raise
        except Exception as error:
            raise hook_raised("train_data", error, self._task.path) from error
        if mark.get("generator") is not None and (generator := _generator(self._data)) is not None:
            generator.set_state(mark["generator"])
        numpy = mark["numpy"]
        if numpy is not None:
            numpy = (numpy[0], numpy[1].numpy(), *numpy[2:])
        set_random_state(random_state()._replace(python=mark["python"], numpy=numpy))
        self._state = TorchState(mark["torch"], mark.get("cuda"))

    def _read(self) -> Any:
        self._given += 1
        for _ in range(2):
            fresh = self._batches is None
            try:
                if self._batches is None:
                    self._data = self._task.train_data()
                    self._order.begins(self._data)
                    self._batches = iter(self._data)
                batch = next(self._batches)
                if self._since_begin is not None:
                    self._since_begin += 1
                return batch
            except StopIteration:
                self._batches = None
                if fresh:
                    raise _empty() from None
                self._epoch_over()
            except FxpipeError:
                raise
            except Exception as error:
                raise hook_raised("train_data", error, self._task.path) from error
        raise _empty()

    def _epoch_over(self) -> None:
        found, expected, self._since_begin = self._since_begin, self.steps_per_epoch, 0
        if found is not None and expected is not None and found != expected:
            warn(
                f"train_data() gave {found} batches for an epoch, not {expected}: what is done every epoch is done "
                f"every {expected} steps all the same (--steps-per-epoch says how many)"
            )
            self.steps_per_epoch = None  # once is enough

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        outside = torch_state()
        set_torch_state(self._state)
        if self._state.cuda is None and torch.cuda.is_initialized():  # since the latest batch
            torch.cuda.manual_seed(self._seed)
        try:
            yield
        finally:
            self._state = torch_state()
            set_torch_state(outside)


class _Order:
    """Warns, once, where epochs cannot but have the same order: `train_data()` makes the loader's generator anew."""

    def __init__(self) -> None:
        self._last: tuple[torch.Generator, torch.Tensor] | None = None
        self._said = False

    def begins(self, data: Any) -> None:
        """An epoch of these data begins."""
        generator = _generator(data)
        if generator is None or self._said or isinstance(getattr(data, "sampler", None), SequentialSampler):
            return
        state = generator.get_state()
        if self._last is not None and self._last[0] is not generator and torch.equal(self._last[1], state):
            warn(
                "train_data() makes its loader's generator anew, with the same seed: every epoch has the same order, "
                "unlike a script's whose loader is made once. Make the generator once, outside train_data()"
            )
            self._said = True
        self._last = generator, state


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
                hint="say how many steps to train, --steps N, or how many an epoch has, --steps-per-epoch N",
            )
    return count


def _empty() -> TaskError:
    return TaskError(
        "train_data() gave no batch",
        hint="return a new iterable at every call: it is called once for each epoch",
    )


Options = TypeVar("Options", bound=PipelineOptions)

OF_EPOCHS = ("eval_every", "checkpoint_every")
"""The options that may say `epoch`."""


def in_steps(options: Options) -> Options:
    """The options with a number of steps where they say `epoch`.

    Raises:
        TaskError: it is not known how many that is, or none.
        FxpipeError: they say something else.
    """
    if options.steps_per_epoch is not None and options.steps_per_epoch < 1:
        raise TaskError(f"an epoch has {options.steps_per_epoch} steps", hint="steps_per_epoch=len(DATA)")
    changes: dict[str, Any] = {}
    if (every := getattr(options, "eval_every", None)) is not None:
        changes["eval_every"] = steps_or_epoch(every)
        options = dataclasses.replace(options, **changes)
    named = [name for name in OF_EPOCHS if getattr(options, name, None) == EPOCH]
    if not named:
        return options
    if options.steps_per_epoch is None:
        raise TaskError(
            f"{named[0]} is every epoch, and it is not known how many steps that is", hint="steps_per_epoch=len(DATA)"
        )
    changes = dict.fromkeys(named, options.steps_per_epoch)
    return dataclasses.replace(options, **changes)


def counted(options: RunOptions, feed: Feed, epochs: bool) -> tuple[int, int | None]:
    """How many minibatches a run has, and how many an epoch, if an option names epochs: by the data.

    Args:
        epochs: something else must know.

    Raises:
        TaskError: the data are empty; or have no length, and counting them takes too long.
    """
    total, per_epoch = options.steps, options.steps_per_epoch
    if total is None:
        total = (feed.epoch() if per_epoch is None else per_epoch) * (1 if options.epochs is None else options.epochs)
    asked = epochs or any(getattr(options, name) == EPOCH for name in OF_EPOCHS)
    return total, epoch_of(feed) if asked and per_epoch is None else per_epoch


def agree_length(options: RunOptions, feed: Feed | None, rank: int, epochs: bool) -> tuple[int, RunOptions]:
    """How many minibatches the run has, and the options in steps; called by all workers.

    Args:
        feed: on worker 0.
        epochs: as of `counted`.
    """
    total, epoch = of_worker_0((0, None) if feed is None else counted(options, feed, epochs), rank)
    return total, in_steps(dataclasses.replace(options, steps_per_epoch=epoch))


def agree_epoch(executors: Sequence[Executor], feed: Feed | None, rank: int, ranks: int) -> int | None:
    """Tell the schedulers and the hook `reset` of the workers here how long an epoch is, if any worker's must know;
    called by all processes.

    Returns:
        How long one is, as far as this process knows.
    """
    if any(gathered(any(map(_must_know, executors)), rank, ranks)):
        epoch = of_worker_0(None if feed is None else epoch_of(feed), rank)
        for executor in executors:
            executor.store.updater.steps_per_epoch = epoch
    steps = executors[0].store.updater.steps_per_epoch
    for executor in executors:
        if executor.resets is not None:
            executor.resets.every = steps
    return steps or (None if feed is None else feed.length)


def _must_know(executor: Executor) -> bool:
    updater = executor.store.updater
    return updater.steps_per_epoch is None and (updater.per_epoch or executor.resets is not None)


def epoch_of(feed: Feed) -> int:
    """How many steps an epoch of the data is; from now on, one of another length is told."""
    feed.steps_per_epoch = feed.epoch()
    return feed.steps_per_epoch
