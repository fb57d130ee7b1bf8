"""Finds cuts that save a run time: measures how fast its workers and links are, compiles for that, and forecasts.

    rank 0:  ··|·······|·······|·······|···   a mark: a beat of its pulse, at least `STEPS` after the last one
    rank 1:  ·····|·····|·····|·····|·····|   between two marks, a sample; of `SAMPLES` samples, the median

A speed is the seconds of a step that the build's costs promise, over those that a worker takes. What a worker waits
for, feeding data, saving and evaluations are not its work. Imports no torch before it forecasts.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from statistics import median
from typing import NamedTuple

from fxpipe.errors import BuildError, FxpipeError, first_line
from fxpipe.messages import say, warn
from fxpipe.observe.pulse import Signs
from fxpipe.plan.build_folder import COSTS, read_plan
from fxpipe.plan.plan import Plan
from fxpipe.planner.costs_file import BuildCosts, read_costs
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.guardian import Guardian
from fxpipe.runtime.process.new_build import NewBuild
from fxpipe.runtime.wires.board import TIMES, Board
from fxpipe.runtime.wires.measured_links import MeasuredLinks, replaced

GAIN = 0.1
"""The least share of a step's time that a move must save."""

WINDOWS = 2
"""How many windows in a row must show that, before cuts are compiled."""

ROOM = 5
"""How many times the size of the weights must be free: for a checkpoint with optimizers, final weights and averages."""

ALIKE = 0.1
"""Speeds for which cuts were compiled are tried again when one of them has changed by this share."""

STEPS = 5
"""The fewest steps of a sample."""

SAMPLES = 4
"""How many samples of every worker make a window."""


class Window(NamedTuple):
    """What was measured over some steps, the last of which all have begun: seconds of work a step, by rank; and from
    one step to the next."""

    step: int
    busy: tuple[float, ...]
    pace: float

    def speeds(self, work: Sequence[float]) -> tuple[float, ...]:
        """The speed of each rank, whose costs promise so many seconds of work a step."""
        return tuple(promised / max(taken, 1e-9) for promised, taken in zip(work, self.busy, strict=True))

    def most(self, work: Sequence[float]) -> float:
        """The share of a step's time that other cuts could save at most: all work is shared out by the speeds."""
        slowest = max(self.busy)
        return 1 - sum(work) / sum(self.speeds(work)) / slowest if slowest else 0.0


def promised(plan: Plan, costs: BuildCosts) -> tuple[float, ...]:
    """The seconds of a step at speed 1, by rank, as the compiler estimates them from the costs of nodes."""
    seconds = [0.0] * plan.ranks
    for worker, summary in enumerate(costs.workers):
        seconds[plan.rank_of(worker)] += plan.own_microbatches * summary.time.microbatch + summary.time.update
    return tuple(seconds)


class _AtBeat(NamedTuple):
    """What a process has done at a beat; nanoseconds."""

    step: int
    busy: int
    now: int


class Windows:
    """Makes windows of the signs of a run's processes, by rank."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.clear()

    def clear(self) -> None:
        """Begin a new window."""
        self._beats: list[int | None] = [None] * self._ranks
        self._marks: list[_AtBeat | None] = [None] * self._ranks
        self._samples: list[list[tuple[float, float]]] = [[] for _ in range(self._ranks)]

    def add(self, signs: Sequence[Signs]) -> Window | None:
        """Look at the processes, many times between two beats; the window that this completes."""
        for rank, one in enumerate(signs):
            before, self._beats[rank] = self._beats[rank], one.beat
            if before in (None, one.beat):  # the step is of now, but how busy it was is of the last beat
                continue
            mark, last = _AtBeat(one.step, one.status.busy, one.status.now), self._marks[rank]
            if one.phase != "training" or not mark.step:
                self._marks[rank] = None
            elif last is None:
                self._marks[rank] = mark
            elif mark.step - last.step >= STEPS:
                steps = (mark.step - last.step) * 1e9
                self._samples[rank].append(((mark.busy - last.busy) / steps, (mark.now - last.now) / steps))
                self._marks[rank] = mark
        if min(map(len, self._samples)) < SAMPLES:
            return None
        busy = tuple(median(work for work, _ in samples) for samples in self._samples)
        pace = median(whole for _, whole in self._samples[0])
        self.clear()
        return Window(min(one.step for one in signs), busy, pace)


@dataclass(frozen=True)
class RunningBuild:
    """The build that a run has for a while."""

    options: RunOptions
    plan: Plan
    costs: BuildCosts

    @staticmethod
    def of(options: RunOptions) -> RunningBuild:
        """The one that the options name; FxpipeError if it cannot be read."""
        plan = read_plan(options.build)
        return RunningBuild(options, plan, read_costs(Path(options.build), plan) or BuildCosts())


class BetterCuts:
    """Looks for better cuts for a run, which was started with the build `first`.

    Attributes:
        first_links, links: between its processes: as the first compile knew them, and as the last one did.
        speeds: for which cuts were compiled last.
        build: a compile that has begun, or cuts that are worth a move.
        gain: the share of a step's time that those save.
    """

    def __init__(self, first: RunningBuild) -> None:
        self.first = first
        self.first_links = self.links = first.costs.links
        self.speeds: tuple[float, ...] = ()
        self.build: NewBuild | None = None
        self.gain = 0.0
        self._window: Window | None = None  # for which they were compiled

    def begin(self, ranks: int, board: Board, guardian: Guardian) -> None:
        """So many workers are being started; `board` is theirs, and `guardian` that of what is started for them."""
        self.end()
        self._board, self._guardian = board, guardian
        self._windows, self._times = Windows(ranks), MeasuredLinks(self.first_links)
        self._seen = 0  # windows in a row in which a move might pay

    def end(self) -> None:
        """Give up a compile."""
        if self.build is not None:
            self.build.give_up()
            self.build = None

    def stay(self) -> None:
        """No move is made: begin to measure again."""
        self.end()
        self._windows.clear()
        self._times.clear()

    def look(self, now: RunningBuild, signs: Sequence[Signs], seconds: float) -> NewBuild | None:
        """Look at the speeds, or at the compile for them; return a build that is worth a move of so many seconds.

        Raises:
            OSError: the disk takes no build.
        """
        if self.build is not None:
            if self.build.ended() and self._is_worth(self.build, now, seconds):
                return self.build
            return None
        ranks, work = now.plan.ranks, promised(now.plan, now.costs)
        scale = sum(promised(self.first.plan, self.first.costs)) / sum(work) if sum(work) else 1.0
        work = tuple(one * scale for one in work)
        for rank in range(ranks):
            self._times.add(rank, self._board.get(TIMES.format(rank)))
        if (window := self._windows.add(signs)) is None:
            return None
        links, slower = replaced(self.links, self.first_links, ranks, self._times.measured())
        self._times.clear()
        most, speeds = max(window.most(work), slower), window.speeds(work)
        tried = links == self.links and _alike(speeds, self.speeds)
        pays = most >= GAIN and _pays(most, window, now.options.steps, seconds)
        self._seen = self._seen + 1 if pays and not tried else 0
        if self._seen == WINDOWS:
            self._seen, self._window, self.speeds, self.links = 0, window, speeds, links
            what = f"the workers' speeds are {numbers(speeds)} after step {window.step}"
            say(f"{'; '.join((what, *self.slower(ranks)))}: other cuts are compiled")
            self.build = self.compile(now.options, ranks, speeds, self._guardian)
        return None

    def slower(self, ranks: int) -> list[str]:
        """The links that are other than at the first compile, each in words."""
        pairs = permutations(range(ranks), 2)
        both = [(a, b, self.links.bandwidth_of(a, b), self.first_links.bandwidth_of(a, b)) for a, b in pairs]
        return [f"link {a}→{b} {8e-6 * now:.4g} of {8e-6 * was:.4g} Mbit/s" for a, b, now, was in both if now != was]

    def compile(self, options: RunOptions, workers: int, speeds: Sequence[float], guardian: Guardian) -> NewBuild:
        """Begin to compile the first build again, for the links as they are."""
        options = dataclasses.replace(options, build=self.first.options.build)
        costs = dataclasses.replace(self.first.costs, links=self.links)
        return NewBuild(options, self.first.plan, costs, workers, speeds, guardian)

    def check(self, build: NewBuild) -> Plan:
        """The plan of a compile that has ended.

        Raises:
            FxpipeError: it has failed, or met another model than the run's.
        """
        build.check()
        plan = read_plan(build.folder)
        before, now = ((each.parts or each.sources) for each in (self.first.plan.model_file, plan.model_file))
        if before != now:
            raise BuildError("the model file, or what it imports, has changed since the run's build was compiled")
        return plan

    def _is_worth(self, build: NewBuild, now: RunningBuild, seconds: float) -> bool:
        """Whether a build is worth a move; if not, say why, and remove it."""
        assert self._window is not None
        try:
            plan = self.check(build)
            costs = read_costs(build.folder, plan)
            assert costs is not None, "a compile writes them"
            costs = self._with_measured(plan, costs)
            (build.folder / COSTS).write_text(costs.to_json())
            before = self._with_measured(now.plan, now.costs)
            self.gain = 1 - _forecast(plan, costs, now.options) / _forecast(now.plan, before, now.options)
        except FxpipeError as error:
            warn(f"no other cuts could be compiled, and training goes on: {first_line(error)}")
            self.stay()
            return False
        weights = build.folder / plan.weights.file
        if self.gain < GAIN or not _pays(self.gain, self._window, now.options.steps, seconds):
            say(f"other cuts would save {max(self.gain, 0.0):.0%} of a step's time, too little for a move")
        elif weights.is_file() and shutil.disk_usage(build.folder).free < ROOM * weights.stat().st_size:
            say("a move would pay, but its checkpoint could take the room of the final weights: no move is made")
        else:
            return True
        self.stay()
        return False

    def _with_measured(self, plan: Plan, costs: BuildCosts) -> BuildCosts:
        """A build's costs with what was measured, from its nodes: its stages were timed next to the run."""
        times = tuple(worker.time for worker in costs.workers) if costs.times else ()
        scale = sum(promised(plan, costs)) / sum(promised(self.first.plan, self.first.costs))  # so may have been nodes
        speeds = tuple(speed * scale for speed in self.speeds)
        return dataclasses.replace(costs, times=times, speeds=speeds, links=self.links)


def _forecast(plan: Plan, costs: BuildCosts, options: RunOptions) -> float:
    """The seconds of a minibatch."""
    from fxpipe.simulator.of_build import forecast  # it imports torch

    policy = None if options.policy is None else str(options.policy)
    return forecast(plan, costs, schedule=options.schedule, policy=policy).seconds_per_minibatch


def _pays(gain: float, window: Window, steps: int | None, seconds: float) -> bool:
    """Whether the steps that are left save more seconds than a move takes; yes if their number is not known."""
    return steps is None or gain * window.pace * (steps - window.step) > seconds


def _alike(speeds: Sequence[float], others: Sequence[float]) -> bool:
    """Whether all speeds have nearly the same ratios."""
    if len(speeds) != len(others):
        return False
    ratios = [one / other for one, other in zip(speeds, others, strict=True)]
    return max(ratios) / min(ratios) < 1 + ALIKE


def numbers(speeds: Iterable[float]) -> str:
    """Speeds as text."""
    return ", ".join(f"{speed:.2f}" for speed in speeds)
