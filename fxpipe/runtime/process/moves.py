"""Moves units to other workers during a run, from the launcher: when speeds or links have changed, or a worker was
lost. Under torchrun, process 0 does it (`begin_again`).

    workers:   train ─────────────────────────┬─ save, end │ begin from the checkpoint, under the new cuts
    launcher:  their speeds │ compile the new cuts │ ask    │ start them

A move is what a user could do by hand: stop with a checkpoint, compile for the speeds, resume. So its numbers are those
of that, and whatever ends a run during a move leaves one that resumes. What a move itself cannot do ends no run: the
workers end only after the checkpoint is whole, and go back to the cuts before until each has made some steps under the
new ones. Imports no torch before the first move.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Sequence
from itertools import pairwise, permutations
from pathlib import Path

from fxpipe.errors import BuildError, CheckpointError, FxpipeError, RunError, first_line
from fxpipe.messages import say, warn
from fxpipe.observe.pulse import Signs
from fxpipe.observe.run_json import MoveJson
from fxpipe.plan.build_folder import COSTS, model_path, read_plan
from fxpipe.plan.spec import Plan
from fxpipe.planner.costs_file import BuildCosts, read_costs
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.links import Links
from fxpipe.runtime.options import REPLAN, RunOptions
from fxpipe.runtime.process.ends import StopRequests
from fxpipe.runtime.process.guardian import Guardian
from fxpipe.runtime.process.last_saved import name_checkpoint
from fxpipe.runtime.process.measured_speeds import Window, Windows, promised
from fxpipe.runtime.process.new_build import REBALANCED, NewBuild
from fxpipe.runtime.process.resume import newest_options, step_before
from fxpipe.runtime.wires.board import ASKED, MOVE, TIMES, Board
from fxpipe.runtime.wires.measured_links import MeasuredLinks, replaced

GAIN = 0.1
"""The least share of a step's time that a move must save."""

WINDOWS = 2
"""How many windows in a row must show that, before cuts are compiled."""

GONE_BACK = "so the run goes on under the cuts before, and makes no other moves"
"""What is said where workers could not begin under new cuts."""

ROOM = 5
"""How many times the size of the weights must be free: for a checkpoint with optimizers, final weights and averages."""

ALIKE = 0.1
"""Speeds for which cuts were compiled are tried again when one of them has changed by this share."""

GLANCE = 0.05
"""Seconds between two looks at a compile that the run waits for."""


class Moves:
    """The moves of one run.

    Args:
        options: of the run.

    Attributes:
        options, plan: of the run as it is now.
        since: when the time of the last move, or of the start, began, by `time.monotonic`.
        asked: the workers were asked to save the run and end, for a move.
        rows: of all moves.

    Raises:
        RunError: the options ask for what cannot be done.
    """

    def __init__(self, options: RunOptions) -> None:
        plan = read_plan(options.build)
        costs = read_costs(Path(options.build), plan)
        _check(options, plan, costs)
        if options.rebalance and options.checkpoint_every is None:
            options = dataclasses.replace(options, checkpoint_every="asked")
        self.asked = False
        self.rows: list[MoveJson] = []
        self._built, self._first, self._first_costs = options.build, plan, costs or BuildCosts()
        self._total = sum(promised(plan, self._first_costs))
        self._take(options)
        self._base = self._links = self._first_costs.links  # of these processes: at the first compile, at the last try
        self._seen = 0  # windows in a row in which a move might pay
        self._tried: tuple[float, ...] = ()  # the speeds for which cuts were compiled last
        self._window: Window | None = None
        self._compile: NewBuild | None = None
        self._gain = 0.0
        self._before: RunOptions | None = None  # of the run before the newest move, until that has worked
        self.since = time.monotonic()
        self._start: float | None = None  # seconds until all workers train

    def _take(self, options: RunOptions) -> None:
        self.options, self.plan = options, (plan := read_plan(options.build))
        self._costs = read_costs(Path(options.build), plan) or BuildCosts()
        work = promised(plan, self._costs)
        self._work = tuple(one * self._total / sum(work) for one in work) if sum(work) else work

    def begin(self, board: Board, guardian: Guardian) -> None:
        """The workers are being started; `board` is theirs, and `guardian` that of what is started for them."""
        self.end()
        self._board, self._guardian = board, guardian
        self._windows, self._times = Windows(self.plan.ranks), MeasuredLinks(self._base)
        self._seen, self._start = 0, None
        if not self.rows or self.rows[-1]["seconds"] is not None:  # else the time of a move goes on
            self.since = time.monotonic()
        self.asked = False

    def look(self, signs: Sequence[Signs]) -> None:
        """Look at the workers, and at a compile that has begun; ask the workers to end if a move pays."""
        if self._start is None:
            if all(one.phase == "training" for one in signs):
                self._start = time.monotonic() - self.since
                if self.rows and self.rows[-1]["seconds"] is None:
                    self.rows[-1]["seconds"] = self._start
            return
        if self._before is not None and min(one.step for one in signs) > self.rows[-1]["step"] + self.plan.ranks:
            self.settle()
        if not self.options.rebalance:
            return
        try:
            if not self.asked:
                self._look(signs)
            elif self._board.get(ASKED) is None:
                warn("the move cannot be made, and training goes on")
                self.asked = False
                self._stay()
        except Exception as error:  # no optimisation is worth a run
            warn(f"other cuts are no longer looked for: {first_line(error)}")
            self.options = dataclasses.replace(self.options, rebalance=False)
            if not self.asked:
                self.end()

    def settle(self) -> None:
        """The newest move has worked, so no way back is needed."""
        if self._before is not None:
            self.forget(self._before.build)
            self._before = None

    def end(self) -> None:
        """Give up a compile that has begun."""
        if self._compile is not None:
            self._compile.give_up()
            self._compile = None

    def moved(self) -> RunOptions:
        """The workers have saved the run and ended: the options with which they begin again, under the new cuts; or
        under the cuts before, if the new build cannot be read.

        Raises:
            CheckpointError: no checkpoint is left.
        """
        before = self.options
        try:
            return self.move()
        except FxpipeError as error:
            return self._go_back(error, before)

    def move(self) -> RunOptions:
        """The options with which the saved run begins again under the new cuts.

        Raises:
            FxpipeError: it cannot.
        """
        assert self._compile is not None
        because = "; ".join((f"speeds {numbers(self._tried)}", *self._slower()))
        options = self._go_on(self._compile, because, self._tried, self._gain)
        self._compile = None
        return options

    def back(self, error: FxpipeError) -> RunOptions | None:
        """The workers could not begin under the new cuts: the options with which they go on under the earlier ones.

        Returns:
            None if this is not why the run has ended.
        """
        if self._before is None or self.rows[-1]["gain"] is None:
            return None
        self.forget(self.options.build)
        self.rows.pop()
        return self._go_back(error, self._before)

    def _go_back(self, error: FxpipeError, before: RunOptions) -> RunOptions:
        warn(f"{error}\n  {GONE_BACK}")
        self.end()
        self._before = None
        self._take(newest_options(dataclasses.replace(before, rebalance=False), before.out))
        return self.options

    def without_one(self, error: FxpipeError, furthest: int, requests: StopRequests) -> RunOptions:
        """A worker was lost: the options with which one fewer go on from the newest checkpoint.

        Args:
            error: says so.
            furthest: the last step that any has begun.
            requests: end the wait for the compile.

        Raises:
            FxpipeError: they cannot; the error says why.
        """
        self.since, ranks = time.monotonic(), self.plan.ranks
        if ranks == 1:
            raise error
        newest = newest_options(self.options, self.options.out)
        if newest.resume is None:
            none = "--on-loss replan goes on from a checkpoint, and none was complete: a smaller --checkpoint-every"
            error.hint = none if error.hint is None else f"{error.hint}; {none}"
            raise error
        take = f"{ranks - 1} workers take" if ranks > 2 else "one worker takes"
        warn(f"{error}\n  {take} over, after step {step_before(newest)} of {furthest} begun, when cuts are compiled")
        self._base = self._links = Links(*self._base.slowest(ranks), self._base.copy)
        with Guardian() as guardian:
            build = self._new_build(ranks - 1, (), self._links, guardian)
            try:
                while not build.ended():
                    requests.give_up_if_asked()
                    time.sleep(GLANCE)
                self._check(build)
            except BaseException as failed:
                build.give_up()
                if isinstance(failed, FxpipeError):
                    error.hint = f"--on-loss replan cannot compile for {ranks - 1}: {failed.what}"
                    name_checkpoint(error, self.options, self.options.out)
                    raise error from failed
                raise
        return self._go_on(build, first_line(error), (), None)

    def _look(self, signs: Sequence[Signs]) -> None:
        """Look at the speeds, or at the compile for them.

        Raises:
            OSError: the disk takes no build.
        """
        if self._compile is not None:
            if self._compile.ended():
                self._decide(self._compile)
            return
        ranks = self.plan.ranks
        for rank in range(ranks):
            self._times.add(rank, self._board.get(TIMES.format(rank)))
        if (window := self._windows.add(signs)) is None:
            return
        links, slower = replaced(self._links, self._base, ranks, self._times.measured())
        self._times.clear()
        most, speeds = max(window.most(self._work), slower), window.speeds(self._work)
        known = links == self._links and _alike(speeds, self._tried)
        self._seen = self._seen + 1 if most >= GAIN and self._pays(most, window) and not known else 0
        if self._seen == WINDOWS:
            self._seen, self._window, self._tried, self._links = 0, window, speeds, links
            what = f"the workers' speeds are {numbers(speeds)} after step {window.step}"
            say(f"{'; '.join((what, *self._slower()))}: other cuts are compiled")
            self._compile = self._new_build(ranks, speeds, links, self._guardian)

    def _slower(self) -> list[str]:
        """The links that are other than at the compile, each in words."""
        pairs = permutations(range(self.plan.ranks), 2)
        both = [(a, b, self._links.bandwidth_of(a, b), self._base.bandwidth_of(a, b)) for a, b in pairs]
        return [f"link {a}→{b} {8e-6 * now:.4g} of {8e-6 * was:.4g} Mbit/s" for a, b, now, was in both if now != was]

    def _new_build(self, workers: int, speeds: Sequence[float], links: Links, guardian: Guardian) -> NewBuild:
        options = dataclasses.replace(self.options, build=self._built)
        costs = dataclasses.replace(self._first_costs, links=links)
        return NewBuild(options, self._first, costs, workers, speeds, guardian)

    def _decide(self, build: NewBuild) -> None:
        """Ask the workers to end if the new cuts are worth it."""
        from fxpipe.simulator.forecast import forecast  # it imports torch

        window = self._window
        assert window is not None
        policy = None if self.options.policy is None else str(self.options.policy)

        def seconds(plan: Plan, costs: BuildCosts) -> float:
            known = self._assumed(plan, costs)
            return forecast(plan, known, schedule=self.options.schedule, policy=policy).seconds_per_minibatch

        try:
            plan = self._check(build)
            costs = read_costs(build.folder, plan)
            assert costs is not None, "a compile writes them"
            (build.folder / COSTS).write_text(self._assumed(plan, costs).to_json())
            self._gain = 1 - seconds(plan, costs) / seconds(self.plan, self._costs)
        except FxpipeError as error:
            warn(f"no other cuts could be compiled, and training goes on: {first_line(error)}")
            self._stay()
            return
        if self._gain < GAIN or not self._pays(self._gain, window):
            say(f"other cuts would save {max(self._gain, 0.0):.0%} of a step's time, too little for a move")
            self._stay()
            return
        weights = build.folder / plan.weights_file
        if weights.is_file() and shutil.disk_usage(build.folder).free < ROOM * weights.stat().st_size:
            say("a move would pay, but its checkpoint could take the room of the final weights: no move is made")
            self._stay()
            return
        self._board.set(ASKED, f"{MOVE} {build.folder.name}", patient=False)
        self.asked, self.since = True, time.monotonic()

    def _check(self, build: NewBuild) -> Plan:
        """The plan of a compile that has ended.

        Raises:
            FxpipeError: it has failed, or met another model than the run's.
        """
        build.check()
        plan = read_plan(build.folder)
        before, now = ((each.captured.parts or each.sources) for each in (self._first, plan))
        if before != now:
            raise BuildError("the model file, or what it imports, has changed since the run's build was compiled")
        return plan

    def _assumed(self, plan: Plan, costs: BuildCosts) -> BuildCosts:
        """A build's costs with what was measured, from its nodes: its stages were timed next to the run."""
        times = tuple(worker.time for worker in costs.workers) if costs.times else ()
        scale = sum(promised(plan, costs)) / self._total  # so may have been its nodes
        speeds = tuple(speed * scale for speed in self._tried)
        return dataclasses.replace(costs, times=times, speeds=speeds, links=self._links)

    def _stay(self) -> None:
        self.end()
        self._windows.clear()
        self._times.clear()

    def _pays(self, gain: float, window: Window) -> bool:
        """Whether the steps that are left save more seconds than a move takes; yes if their number is not known."""
        steps = self.options.steps
        return steps is None or gain * window.pace * (steps - window.step) > (self._start or 0.0)

    def _go_on(self, build: NewBuild, because: str, speeds: Sequence[float], gain: float | None) -> RunOptions:
        before, plan = self.plan, read_plan(build.folder)
        options = newest_options(
            dataclasses.replace(self.options, build=str(build.folder), plan_digest=plan.digest), self.options.out
        )
        if options.resume is None:
            raise CheckpointError("the run was to go on under other cuts, but no checkpoint could be written")
        row: MoveJson = {"step": step_before(options), "because": because, "speeds": list(speeds)}
        row |= {"before": units_of(before), "after": units_of(plan), "gain": gain, "seconds": None}
        build.use()
        self.rows.append(row)
        say(move_text(row))
        self._before = self.options
        self._take(options)
        return options

    def go_on(self, options: RunOptions, before: str | None, rows: list[MoveJson], since: float) -> None:
        """The run goes on with these options after these moves; before the last one it had this build."""
        if before is not None:
            self._before = dataclasses.replace(options, build=before)
        self._take(options)
        self.rows, self.since = rows, since
        if rows:
            self._tried, self._links = tuple(rows[-1]["speeds"]), self._costs.links

    def forget(self, build: str) -> None:
        """Remove a build that this run has made and needs no more."""
        if Path(build).parent == Path(str(self.options.out)) / REBALANCED and build != self._built:
            shutil.rmtree(build, ignore_errors=True)


def check_moves(options: RunOptions) -> None:
    """Refuse options that ask for moves and exclude them.

    Raises:
        RunError: says what, and what to do.
    """
    asked = "--rebalance" if options.rebalance else "--on-loss replan"
    if options.out is None and (options.rebalance or options.on_loss == REPLAN):
        raise RunError(f"{asked} writes builds and checkpoints, and the run has no output folder", hint="give out")
    if options.on_loss == REPLAN and options.checkpoint_every is None:
        raise RunError(
            "--on-loss replan goes on from a checkpoint, and the run saves none",
            hint="--checkpoint-every N, or a time",
        )


def _check(options: RunOptions, plan: Plan, costs: BuildCosts | None) -> None:
    """The same for what cannot be moved."""
    asked = "--rebalance" if options.rebalance else "--on-loss replan"
    check_moves(options)
    if model_path(plan, options.build, options.model_file) is None:
        raise RunError(
            f"{asked} compiles again, and the build was made from Python objects",
            where=options.build,
            hint="compile a model file: fxpipe compile MODEL",
        )
    if plan.mesh.replicated:
        raise RunError(f"{asked} does not move units of workers with replicas", hint=f"leave out {asked}")
    if plan.ranks == 1:
        raise RunError(f"{asked} needs other workers, and the build has one", hint=f"leave out {asked}")
    if options.rebalance and (costs is None or not costs.workers):
        raise RunError(
            f"--rebalance compares times with the build's costs, and it has no {COSTS}",
            where=options.build,
            hint="compile again",
        )


def _alike(speeds: Sequence[float], others: Sequence[float]) -> bool:
    """Whether all speeds have nearly the same ratios."""
    if len(speeds) != len(others):
        return False
    ratios = [one / other for one, other in zip(speeds, others, strict=True)]
    return max(ratios) / min(ratios) < 1 + ALIKE


def units_of(plan: Plan) -> str:
    """How many units each worker has: `5+3`, or `F 5+3 B 4+4` if forward and backward are cut at other places."""
    cuts = Cuts.of(plan)
    counts = ["+".join(str(b - a) for a, b in pairwise(of)) for of in (cuts.forward, cuts.backward)]
    return counts[0] if counts[0] == counts[1] else f"F {counts[0]} B {counts[1]}"


def move_text(row: MoveJson) -> str:
    """A move, in a sentence."""
    gain = "" if row["gain"] is None else f"; by the forecast {row['gain']:.0%} of a step's time is saved"
    return f"units move after step {row['step']} ({row['because']}): {row['before']} become {row['after']}{gain}"


def numbers(speeds: Sequence[float]) -> str:
    """Speeds as text."""
    return ", ".join(f"{speed:.2f}" for speed in speeds)
