"""Calls the user's callbacks while a run trains, and has done what they decide.

Every process calls them, with the same numbers, when its worker has made the update of a step, or all its workers:

    worker 0:  …  F7  B4 ·on_step(5)·  F8  B5 ·on_step(6)·  …
    worker 1:  …  F5  B5 ·on_step(6)·  F6  B6 ·on_step(7)·  …

The loss of a step is known before any backward of it, so no worker waits for one that it would not wait for anyway.
Learning rates are set from the next update on. A checkpoint, or the end of the run, must be known some steps ahead
(`consequences.lead`): what is decided after step s is done after step s + lead; an end after an evaluation, with a
flush, at once.
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
"""Where the state in a shard has what callbacks decided before its step, and is yet to be done."""


class OngoingRun:
    """What a callback is given of the run that calls it.

    Attributes:
        rank: of this process, 0 where all workers are in one: what is to be printed or logged once, is printed where
            it is 0.
        metrics: what `loss(model, batch)` returned next to the loss of this step; empty but in `on_step`.
    """

    def __init__(self, rank: int, save: Callable[[], int], fits: Callable[[Sequence[float]], None]) -> None:
        self.rank = rank
        self.metrics: dict[str, float] = {}
        self._save, self._fits = save, fits
        self._saves = False
        self._rates: tuple[float, ...] | None = None

    def save(self) -> int:
        """Have a checkpoint made, which some steps on can be taken; return after which step it is.

        Raises:
            TaskError: the run makes none.
        """
        step = self._save()
        self._saves = True
        return step

    def set_lr(self, rate: float, *more: float) -> None:
        """Set the learning rates of the next updates: one for all groups, or one for each.

        A scheduler goes on from there, and may set others at its next step.

        Raises:
            RunError: there are other groups than rates.
        """
        rates = (float(rate), *map(float, more))
        self._fits(rates)
        self._rates = rates

    def _taken(self, ends: bool) -> Decision:
        found = Decision(ends, self._saves, self._rates)
        self._saves, self._rates, self.metrics = False, None, {}
        return found


class RunCallbacks(Observer):
    """Those of one run, for the workers of this process, whose rows and evaluations it follows.

    Args:
        consequences: of the run's evaluations; it ends the run.
        step: the run's first.
        per_epoch: the steps of an epoch; must be known where there is `on_epoch`.
        evaluates: the run evaluates what it has trained.
        line: of the processes.
        checkpoints: those that the run makes.
        state: that of a shard of the checkpoint that it goes on from.
        trains: what no callback may change.
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
        self._decisions = Decisions(line, self._losses.hears)
        self._coming: dict[int, StepLoss] = {}
        self._made: dict[tuple[str, int], Decision] = {}  # until all workers here have come to that step
        firsts = {ON_STEP: step, ON_EPOCH: 0}
        self._seen = {hook: {_seat(each): at for each in executors} for hook, at in firsts.items()}
        self._evaluated = 0
        self._version = step
        self._pending: list[tuple[int, int, str, bool]] = []  # decided and done after such steps, by which hook; ends
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
        """Whether it is called after evaluations, or epochs: a checkpoint is cut before that."""
        return self._hooks.on_eval is not None or self._hooks.on_epoch is not None

    def begins(self, minibatch: int) -> None:
        """The first forward of a minibatch is about to run in a row of this process."""
        if self._hooks.on_step is not None and minibatch not in self._coming:
            self._coming[minibatch] = self._losses.step(minibatch)
            self._decisions.expect(ON_STEP, minibatch + 1)

    def loss(self, minibatch: int, value: Tensor) -> None:
        """The loss worker is here, and says a minibatch's loss; its replicas say the same."""
        self._losses.loss(minibatch, value)

    def stepped(self, executor: Executor) -> None:
        """Between two actions of a worker: call `on_step` if it has made an update.

        Raises:
            FxpipeError: the callback failed; or other processes decide otherwise.
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
        """All workers of this process are at a version, and it was evaluated: call `on_eval`.

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
        """A worker has come to a version: the first one here calls the hook, and all take its decision."""
        seen, key = self._seen[hook], (hook, version)
        seen[_seat(executor)] = version
        if key not in self._made:
            self._made[key] = call()
        self._take(executor, version, self._made[key])
        if all(seen[_seat(each)] >= version for each in self._executors):
            del self._made[key]

    def over(self) -> None:
        """The run has trained to its end, and was evaluated: that of the last epoch, which can decide nothing."""
        end = self._consequences.end
        called = end in self._seen[ON_EPOCH].values()  # and has ended the run
        if self._per_epoch is not None and end and end % self._per_epoch == 0 and not called:
            self._call_on_epoch(end)

    def cut(self, worker: int, shard: Shard) -> None:
        """A shard has what was decided up to its step, and is not yet done there."""
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
        """Call a hook, and note what it decides; what it draws at random follows from the seed, everywhere alike."""
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
        if decision.ends:  # where it is saved, if it is
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
                "run.save() was called, and the run makes no checkpoints",
                where=None if self._hooks.path is None else self._hooks.path.name,
                hint="--checkpoint-every asked makes those that are asked for; 500, 10min or epoch others, too",
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
    return f"{hook}() has asked for it after step {made}"


def _seat(executor: Executor) -> tuple[int, int]:
    """The worker, and which replica of it."""
    return executor.worker, executor.replica
