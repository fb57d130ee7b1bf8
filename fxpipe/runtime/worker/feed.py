"""Worker 0's data: epochs of the user's iterable, with random numbers separate from the stages'.

And the length of an epoch in steps, which all workers must know for what they do every epoch.
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
    device_in_use,
    random_state,
    random_state_kept,
    seed_everything,
    set_random_state,
    set_torch_state,
    torch_state,
)
from fxpipe.runtime.options import PipelineOptions, RunOptions
from fxpipe.runtime.wires.exchange import gathered, of_worker_0
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.observer import Observer
from fxpipe.task.first_batches import generator_of
from fxpipe.task.model_file import Task, hook_raised
from fxpipe.task.paced_scheduler import EPOCH

COUNTING_SECONDS = 30.0
SAY_SECONDS = 5.0


class Feed(Observer):
    """The user's batches, epoch after epoch.

    The process's random state is seeded once, before the first `train_data()`. Torch's random state is kept separate
    from the stages', which reseed it: the data do not depend on what the pipeline does between two batches.

    Attributes:
        length: what `epoch` returned; None before the first call.
        steps_per_epoch: what work done once an epoch relies on; if set, an epoch of another length causes a warning.
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
        self._handed = -1  # the latest step that `mark` was called for
        self.length: int | None = None
        self._order = _Order()
        self._since_begin: int | None = 0  # batches so far in this epoch; None if it began before a checkpoint
        self.steps_per_epoch: int | None = None

    def epoch(self) -> int:
        """How many batches an epoch has: the length of the data, or, if they have no length, counted once."""
        if self.length is None:
            with random_state_kept():
                set_torch_state(self._state)
                data = self._task.train_data()
                try:
                    self.length = len(data)  # type: ignore[arg-type]
                except (TypeError, NotImplementedError):
                    self.length = _count(data)
            if not self.length:
                raise _empty()
        return self.length

    def next_batch(self, marked: bool = False) -> Any:
        """The next batch; after the last one, the first of a new epoch.

        Args:
            marked: `mark` will be called for the batches before this one.
        """
        with self._own_random():
            if marked and self._given > self._handed:
                self._mark()
            return self._read()

    def go_on(self, batches: int, mark: Mapping[str, Any] | None) -> None:
        """Continue after this many batches.

        Args:
            mark: what `mark` returned there. Without it, the batches are read again and dropped; after some seconds a
                message says so.
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
        """The state of the data after this many batches; None if what `train_data()` returns has no `state_dict`."""
        if batches == self._given:  # no later batch was read: the run ends here, or a flush follows
            self._mark()
        self._handed = batches
        found = self._marks.get(batches)
        self._marks = {at: mark for at, mark in self._marks.items() if at > batches}
        return found

    def cut(self, worker: int, shard: Shard) -> None:
        """Put the state of the data into worker 0's shard."""
        if worker == 0:
            shard.data = self.mark(shard.step)

    def _mark(self) -> None:
        if self._batches is None or not hasattr(self._data, "load_state_dict"):
            return
        state, numpy = random_state(), None
        if state.numpy is not None:
            kind, keys, *rest = state.numpy
            numpy = (kind, torch.from_numpy(keys.copy()), *rest)
        data, generator = copy.deepcopy(self._data.state_dict()), generator_of(self._data)
        own = None if generator is None else generator.get_state()
        mark = {"data": data, "torch": self._state.cpu, "python": state.python, "numpy": numpy, "generator": own}
        if self._state.device is not None:
            mark["cuda"] = self._state.device
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
        # Without worker processes, a loader of torchdata 0.11 draws one number more when it resumes: later epochs of
        # the same loader would have another order.
        if mark.get("generator") is not None and (generator := generator_of(self._data)) is not None:
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
                failed = hook_raised("train_data", error, self._task.path)
                what = f"{failed.what}, when step {self._given} read its batch"
                raise TaskError(what, where=failed.where, hint=failed.hint) from error
        raise _empty()

    def _epoch_over(self) -> None:
        found, expected, self._since_begin = self._since_begin, self.steps_per_epoch, 0
        if found is not None and expected is not None and found != expected:
            warn(
                f"train_data() gave {found} batches this epoch, not {expected}: what runs every epoch still runs "
                f"every {expected} steps (--steps-per-epoch sets the number)"
            )
            self.steps_per_epoch = None  # once is enough

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        outside = torch_state()
        set_torch_state(self._state)
        if self._state.device is None and (device := device_in_use()) is not None:  # since the latest batch
            device.manual_seed(self._seed)
        try:
            yield
        finally:
            self._state = torch_state()
            set_torch_state(outside)


class _Order:
    """Warns once if all epochs have the same order, because `train_data()` makes a new generator each time."""

    def __init__(self) -> None:
        self._last: tuple[torch.Generator, torch.Tensor] | None = None
        self._said = False

    def begins(self, data: Any) -> None:
        """An epoch of these data begins."""
        generator = generator_of(data)
        if generator is None or self._said or isinstance(getattr(data, "sampler", None), SequentialSampler):
            return
        state = generator.get_state()
        if self._last is not None and self._last[0] is not generator and torch.equal(self._last[1], state):
            warn(
                "train_data() makes a new generator with the same seed at every call, so every epoch has the same "
                "order. A script that makes its loader once does not: make the generator once, outside train_data()"
            )
            self._said = True
        self._last = generator, state


def _count(data: Iterable[Any]) -> int:
    begin, count = perf_counter(), 0
    for count, _ in enumerate(data, 1):  # noqa: B007
        if perf_counter() - begin > COUNTING_SECONDS:
            raise TaskError(
                f"train_data() has no length, and counting its batches took more than {COUNTING_SECONDS:.0f} s",
                hint="give the number of steps to train, --steps N, or of an epoch, --steps-per-epoch N",
            )
    return count


def _empty() -> TaskError:
    return TaskError(
        "train_data() gave no batch",
        hint="return a new iterable at every call: fxpipe calls it once for each epoch",
    )


Options = TypeVar("Options", bound=PipelineOptions)

OF_EPOCHS = ("eval_every", "checkpoint_every")
"""The options that may say `epoch`."""


def in_steps(options: Options) -> Options:
    """The options with `epoch` replaced by a number of steps."""
    named = [name for name in OF_EPOCHS if getattr(options, name, None) == EPOCH]
    if not named:
        return options
    if options.steps_per_epoch is None:
        raise TaskError(
            f"{named[0]} is every epoch, and the length of an epoch is unknown", hint="steps_per_epoch=len(DATA)"
        )
    changes: dict[str, Any] = dict.fromkeys(named, options.steps_per_epoch)
    return dataclasses.replace(options, **changes)


def counted(options: RunOptions, feed: Feed, epochs: bool) -> tuple[int, int | None]:
    """How many minibatches a run has, and how many an epoch has, if an option says `epoch`; counted in the data."""
    total, per_epoch = options.steps, options.steps_per_epoch
    if total is None:
        total = (feed.epoch() if per_epoch is None else per_epoch) * (1 if options.epochs is None else options.epochs)
    asked = epochs or any(getattr(options, name) == EPOCH for name in OF_EPOCHS)
    return total, epoch_of(feed) if asked and per_epoch is None else per_epoch


def agree_length(options: RunOptions, feed: Feed | None, epochs: bool) -> tuple[int, RunOptions]:
    """How many minibatches the run has, and the options in steps; called by all workers."""
    total, epoch = of_worker_0((0, None) if feed is None else counted(options, feed, epochs))
    return total, in_steps(dataclasses.replace(options, steps_per_epoch=epoch))


def agree_epoch(executors: Sequence[Executor], feed: Feed | None) -> int | None:
    """Give schedulers and the hook `reset` of the workers here the length of an epoch, if any worker needs it; called
    by all processes.

    Returns:
        That length, if this process knows it.
    """
    users = [(executor.store.updater.scheduler, executor.resets) for executor in executors]
    needed = [s.steps_per_epoch is None and (s.per_epoch or resets is not None) for s, resets in users]
    if any(gathered(any(needed))):
        epoch = of_worker_0(None if feed is None else epoch_of(feed))
        for scheduler, _ in users:
            scheduler.steps_per_epoch = epoch
    steps = users[0][0].steps_per_epoch
    for _, resets in users:
        if resets is not None:
            resets.every = steps
    return steps or (None if feed is None else feed.length)


def epoch_of(feed: Feed) -> int:
    """How many steps an epoch of the data has; from now on, an epoch of another length causes a warning."""
    feed.steps_per_epoch = feed.epoch()
    return feed.steps_per_epoch
