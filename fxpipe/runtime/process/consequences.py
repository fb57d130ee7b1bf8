"""What follows from a run's evaluations: the best weights so far, an early end, learning rates that depend on metrics.

Every worker receives all metrics of every evaluation and draws the same conclusions, at the same version.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fxpipe.errors import TaskError, near
from fxpipe.messages import say
from fxpipe.observe.out_folder import BEST_WEIGHTS, PARTIAL, OutFolder
from fxpipe.observe.run_json import RunJson
from fxpipe.plan.plan import Plan
from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.best_weights import BestWeights, Goal, Write, lacks, metrics_of
from fxpipe.runtime.process.check_run import decides_alike, unlike
from fxpipe.runtime.process.minibatch_notes import ahead, several_shapes
from fxpipe.runtime.process.rows import WalkedRows
from fxpipe.runtime.process.training_loop import Limit
from fxpipe.runtime.process.world import Job
from fxpipe.runtime.worker.observer import Observer
from fxpipe.schedule.action import LOOKAHEAD
from fxpipe.schedule.base import Schedule
from fxpipe.schedule.check import held

PATIENCE = "patience"
"""What `run.json` gives as the reason of an early end."""


class Consequences:
    """What follows from the evaluations of one run, for the workers of this process.

    Args:
        limit: of the rows here, whose end is how many steps the run is to have.
        observers: are called for evaluations and for an early end.

    Attributes:
        goal: what `--save-best` asks for; None if it asks for nothing.
        wanted: what has to improve by `--patience`; None without it.
        best: the step and the value of the best evaluation so far.
        weights: the file that has its weights, in the process of worker 0; None where they are not kept.
        stopped: why the run ends early: `patience`, or the callback that asks for it; None if it does not.

    Raises:
        RunError: the options ask for what cannot be done.
        TaskError: a scheduler needs a metric that does not exist.
    """

    def __init__(self, job: Job[RunOptions], rows: WalkedRows, limit: Limit, observers: Sequence[Observer]) -> None:
        options, plan = job.options, job.plan
        self.goal = Goal.of(options, plan)
        self.wanted = Goal.to_go_on(options, plan)
        self.best: tuple[int, float] | None = None
        self.weights: BestWeights | None = None
        self._limit = limit
        self.stopped: str | None = None
        self._observers = observers
        self._job, self._rows = job, rows
        self._lead = lead(job.recipe, several_shapes(plan, options))
        self._newest = -1  # the version that was evaluated last
        self._replayed: Mapping[str, Any] | None = None
        self._improved: float | None = None  # the value that the next must improve on
        self._since = 0  # evaluations since then
        for executor in rows.every:
            _check_metric(executor.store.updater.scheduler.metric, options, plan)

    @property
    def end(self) -> int:
        """After how many steps the run ends."""
        assert self._limit.end is not None
        return self._limit.end

    def due(self, version: int) -> bool:
        """Whether the run evaluates this version; not at its end, where it is evaluated anyway."""
        every = self._job.options.eval_every
        assert not isinstance(every, str), "epochs have been counted in steps"
        return every is not None and 0 < version < self.end and version % every == 0

    def replay(self, evaluations: Sequence[Mapping[str, Any]]) -> None:
        """Call first, with the evaluations of earlier steps."""
        self._replayed = evaluations[-1] if evaluations else None
        for row in evaluations:
            self._judge(row["step"], row["metrics"])
        out, speaks = Path(self._job.out or ""), not self._job.process
        kept = (folder / BEST_WEIGHTS for folder in (out, out / PARTIAL)) if self._job.out else ()
        if self.goal is None and self._rows.step and speaks and (old := next(filter(Path.exists, kept), None)):
            say(f"{old} stays as it is: --save-best is not given")
        if self.goal is not None and speaks:
            text = "" if self.best is None else f"; {self.best[1]:.4f} of step {self.best[0]} is the best so far"
            say(f"the weights of the best {self.goal} are kept{text}")

    @property
    def missing(self) -> bool:
        """Whether the run was interrupted before the evaluation of the step that it goes on from."""
        return self._rows.step > 0 and self.due(self._rows.step) and not self._replays_step

    def go_on(self) -> None:
        """Call when the pipeline has begun: a checkpoint is cut before the evaluation of its step changes rates."""
        if self._replayed is not None and self._replays_step and self.due(self._rows.step):
            self._step_schedulers(self._rows.step, self._replayed["metrics"])
            for observer in self._observers:
                observer.evaluated(self._rows.step, self._replayed["metrics"])

    @property
    def _replays_step(self) -> bool:
        """Whether the step that the run goes on from was evaluated."""
        return self._replayed is not None and self._replayed["step"] == self._rows.step

    def keep_weights(self, folder: OutFolder, write: Write) -> bool:
        """In worker 0's process, after `replay`: keep the best weights. Returns whether those so far are lost."""
        assert self.goal is not None
        self.weights = BestWeights(folder, write, self.goal, self.best)
        return self.best is not None and self.weights.held is None

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> bool:
        """All workers have evaluated the weights of a version; returns whether they are the best so far."""
        end = self.end
        for goal in (self.goal, self.wanted):
            if goal is not None:
                goal.check(metrics)
        best = self._judge(version, metrics)
        if version < end:
            self._step_schedulers(version, metrics)
        if self.end < end:
            self._show_end()
        for observer in self._observers:
            observer.evaluated(version, metrics)
        return best

    def feed(self, evaluated: int) -> None:
        """Let minibatches begin up to the next evaluation, which may end the run; without a flush, all.

        With a flush, none of the others' actions could begin before it anyway.

        Args:
            evaluated: the newest version that was evaluated.
        """
        self._limit.fed, every = self.end, self._job.options.eval_every
        if every is None or not self._job.recipe.schedule.synchronous:
            return
        assert isinstance(every, int)
        version = (evaluated // every + 1) * every
        if self.due(version):
            self._limit.fed = version

    def earliest(self, version: int) -> int:
        """After which step the run can be saved, if all its workers learn of that at a version."""
        return max(self._rows.step, version + self._lead)

    def earliest_end(self, version: int) -> int:
        """After which step the run can end: at once where no minibatch has begun since the version was evaluated."""
        return (
            max(self._rows.step, version)
            if self._job.recipe.schedule.synchronous and version == self._newest
            else self.earliest(version)
        )

    def ends(self, end: int, why: str, reason: str) -> None:
        """All workers decide, at the same version, that the run ends after a step, the `earliest_end`."""
        if self.shorten(end, why, reason):
            self._show_end()

    def shorten(self, end: int, why: str, reason: str) -> bool:
        """End the run earlier, before training begins; returns whether it would have ended later.

        Args:
            why: see `stopped`.
            reason: the same for the user.
        """
        if end >= self.end:
            return False
        self._limit.end, self.stopped = end, why
        if not self._job.process:
            say(f"{reason}: the run ends after step {end}")
        return True

    def _show_end(self) -> None:
        for executor in self._rows.every:
            executor.store.versions.end(self.end, known_to_all=self.end > executor.store.version)
        for observer in self._observers:
            observer.ends(self.end)

    def forget_best(self) -> None:
        """The weights of the best evaluation so far are lost: count only evaluations from here on."""
        if not self._job.process and self.best is not None:
            say(f"{self._job.options.out} lacks the weights of step {self.best[0]}: the best from here on are kept")
        self.best = None

    def add_to(self, summary: RunJson) -> None:
        """Put the best evaluation, and why the run has ended early, into its summary."""
        if self.goal is not None or self.stopped is not None:
            summary.stopped = self.stopped
        if self.goal is None:
            return
        summary.best = None
        if self.best is not None:
            (step, value), held = self.best, None if self.weights is None else self.weights.held
            summary.best = {"metric": self.goal.metric, "step": step, "value": value, "kept": held == step}

    def _judge(self, version: int, metrics: Mapping[str, float]) -> bool:
        self._newest = version
        self._wait(version, metrics)
        if self.goal is None:
            return False
        value = metrics.get(self.goal.metric, math.nan)
        better = self.goal.better(value, None if self.best is None else self.best[1])
        if better:
            self.best = (version, value)
        return better

    def _wait(self, version: int, metrics: Mapping[str, float]) -> None:
        """End the run when there has been no improvement for too long."""
        if self.wanted is None:
            return
        value = metrics.get(self.wanted.metric, math.nan)
        if self.wanted.better(value, self._improved, self._job.options.min_delta):
            self._improved, self._since = value, 0
            return
        every_steps = self._job.options.eval_every
        assert isinstance(every_steps, int)
        # At another version it was the last evaluation of a shorter run, which a longer run does not make.
        self._since += version % every_steps == 0
        patience = self._job.options.patience
        if patience is not None and self._since >= patience and self.stopped is None:
            reason = f"{self.wanted.metric} has not improved in {patience} evaluations"
            self.shorten(self.earliest_end(version), PATIENCE, reason)

    def _step_schedulers(self, version: int, metrics: Mapping[str, float]) -> None:
        for executor in self._rows.every:
            executor.store.updater.scheduler.evaluated(version, metrics)


def _check_metric(metric: str | None, options: RunOptions, plan: Plan) -> None:
    if metric is None:
        return
    if not decides_alike(plan, options):
        raise unlike("lr_scheduler()", plan)
    if options.eval_every is None:
        raise TaskError(
            f"lr_scheduler() makes a step with {metric!r} of every evaluation, but the run evaluates only at the end",
            hint="--eval-every N, or epoch",
        )
    known = metrics_of(plan)
    if lacks(plan, metric):
        raise TaskError(
            f"lr_scheduler() needs the metric {metric!r}, which metrics(model, batch) does not "
            f"give{near(metric, known)}",
            hint=f"one of {', '.join(known)}",
        )


def lead(recipe: Recipe, shapes: bool) -> int:
    """How many steps after a version a run can end, if its workers learn of the end at that version.

    They learn of it between two actions, when all have made the same number of updates (the version). By then some
    have begun later minibatches, have posted receives for those after them, and expect weights that are read later
    still. So the run ends some steps later, after all of these:

        evaluated at version 20 ─→ the run ends after step 20 + `lead`

    With a flush, what an evaluation decides ends the run at its version: no later minibatch was fed (`feed`).

    Args:
        shapes: batches have several shapes, so worker 0 reads ahead.
    """
    return furthest(recipe.schedule) + ahead(recipe.demand, shapes)


def furthest(schedule: Schedule) -> int:
    """How far ahead of version v a worker has looked at most: to an action of minibatch v plus this."""
    begun = -(-max(held(schedule)) // schedule.microbatches) + schedule.late
    expected = -(-(LOOKAHEAD + 1) // schedule.microbatches)
    return begun + expected + 1
