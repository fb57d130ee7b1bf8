"""Follows the state that a run's hooks share with the captured step: new values travel, or the run ends with an error.

The hooks of worker 0's process decide: `train_data()`, callbacks, its scheduler. Right after the batch of a minibatch
was read, worker 0 takes the tensors that hooks can reach. A note before the minibatch's first forward says whether they
have changed, and their bytes follow it. For the backwards of minibatches in flight, each worker keeps what their
forwards read. All else that the step has read was fixed at capture: if it changes in any process, the run ends there.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fxpipe.checkpoint.shard import Shard
from fxpipe.errors import TaskError, listed
from fxpipe.plan.plan import BufferSpec, Plan
from fxpipe.runtime.wires.addresses import HOOKS, HOOKS_CHANGED
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.initial_weights import read_tensors
from fxpipe.runtime.worker.observer import Observer
from fxpipe.runtime.worker.watched_places import GuardedParameters, WatchedPlaces
from fxpipe.task.hooks import OF_OPTIMIZERS
from fxpipe.task.model_file import Task
from fxpipe.tracing.hook_state import OUTSIDE, walk_of


class StateOfHooks(Observer):
    """What the hooks of this process reach of the state that the step has read.

    Made before any hook is called, since it may have to call `model()`, which sets what hooks find in globals.
    """

    each_replica = True

    def __init__(self, plan: Plan, folder: str, task: Task) -> None:
        self._plan, self._folder, self._task = plan, folder, task
        self._sources: list[Executor] = []  # the replicas of worker 0 here
        self._only_data = ""  # why only `train_data()` may change tensors
        self._early = False  # callbacks come before worker 0's update
        self._updated = -1  # the newest version that an update of worker 0 here began from
        self._newest: dict[str, Tensor] = {}  # as worker 0 reads them; the same dictionary until they change
        self._totals: ChainMap[str, Tensor] = ChainMap()
        self._taken: dict[int, list[dict[str, Tensor]]] = {}  # by minibatch, for each of the sources
        self._marks: dict[int, dict[str, Tensor]] = {}
        self._places = WatchedPlaces(plan, task.hooks.of_run)
        if plan.model_file.calls_model or not self._places.as_captured:
            task.make_model()
            self._places = WatchedPlaces(plan, task.hooks.of_run)
        self._tensors = self._places.tensors
        self._initial = self._values()
        self._guard = GuardedParameters(self._places.parameters)

    def begin(self) -> None:
        """Give tensors their initial values: batches may have been counted.

        Those of modules are the build's: `model()` may draw other numbers here.
        """
        rows = [(b.name, b.tensor) for b in self._plan.buffers if b.name in self._tensors]
        of_model = [row for row in rows if not row[0].startswith(OUTSIDE)]
        file = Path(self._folder) / self._plan.weights.file
        self._set(self._initial | (read_tensors(file, of_model, "cpu") if of_model else {}))

    def attach(self, executors: Sequence[Executor], ahead: bool, saved: bool) -> None:
        """Follow the workers here.

        Args:
            ahead: batches are read before the steps before them are over.
            saved: the run writes checkpoints.

        Raises:
            TaskError: a scheduler or an optimizer reaches such a tensor, and worker 0 has none; or one has replaced a
                parameter.
        """
        parameters = WatchedPlaces(self._plan, self._task.hooks.of_run).parameters
        if replaced := [name for name, p in self._places.parameters.items() if parameters.get(name, p) is not p]:
            raise TaskError(
                f"a hook puts another parameter in the place of {listed(replaced, 4)}, which the workers of a run do "
                "not see",
                hint="let model() do it",
            )
        flushes = executors[0].schedule.synchronous
        if ahead:
            self._only_data = "batches are read ahead, because they may have several shapes"
        elif saved and not flushes:  # a resumed run reads batches again, but calls no other hook again
            self._only_data = "a run of this schedule could not resume exactly from a checkpoint"
        self._early = len({each.worker for each in executors}) > 1 and not flushes
        self._sources = [each for each in executors if each.worker == 0]
        for executor in executors:
            executor.observers.append(_Follower(self, executor, self._plan))
        hooks = {name: hook for name, hook in self._task.hooks.of_run.items() if name in OF_OPTIMIZERS}
        reached = {id(holder.thing) for holder in walk_of(hooks).values()} if self._sources and self._tensors else ()
        if not (names := [name for name, tensor in self._tensors.items() if id(tensor.holder.thing) in reached]):
            return
        if self._sources[0].store.updater.optimizer is None:
            raise TaskError(
                f"the scheduler or the optimizer can change {listed(names, 4)}, and worker 0, which follows such "
                "changes, trains no parameter and has neither",
                hint="change it in train_data() or in a callback; or cut the model so that worker 0 trains a parameter",
            )
        if len(executors) > 1:
            for executor in executors:
                executor.store.updater.around = partial(self._of_update, executor)

    def newest_over(self, buffers: MutableMapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Worker 0's buffers, with the newest values of tensors that hooks change, for the totals of a minibatch."""
        self._totals = ChainMap(self._newest, buffers)
        return self._totals

    def _of_update(self, executor: Executor) -> AbstractContextManager[None]:
        """Around an update: the first replica of worker 0 that makes it counts."""
        version = executor.store.version
        counts = executor.worker == 0 and version > self._updated
        if counts:
            self._updated = version
        return nullcontext() if counts else self.of_optimizer(False)

    @contextmanager
    def of_optimizer(self, counts: bool) -> Iterator[None]:
        """Inside, a worker makes or calls its optimizer and its scheduler, where eager PyTorch has one for all.

        Args:
            counts: what it changes stays; else that is undone.
        """
        before = [] if counts else [(tensor, tensor.changed(), tensor.value()) for tensor in self._tensors.values()]
        yield
        for tensor, changed, value in before:
            tensor.set(value)
            if not changed:  # else the next minibatch is to see what the first worker has changed
                tensor.remember()

    @contextmanager
    def of_callback(self, hook: str) -> Iterator[None]:
        """Inside, a callback is called."""
        before = {name: tensor.state() for name, tensor in self._tensors.items()} if self._early else {}
        yield
        if changed := [name for name, state in before.items() if self._tensors[name].state() != state]:
            raise TaskError(
                f"{hook}() changes {listed(changed, 4)}, which the step reads; in one process, where a schedule has no "
                "flush, a callback runs before worker 0 has made the step",
                hint="run it in processes (leave out --local), or choose a schedule with a flush, such as 1f1b",
            )

    def go_on(self) -> None:
        """The run resumes: the buffers have a checkpoint's values, and batches may have been read again."""
        for source in self._sources[:1]:
            self._set({name: source.buffers[name] for name in self._tensors})

    def reads(self, minibatch: int, marked: bool) -> None:
        """Worker 0's process is about to read the batch of a minibatch.

        Args:
            marked: a checkpoint follows the minibatches before this one.
        """
        self._refuse_other_hooks()
        if marked:
            self._marks[minibatch] = self._values()

    def has_read(self, minibatch: int) -> None:
        """It has read it: new values are taken for the minibatch."""
        self._look(minibatch)
        if len(self._newest) < len(self._tensors) or any([tensor.changed() for tensor in self._tensors.values()]):
            for tensor in self._tensors.values():
                tensor.remember()
            self._totals.maps[0] = self._newest = self._on(self._sources[0], self._values())
        self._taken[minibatch] = [self._newest] * len(self._sources)

    def begins(self, minibatch: int) -> None:
        """A row begins a minibatch; where worker 0 has just read its batch, all was looked at."""
        self._refuse_other_hooks()
        if self._only_data or not self._sources:
            self._look(minibatch)

    def take(self, minibatch: int) -> dict[str, Tensor]:
        """The values for a minibatch that a replica of worker 0 begins: the same dictionary if they are the same."""
        values = self._taken[minibatch].pop()
        if not self._taken[minibatch]:
            del self._taken[minibatch]
        return values

    def into(self, minibatch: int, states: Sequence[dict[str, Tensor]]) -> None:
        """An evaluation after so many minibatches reads worker 0's state here with the newest values."""
        self._look(minibatch)
        for state, source in zip(states, self._sources[:1], strict=False):
            state.update(self._on(source, self._values()))

    def end(self) -> None:
        """The run is over, or has failed: parameters are the hooks' again."""
        self._guard.release()

    def over(self, total: int, evaluates: bool) -> None:
        """Training is over after so many steps: the final buffers have the newest values."""
        if evaluates:
            self._look(total)
        for source in self._sources:
            source.buffers.update(self._on(source, self._values()))

    def cut(self, worker: int, shard: Shard) -> None:
        """Save the tensors as before the batch of the next minibatch was read, which a resumed run repeats."""
        shard.buffers = {name: b for name, b in shard.buffers.items() if name not in self._tensors}
        if worker == 0 and self._sources:
            shard.buffers |= self._marks.get(shard.step, self._values())
            oldest = min(source.store.version for source in self._sources)
            self._marks = {step: mark for step, mark in self._marks.items() if step >= oldest}

    def _look(self, minibatch: int) -> None:
        """Check that what was fixed at capture has not changed, before a minibatch or an evaluation after so many."""
        if self._places.missing or self._places.look(minibatch):  # hooks have made or replaced an object
            self._places = WatchedPlaces(self._plan, self._task.hooks.of_run)
            for name, tensor in self._places.tensors.items():
                if name in self._tensors:
                    tensor.remembered = self._tensors[name].remembered
            self._tensors |= self._places.tensors
        if self._places.missing:
            raise TaskError(
                f"the hooks of this process do not reach {listed(self._places.missing, 4)}, as they did when the step "
                "was captured",
                hint="let the model file define it in the same way whenever it is loaded",
            )

    def _values(self) -> dict[str, Tensor]:
        return {name: tensor.value() for name, tensor in self._tensors.items()}

    def _on(self, executor: Executor, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        types = {name: executor.buffers[name].dtype for name in values}
        return {name: value.to(executor.device, types[name]) for name, value in values.items()}

    def _set(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self._tensors[name].set(value)

    def _refuse_other_hooks(self) -> None:
        if not (self._only_data and self._newest):
            return
        if changed := [name for name, tensor in self._tensors.items() if tensor.changed()]:
            raise TaskError(
                f"a hook other than train_data() changes {listed(changed, 4)}, and {self._only_data}",
                hint="change it in train_data(); or choose a schedule with a flush, such as 1f1b, and one shape of "
                "batch",
            )


class _Follower(Observer):
    """Brings the new values to one worker."""

    def __init__(self, hooks: StateOfHooks, executor: Executor, plan: Plan) -> None:
        rows = [row for row in plan.buffers if row.name in plan.followed]
        self._hooks, self._executor = hooks, executor
        self._held = [row for row in rows if executor.worker in row.workers]
        others = range(1, plan.workers) if executor.worker == 0 else ()
        readers = {worker: [row for row in rows if worker in row.workers] for worker in others}
        self._readers = {worker: held for worker, held in readers.items() if held}
        self._values: dict[str, Tensor] = {}  # of worker 0, those of the minibatch before
        self._read: dict[str, Tensor] = {}

    def begins(self, minibatch: int) -> None:
        executor = self._executor
        if not self._held:
            return
        values = self._received(minibatch) if executor.worker else self._sent(minibatch)
        if values or not self._read:
            executor.buffers.update(self._hooks._on(executor, values))
            self._read = {row.name: executor.buffers[row.name] for row in self._held}
        executor.as_read[minibatch] = self._read

    def ended(self, minibatch: int) -> None:
        self._executor.as_read.pop(minibatch, None)

    def _sent(self, minibatch: int) -> dict[str, Tensor]:
        before, self._values = self._values, self._hooks.take(minibatch)
        values = {} if self._values is before else self._values
        transport = self._executor.transport
        for worker, rows in self._readers.items():
            changed = torch.tensor([bool(values)], dtype=torch.float64)
            transport.send_note(worker, (HOOKS_CHANGED, minibatch), changed)
            if values:
                transport.send_note(worker, (HOOKS, minibatch), _packed([values[row.name].cpu() for row in rows]))
        return values

    def _received(self, minibatch: int) -> dict[str, Tensor]:
        transport, changed, note = self._executor.transport, (HOOKS_CHANGED, minibatch), (HOOKS, minibatch)
        transport.expect_note(0, changed, 1)
        if not transport.recv_note(0, changed).item():
            return {}
        transport.expect_note(0, note, -(-sum(row.tensor.bytes for row in self._held) // 8))
        return _unpacked(transport.recv_note(0, note), self._held)


def _packed(values: Sequence[Tensor]) -> Tensor:
    """The bytes of tensors, as a note carries them: as float64."""
    flat = torch.cat([value.contiguous().reshape(-1).view(torch.uint8) for value in values])
    return torch.cat([flat, flat.new_zeros(-len(flat) % 8)]).view(torch.float64)


def _unpacked(numbers: Tensor, rows: Sequence[BufferSpec]) -> dict[str, Tensor]:
    lengths = [row.tensor.bytes for row in rows]
    parts = numbers.view(torch.uint8)[: sum(lengths)].split(lengths)
    return {
        row.name: part.clone().view(getattr(torch, row.tensor.dtype)).reshape(row.tensor.shape)
        for part, row in zip(parts, rows, strict=True)
    }
