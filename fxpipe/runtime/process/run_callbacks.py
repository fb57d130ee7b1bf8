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
from typing import Any

from torch import Tensor

from fxpipe.checkpoint.shard import Shard
from fxpipe.errors import FxpipeError, TaskError
from fxpipe.messages import warn
from fxpipe.plan.spec import Plan
from fxpipe.random_state import random_state_kept, seed_generators, seed_of
from fxpipe.runtime.process.checkpoints import Checkpoints
from fxpipe.runtime.process.consequences import Consequences
from fxpipe.runtime.process.minibatch_notes import Decision, Decisions, Losses, StepLoss
from fxpipe.runtime.process.what_trains import WhatTrains
from fxpipe.runtime.wires.addresses import ProcessLine
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.observer import Observer
from fxpipe.task.callbacks import ON_EPOCH, ON_EVAL, ON_STEP, Callbacks
from fxpipe.task.model_file import hook_raised

DECIDED = "decided"
"""The key, in a shard's state, of what callbacks have decided and is yet to be done."""


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
    """Calls the callbacks of a run for the workers of this process, whose rows and evaluations it follows.

    Args:
        consequences: of the run's evaluations; it ends the run.
        step: the run's first.
        per_epoch: the steps of an epoch; must be known if there is `on_epoch`.
        evaluates: the run evaluates what it has trained.
        line: of the processes.
        checkpoints: those that the run makes.
        state: of a shard of the checkpoint that the run goes on from.
        trains: refuses callbacks that freeze or unfreeze parameters.
    """

    def __init__(
        self,
        hooks: Callbacks,
        plan: Plan,
        consequences: Consequences,
        step: int,
        per_epoch: int | None,
        evaluates: bool,
        seed: int,
        executors: Sequence[Executor],
        line: ProcessLine,
        checkpoints: Checkpoints | None,
        state: Any,
        trains: WhatTrains,
    ) -> None:
        self._trains = trains
        self._checkpoints = checkpoints
        self._hooks, self._consequences, self._seed = hooks, consequences, seed
        self._executors, self._evaluates = executors, evaluates
        self._per_epoch = per_epoch if hooks.on_epoch is not None else None
        process = plan.process_of(executors[0].worker, executors[0].replica)
        self._run = OngoingRun(process, self._save, self._fits)
        self._speaks = process == 0
        self._losses = Losses(plan, line, executors)
        self._decisions = Decisions(line, self._losses.transport)
        self._coming: dict[int, StepLoss] = {}
        self._made: dict[tuple[str, int], Decision] = {}  # until all workers here have reached that step
        firsts = {ON_STEP: step, ON_EPOCH: 0}
        self._seen = {hook: {_seat(each): at for each in executors} for hook, at in firsts.items()}
        self._evaluated = 0
        self._version = step
        self._pending: list[tuple[int, int, str, bool]] = []  # decided after, done after, by this hook, ends the run
        if self._speaks and hooks.on_eval is not None and not evaluates:
            warn("on_eval() will not be called: the workers have nothing to evaluate (eval_data, metrics)")
        known = state.get(DECIDED) if isinstance(state, Mapping) else None
        for made, at, hook, ends in known or ():
            if hook not in self._hooks.names:
                continue
            self._pending.append((made, at, hook, ends))
            if ends:
                self._consequences.shorten(at, hook, _reason(hook, made))
                if at <= self._version and self._speaks:
                    warn(f"{hook}() has ended this run after step {at}: take it out of the model file to train on")
            elif checkpoints is not None:
                checkpoints.add(at)

    @property
    def follows(self) -> bool:
        """Whether callbacks follow evaluations or epochs: a checkpoint is made before these calls."""
        return self._hooks.on_eval is not None or self._hooks.on_epoch is not None

    def begins(self, minibatch: int) -> None:
        """The first forward of a minibatch is about to run in a row of this process."""
        if self._hooks.on_step is not None and minibatch not in self._coming:
            self._coming[minibatch] = self._losses.step(minibatch)
            self._decisions.expect(ON_STEP, minibatch + 1)

    def loss(self, minibatch: int, value: Tensor) -> None:
        """In the loss worker's process: a minibatch's loss is known; the worker's replicas have the same."""
        self._losses.loss(minibatch, value)

    def stepped(self, executor: Executor) -> None:
        """Between two actions of a worker: call `on_step` if it has made an update.

        Raises:
            FxpipeError: the callback failed; or other processes decide differently.
        """
        on_step = self._hooks.on_step
        version = executor.store.version
        if on_step is None or self._seen[ON_STEP][_seat(executor)] == version:
            return

        def call() -> Decision:
            loss = self._coming.pop(version - 1)
            self._run.metrics = dict(loss.metrics)
            return self._call(ON_STEP, version, version, lambda: on_step(version, float(loss), self._run))

        self._decide(ON_STEP, executor, version, call)

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> None:
        """All workers of this process are at a version that was evaluated: call `on_eval`.

        Raises:
            FxpipeError: as `stepped`.
        """
        self._evaluated = version
        on_eval = self._hooks.on_eval
        if on_eval is None:
            return
        given = dict(metrics)
        decision = self._call(ON_EVAL, version, version, lambda: on_eval(version, given, self._run))
        for executor in self._executors:
            self._take(executor, version, decision)

    def epoch_over(self, executor: Executor) -> None:
        """Between two actions of a worker, after an evaluation that is due: call `on_epoch` if an epoch is over.

        Raises:
            FxpipeError: as `stepped`.
        """
        version = executor.store.version
        if self._per_epoch is None or version == 0 or version % self._per_epoch:
            return
        if self._seen[ON_EPOCH][_seat(executor)] == version or version >= self._consequences.end:
            return
        if self._evaluates and self._consequences.due(version) and self._evaluated < version:
            return
        self._decide(ON_EPOCH, executor, version, lambda: self._call_on_epoch(version))

    def _decide(self, hook: str, executor: Executor, version: int, call: Callable[[], Decision]) -> None:
        """A worker has reached a version: the first one here calls the hook, and all apply its decision."""
        seen, key = self._seen[hook], (hook, version)
        seen[_seat(executor)] = version
        if key not in self._made:
            self._made[key] = call()
        self._take(executor, version, self._made[key])
        if all(seen[_seat(each)] >= version for each in self._executors):
            del self._made[key]

    def over(self) -> None:
        """The run has ended and was evaluated: call `on_epoch` for the last epoch, which can decide nothing."""
        end = self._consequences.end
        called = end in self._seen[ON_EPOCH].values()  # it was called, and ended the run
        if self._per_epoch is not None and end and end % self._per_epoch == 0 and not called:
            self._call_on_epoch(end)

    def cut(self, worker: int, shard: Shard) -> None:
        """Put into a shard what was decided up to its step and is yet to be done."""
        oldest = min(executor.store.version for executor in self._executors)
        self._pending = [row for row in self._pending if row[1] >= oldest]
        shard.state[DECIDED] = [list(row) for row in self._pending if row[0] <= shard.step <= row[1]]

    def _call_on_epoch(self, version: int) -> Decision:
        on_epoch, per_epoch = self._hooks.on_epoch, self._per_epoch
        assert on_epoch is not None
        assert per_epoch is not None
        epoch = version // per_epoch
        return self._call(ON_EPOCH, epoch, version, lambda: on_epoch(epoch, self._run))

    def _call(self, hook: str, number: int, version: int, call: Callable[[], object]) -> Decision:
        """Call a hook, and note what it decides; its random numbers follow from the seed, in all processes alike."""
        self._version = version
        with random_state_kept():
            seed_generators(seed_of(self._seed, hook, number), self._executors[0].device.type)
            try:
                ends = bool(call())
            except FxpipeError:
                raise
            except Exception as error:
                raise hook_raised(hook, error, self._hooks.path) from error
        self._trains.check(f"{hook}()")
        decision = self._run._taken(ends)
        if hook != ON_STEP and version >= self._consequences.end:
            return decision  # after the last update
        if hook != ON_STEP:
            self._decisions.expect(hook, version)
        self._decisions.compare(hook, version, decision)
        at = self._consequences.earliest(version)
        if decision.saves:
            self._note(version, at, hook, ends=False)
        if decision.ends:  # it is saved there, if at all
            end = at if decision.saves else self._consequences.earliest_end(version)
            self._note(version, end, hook, ends=True)
        return decision

    def _note(self, made: int, at: int, hook: str, ends: bool) -> None:
        self._pending.append((made, at, hook, ends))
        if ends:
            self._consequences.ends(at, hook, _reason(hook, made))
        elif self._checkpoints is not None:
            self._checkpoints.add(at)

    def _take(self, executor: Executor, version: int, decision: Decision) -> None:
        if decision.rates is not None:
            executor.store.updater.set_rates(version, decision.rates, version - 1)

    def _save(self) -> int:
        if self._checkpoints is None:
            raise TaskError(
                "run.save() was called, but the run makes no checkpoints",
                where=None if self._hooks.path is None else self._hooks.path.name,
                hint="--checkpoint-every asked makes only those that are asked for; 500, 10min or epoch others, too",
            )
        at, end = self._consequences.earliest(self._version), self._consequences.end
        if at > end and self._speaks:
            warn(
                f"run.save() after step {self._version} is too late for a checkpoint: the run ends after step {end}, "
                "and its weights are written then"
            )
        return at

    def _fits(self, rates: Sequence[float]) -> None:
        for executor in self._executors:
            if (error := executor.store.updater.unfit(rates)) is not None:
                raise error


def _reason(hook: str, made: int) -> str:
    return f"{hook}() asked for it after step {made}"


def _seat(executor: Executor) -> tuple[int, int]:
    """The worker, and the number of the replica."""
    return executor.worker, executor.replica
