"""Calls the user's callbacks during training, and does what they decide.

Every process calls them, with the same numbers, when all its workers have made the update of a step:

    worker 0:  …  F7  B4 ·on_step(5)·  F8  B5 ·on_step(6)·  …
    worker 1:  …  F5  B5 ·on_step(6)·  F6  B6 ·on_step(7)·  …

A step's loss is known before any of its backwards, so calls make no worker wait longer. Learning rates are set from the
next update on. A checkpoint or the end of the run must be known some steps ahead (`consequences.lead`): what is decided
after step s is done after step s + lead. With a flush, an end decided after an evaluation is done at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from fxpipe.checkpoint.shard import DECIDED, Shard
from fxpipe.errors import FxpipeError, TaskError
from fxpipe.messages import warn
from fxpipe.random_state import random_state_kept, seed_generators, seed_of
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.checkpoints import Checkpoints
from fxpipe.runtime.process.consequences import Consequences
from fxpipe.runtime.process.losses import StepLoss
from fxpipe.runtime.process.minibatch_notes import Decision, Decisions
from fxpipe.runtime.process.rows import WalkedRows
from fxpipe.runtime.process.what_trains import WhatTrains
from fxpipe.runtime.process.world import Job
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.observer import Observer
from fxpipe.task.callbacks import ON_EPOCH, ON_EVAL, ON_STEP
from fxpipe.task.model_file import hook_raised


class OngoingRun:
    """The run, as its callbacks see it.

    Attributes:
        rank: of this process; 0 if all workers are in one process. To print or log once, do so where it is 0.
        metrics: what `loss(model, batch)` returned next to the loss of this step; empty except in `on_step`.
    """

    def __init__(self, rank: int, save: Callable[[], int], fits: Callable[[Sequence[float]], None]) -> None:
        self.rank = rank
        self.metrics: dict[str, float] = {}
        self._save, self._fits = save, fits
        self._saves = False
        self._rates: tuple[float, ...] | None = None

    def save(self) -> int:
        """Ask for a checkpoint, which is made some steps later; return after which step.

        Raises:
            TaskError: the run makes no checkpoints.
        """
        step = self._save()
        self._saves = True
        return step

    def set_lr(self, rate: float, *more: float) -> None:
        """Set the learning rates of the next updates: one for all groups, or one for each.

        A scheduler goes on from there, and may set others at its next step.

        Raises:
            RunError: the number of rates is not that of the groups.
        """
        rates = (float(rate), *map(float, more))
        self._fits(rates)
        self._rates = rates

    def _taken(self, ends: bool) -> Decision:
        found = Decision(ends, self._saves, self._rates)
        self._saves, self._rates, self.metrics = False, None, {}
        return found


class RunCallbacks(Observer):
    """Calls the callbacks of a run for the workers of this process, and keeps what they have decided.

    It calls `on_eval` itself, and `OnStep` and `OnEpoch` the others.

    Args:
        consequences: of the run's evaluations; it ends the run.
        checkpoints: those that the run makes.
        around: the context of a call, by the hook's name.

    Attributes:
        evaluated_at: the newest version that was evaluated.
    """

    def __init__(
        self,
        job: Job[RunOptions],
        rows: WalkedRows,
        consequences: Consequences,
        checkpoints: Checkpoints | None,
        around: Callable[[str], AbstractContextManager[None]] = lambda hook: nullcontext(),
    ) -> None:
        self.job, self.executors, self.consequences = job, rows.every, consequences
        self._trains = WhatTrains(job.plan, job.task, rows.every)
        self._around, self._checkpoints = around, checkpoints
        self._run = OngoingRun(job.process, self._save, self._fits)
        line = job.world.line
        self.decisions = Decisions(line, next(e.transport for e in rows.executors if e.worker == line.own))
        self.evaluated_at = 0
        self._version = rows.step
        self._pending: list[tuple[int, int, str, bool]] = []  # decided after, done after, by this hook, ends the run
        state = rows.shards[0][0].state if rows.shards else None
        known = state.get(DECIDED) if isinstance(state, Mapping) else None
        for made, at, hook, ends in known or ():
            if hook not in job.task.callbacks.names:
                continue
            self._pending.append((made, at, hook, ends))
            if ends:
                consequences.shorten(at, hook, _reason(hook, made))
                if at <= self._version and not job.process:
                    warn(f"{hook}() has ended this run after step {at}: take it out of the model file to train on")
            elif checkpoints is not None:
                checkpoints.agenda.add(at)

    def await_rows(self, executors: Sequence[Executor]) -> None:
        """All workers of a row have made an update that callbacks follow: wait for other rows here.

        That of the loss worker knows the loss over all replicas; with a flush, callbacks wait for all rows.
        """
        if len(executors) == len(self.executors):
            return
        version, flushes = executors[0].store.version, self.job.recipe.schedule.synchronous
        before = [each for each in self.executors if flushes or each.worker == self.job.plan.loss.worker]
        self.job.world.turns.wait(
            lambda: all(executor.store.version >= version for executor in before),
            lambda: f"callbacks after {version} updates",
        )

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> None:
        """All workers of this process are at a version that was evaluated: call `on_eval`.

        Raises:
            FxpipeError: as `call`.
        """
        self.evaluated_at = version
        on_eval = self.job.task.callbacks.on_eval
        if on_eval is None:
            return
        numbers = dict(metrics)
        decision = self.call(ON_EVAL, version, version, lambda: on_eval(version, numbers, self._run))
        for executor in self.executors:
            self.apply(executor, version, decision)

    def cut(self, worker: int, shard: Shard) -> None:
        """Put into a shard what was decided up to its step and is yet to be done."""
        oldest = min(executor.store.version for executor in self.executors)
        self._pending = [row for row in self._pending if row[1] >= oldest]
        shard.state[DECIDED] = [list(row) for row in self._pending if row[0] <= shard.step <= row[1]]

    def on_step(self, version: int, loss: StepLoss) -> Decision:
        """Call `on_step` with the loss of the step before a version; errors as `call`."""
        on_step = self.job.task.callbacks.on_step
        assert on_step is not None
        self._run.metrics = dict(loss.metrics)
        return self.call(ON_STEP, version, version, lambda: on_step(version, float(loss), self._run))

    def on_epoch(self, version: int, epoch: int) -> Decision:
        """Call `on_epoch` after so many epochs; errors as `call`."""
        on_epoch = self.job.task.callbacks.on_epoch
        assert on_epoch is not None
        return self.call(ON_EPOCH, epoch, version, lambda: on_epoch(epoch, self._run))

    def apply(self, executor: Executor, version: int, decision: Decision) -> None:
        """A worker has reached the version after which a callback has decided."""
        if decision.rates is not None:
            executor.store.updater.set_rates(version, decision.rates, version - 1)

    def call(self, hook: str, number: int, version: int, call: Callable[[], object]) -> Decision:
        """Call a hook, and note what it decides; its random numbers follow from the seed, in all processes alike.

        Raises:
            FxpipeError: the callback failed; or other processes decide differently.
        """
        self._version = version
        with random_state_kept(), self._around(hook):
            seed_generators(seed_of(self.job.options.seed, hook, number), self.executors[0].device.type)
            try:
                ends = bool(call())
            except FxpipeError:
                raise
            except Exception as error:
                raise hook_raised(hook, error, self.job.task.callbacks.path) from error
        self._trains.check(f"{hook}()")
        decision = self._run._taken(ends)
        if hook != ON_STEP and version >= self.consequences.end:
            return decision  # after the last update
        if hook != ON_STEP:
            self.decisions.expect(hook, version)
        self.decisions.compare(hook, version, decision)
        at = self.consequences.earliest(version)
        if decision.saves:
            self._note(version, at, hook, ends=False)
        if decision.ends:  # it is saved there, if at all
            end = at if decision.saves else self.consequences.earliest_end(version)
            self._note(version, end, hook, ends=True)
        return decision

    def _note(self, made: int, at: int, hook: str, ends: bool) -> None:
        self._pending.append((made, at, hook, ends))
        if ends:
            self.consequences.ends(at, hook, _reason(hook, made))
        elif self._checkpoints is not None:
            self._checkpoints.agenda.add(at)

    def _save(self) -> int:
        if self._checkpoints is None:
            raise TaskError(
                "run.save() was called, but the run makes no checkpoints",
                where=None if self.job.task.callbacks.path is None else self.job.task.callbacks.path.name,
                hint="--checkpoint-every asked makes only those that are asked for; 500, 10min or epoch others, too",
            )
        at, end = self.consequences.earliest(self._version), self.consequences.end
        if at > end and not self.job.process:
            warn(
                f"run.save() after step {self._version} is too late for a checkpoint: the run ends after step {end}, "
                "and its weights are written then"
            )
        return at

    def _fits(self, rates: Sequence[float]) -> None:
        for executor in self.executors:
            executor.store.updater.check_rates(rates)


class _AfterUpdates(Observer):
    """A callback after some updates: the first worker here that has made one calls it, and all apply what it decides.

    Args:
        step: the version after which it was called last.
    """

    def __init__(self, callbacks: RunCallbacks, step: int) -> None:
        self.callbacks = callbacks
        self._seen = {_seat(executor): step for executor in callbacks.executors}
        self._decided: dict[int, Decision] = {}  # by version, until all workers here have reached it

    def called(self, executor: Executor) -> bool:
        """Whether it was called after the worker's newest update."""
        return self._seen[_seat(executor)] == executor.store.version

    def decide(self, executor: Executor, call: Callable[[], Decision]) -> None:
        """A worker has made an update that the callback follows."""
        version = executor.store.version
        self._seen[_seat(executor)] = version
        if version not in self._decided:
            self._decided[version] = call()
        self.callbacks.apply(executor, version, self._decided[version])
        if all(seen >= version for seen in self._seen.values()):
            del self._decided[version]


class OnStep(_AfterUpdates):
    """Calls `on_step` after each update; it is there only if there is that callback."""

    @staticmethod
    def due(version: int) -> bool:
        """Whether it is called after so many steps."""
        return True

    def __init__(self, callbacks: RunCallbacks, rows: WalkedRows) -> None:
        super().__init__(callbacks, rows.step)
        self._losses = rows.losses

    def begins(self, minibatch: int) -> None:
        """The first forward of a minibatch is about to run in a row of this process."""
        self.callbacks.decisions.expect(ON_STEP, minibatch + 1)

    def between(self, executors: Sequence[Executor]) -> None:
        """Errors as `RunCallbacks.call`."""
        self.callbacks.await_rows(executors)
        for executor in executors:
            if not self.called(executor):
                version = executor.store.version
                self.decide(executor, lambda: self.callbacks.on_step(version, self._losses[version - 1]))  # noqa: B023


class OnEpoch(_AfterUpdates):
    """Calls `on_epoch` after each epoch; it is there only if there is that callback.

    Args:
        evaluates: the run evaluates what it has trained: epochs end after the evaluation of their last version.
    """

    def __init__(self, callbacks: RunCallbacks, evaluates: bool) -> None:
        super().__init__(callbacks, 0)
        per_epoch = callbacks.job.options.steps_per_epoch
        assert per_epoch is not None
        self._per_epoch, self._evaluates = per_epoch, evaluates

    def due(self, version: int) -> bool:
        """Whether an epoch is over after so many steps."""
        return version > 0 and version % self._per_epoch == 0

    def between(self, executors: Sequence[Executor]) -> None:
        """Errors as `RunCallbacks.call`."""
        if self.due(executors[0].store.version):
            self.callbacks.await_rows(executors)
        for executor in self.callbacks.executors:  # an evaluation may have held some
            version = executor.store.version
            if self.due(version) and not self.called(executor) and not self._waits(version):
                self.decide(executor, lambda: self.callbacks.on_epoch(version, version // self._per_epoch))  # noqa: B023

    def over(self) -> None:
        """The run has ended and was evaluated: call it for the last epoch, which can decide nothing."""
        end = self.callbacks.consequences.end
        if self.due(end) and end not in self._seen.values():  # else it has ended the run
            self.callbacks.on_epoch(end, end // self._per_epoch)

    def _waits(self, version: int) -> bool:
        """Whether the call comes later: after an evaluation that is due, or at the end of the run."""
        ends = self.callbacks.consequences
        return version >= ends.end or (self._evaluates and ends.due(version) and self.callbacks.evaluated_at < version)


def _reason(hook: str, made: int) -> str:
    return f"{hook}() asked for it after step {made}"


def _seat(executor: Executor) -> tuple[int, int]:
    """The worker, and the number of the replica."""
    return executor.worker, executor.replica
