"""Moves units to other workers during a run, from the launcher: when speeds or links have changed, or a worker was
lost. Under torchrun, process 0 does it (`stopping`).

    workers:   train ─────────────────────────┬─ save, end │ begin from the checkpoint, under the new cuts
    launcher:  their speeds │ compile the new cuts │ ask    │ start them

A move is what a user could do by hand: stop with a checkpoint, compile for the speeds, resume. So its numbers are those
of that, and whatever ends a run during a move leaves one that resumes. What a move itself cannot do ends no run: the
workers end only after the checkpoint is whole, and go back to the cuts before until each has made some steps under the
new ones. Imports no torch before the first move.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from fxpipe.errors import CheckpointError, FxpipeError, first_line
from fxpipe.messages import say, warn
from fxpipe.observe.pulse import Signs
from fxpipe.observe.run_json import MoveJson
from fxpipe.plan.plan import Plan
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.links import Links
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.better_cuts import BetterCuts, RunningBuild, numbers
from fxpipe.runtime.process.check_run import check_movable
from fxpipe.runtime.process.ends import StopRequests
from fxpipe.runtime.process.guardian import Guardian
from fxpipe.runtime.process.last_saved import name_checkpoint
from fxpipe.runtime.process.new_build import REBALANCED, NewBuild
from fxpipe.runtime.process.resume import NEWEST, newest_options, step_before
from fxpipe.runtime.wires.board import ASKED, MOVE, Board

GONE_BACK = "so the run goes on under the cuts before, and makes no other moves"
"""What is said where workers could not begin under new cuts."""

BETWEEN_LOOKS = 0.05
"""Seconds between two looks at a compile that the run waits for."""


@dataclass(frozen=True)
class Moved:
    """What a process that has begun again knows of the moves of its run.

    Attributes:
        build: under which it goes on; None: the one that the command names.
        before: the build under which it can go on if it cannot begin; None if no move has just been made.
        rows, since: of `Moves`; in process 0.
        over: no other moves are made.
    """

    build: str | None = None
    before: str | None = None
    rows: list[MoveJson] = field(default_factory=list)
    since: float = 0.0
    over: bool = False


class Moves:
    """The moves of one run.

    Attributes:
        now: the build and the options of the run.
        since: when the time of the last move, or of the start, began, by `time.monotonic`.
        asked: the workers were asked to save the run and end, for a move.
        rows: of all moves.

    Raises:
        RunError: the options ask for what cannot be done.
    """

    def __init__(self, options: RunOptions) -> None:
        self.now = first = RunningBuild.of(options)
        check_movable(options, first.plan, first.costs)
        if options.rebalance and options.checkpoint_every is None:
            self.now = replace(first, options=replace(options, checkpoint_every="asked"))
        self.asked = False
        self.rows: list[MoveJson] = []
        self.since = time.monotonic()
        self._start: float | None = None  # seconds until all workers train
        self._before: RunOptions | None = None  # of the run before the newest move, until that has worked
        self._cuts = BetterCuts(first)

    @property
    def options(self) -> RunOptions:
        """Of the run as it is now."""
        return self.now.options

    @property
    def plan(self) -> Plan:
        """Of the run as it is now."""
        return self.now.plan

    def begin(self, board: Board, guardian: Guardian) -> None:
        """The workers are being started; `board` is theirs, and `guardian` that of what is started for them."""
        self._board = board
        self._cuts.begin(self.plan.ranks, board, guardian)
        self._start = None
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
                build = self._cuts.look(self.now, signs, self._start)
                if build is not None:
                    self._board.set(ASKED, f"{MOVE} {build.folder.name}", patient=False)
                    self.asked, self.since = True, time.monotonic()
            elif self._board.get(ASKED) is None:
                warn("the move cannot be made, and training goes on")
                self.asked = False
                self._cuts.stay()
        except Exception as error:  # no optimisation is worth a run
            warn(f"other cuts are no longer looked for: {first_line(error)}")
            self.now = replace(self.now, options=replace(self.options, rebalance=False))
            if not self.asked:
                self.end()

    def settle(self) -> None:
        """The newest move has worked, so no way back is needed."""
        if self._before is not None:
            self.forget(self._before.build)
            self._before = None

    def end(self) -> None:
        """Give up a compile that has begun."""
        self._cuts.end()

    def move(self) -> RunOptions:
        """The options with which the run, which is saved, begins again under the new cuts.

        Raises:
            FxpipeError: it cannot.
        """
        cuts = self._cuts
        assert cuts.build is not None
        because = "; ".join((f"speeds {numbers(cuts.speeds)}", *cuts.slower(self.plan.ranks)))
        options = self._go_on(cuts.build, because, cuts.speeds, cuts.gain)
        cuts.build = None
        return options

    def move_or_stay(self) -> RunOptions:
        """The same; under the cuts before, if the new build cannot be read.

        Raises:
            CheckpointError: no checkpoint is left.
        """
        before = self.options
        try:
            return self.move()
        except FxpipeError as error:
            return self._go_back(error, before)

    def back(self, error: FxpipeError) -> RunOptions | None:
        """The workers could not begin under the new cuts: the options with which they go on under the earlier ones;
        None if this is not why the run has ended."""
        if self._before is None or self.rows[-1]["gain"] is None:
            return None
        self.forget(self.options.build)
        self.rows.pop()
        return self._go_back(error, self._before)

    def _go_back(self, error: FxpipeError, before: RunOptions) -> RunOptions:
        warn(f"{error}\n  {GONE_BACK}")
        self.end()
        self._before = None
        self.now = RunningBuild.of(newest_options(replace(before, rebalance=False), before.out))
        return self.options

    def without_one(self, error: FxpipeError, furthest: int, requests: StopRequests) -> RunOptions:
        """A worker was lost, as the error says, after step `furthest` had begun: the options with which one fewer go
        on from the newest checkpoint. The requests end the wait for the compile.

        Raises:
            FxpipeError: they cannot; the error says why.
        """
        self.since, ranks, cuts = time.monotonic(), self.plan.ranks, self._cuts
        if ranks == 1:
            raise error
        newest = newest_options(self.options, self.options.out)
        if newest.resume is None:
            none = "--on-loss replan goes on from a checkpoint, and none was complete: a smaller --checkpoint-every"
            error.hint = none if error.hint is None else f"{error.hint}; {none}"
            raise error
        take = f"{ranks - 1} workers take" if ranks > 2 else "one worker takes"
        warn(f"{error}\n  {take} over, after step {step_before(newest)} of {furthest} begun, when cuts are compiled")
        cuts.first_links = cuts.links = Links(*cuts.first_links.slowest(ranks), cuts.first_links.copy)
        with Guardian() as guardian:
            build = cuts.compile(self.options, ranks - 1, (), guardian)
            try:
                while not build.ended():
                    requests.give_up_if_asked()
                    time.sleep(BETWEEN_LOOKS)
                cuts.check(build)
            except BaseException as failed:
                build.give_up()
                if isinstance(failed, FxpipeError):
                    error.hint = f"--on-loss replan cannot compile for {ranks - 1}: {failed.what}"
                    name_checkpoint(error, self.options, self.options.out)
                    raise error from failed
                raise
        return self._go_on(build, first_line(error), (), None)

    def _go_on(self, build: NewBuild, because: str, speeds: Sequence[float], gain: float | None) -> RunOptions:
        now = RunningBuild.of(replace(self.options, build=str(build.folder)))
        options = newest_options(replace(now.options, plan_digest=now.plan.digest), self.options.out)
        if options.resume is None:
            raise CheckpointError("the run was to go on under other cuts, but no checkpoint could be written")
        row: MoveJson = {"step": step_before(options), "because": because, "speeds": list(speeds)}
        row |= {"before": units_of(self.plan), "after": units_of(now.plan), "gain": gain, "seconds": None}
        build.use()
        self.rows.append(row)
        say(move_text(row))
        self._before, self.now = self.options, replace(now, options=options)
        return options

    def begun_again(self, moved: Moved) -> None:
        """This process has begun again after these moves, under another build.

        Raises:
            FxpipeError: it cannot be read.
        """
        options = replace(self.options, build=str(moved.build), resume=NEWEST, weights=None)
        self.now = RunningBuild.of(replace(options, rebalance=not moved.over))
        if moved.before is not None:
            self._before = replace(self.now.options, build=moved.before)
        self.rows, self.since = moved.rows, moved.since
        if self.rows:
            self._cuts.speeds, self._cuts.links = tuple(self.rows[-1]["speeds"]), self.now.costs.links

    def forget(self, build: str) -> None:
        """Remove a build that this run has made and needs no more."""
        if Path(build).parent == Path(str(self.options.out)) / REBALANCED and build != self._cuts.first.options.build:
            shutil.rmtree(build, ignore_errors=True)


def units_of(plan: Plan) -> str:
    """How many units each worker has: `5+3`, or `F 5+3 B 4+4` if forward and backward are cut at other places."""
    cuts = Cuts.of(plan)
    counts = ["+".join(str(b - a) for a, b in pairwise(of)) for of in (cuts.forward, cuts.backward)]
    return counts[0] if counts[0] == counts[1] else f"F {counts[0]} B {counts[1]}"


def move_text(row: MoveJson) -> str:
    """A move, in a sentence."""
    gain = "" if row["gain"] is None else f"; by the forecast {row['gain']:.0%} of a step's time is saved"
    return f"units move after step {row['step']} ({row['because']}): {row['before']} become {row['after']}{gain}"
