"""The planner's cuts, with advice where nothing fits; for a given schedule also at the borders of branches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite

from fxpipe.errors import CutError, ProfileError, ScheduleError
from fxpipe.planner.branches import borders, cut_at
from fxpipe.planner.candidates import MODES
from fxpipe.planner.partition import Partition, TooLittleMemory, fits, of_cuts, partitions
from fxpipe.planner.profile import Profile
from fxpipe.planner.quantity import size
from fxpipe.planner.setting import Setting
from fxpipe.search.candidate import Candidate, Sized
from fxpipe.search.climb import climb
from fxpipe.search.simulated_plan import Judge, SimulatedPlan

SIMULATIONS = 150
"""At most this many plans are simulated to improve one kind of cuts of one schedule and number of microbatches."""

WORTH = 0.02
"""How much slower cuts may be for which weights are less stale."""


def planned_side_by_side(
    profile: Profile,
    setting: Setting,
    count: int,
    modes: Sequence[str],
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Partition]:
    """Like `advised_partitions`, or better: partitions whose workers run branches side by side.

    The planner minimises the slowest worker's cost, which does not depend on the order in which workers wait. With a
    flush, what counts is the simulated time, which is shorter if the pipeline fills along several branches at once.
    Without one, what counts is the number of workers that a microbatch passes, which is how old weights are. Either way
    fewer microbatches are in flight, so that a partition may fit only with its branches side by side.

    Raises:
        TooLittleMemory: nothing fits; the hint has the memory and the number of workers that would be enough.
    """
    short: TooLittleMemory | None = None
    places = borders(profile, count)
    schedule = setting.schedule_of(count)
    try:
        plain = advised_partitions(profile, setting, count, modes, say)
    except TooLittleMemory as error:
        if not places:
            raise
        plain, short = partitions(profile, replace(setting, memory=()).workers(count), modes, say), error
    if not places or schedule.several or schedule.replicas:
        if short is not None:
            raise short
        return plain
    better = {}
    for mode, partition in plain.items():
        say(f"{mode}: cutting between branches")
        candidate = Candidate(Sized(setting, profile, profile), setting.schedule, mode)
        judge = Judge(candidate, setting, setting.workers(count))
        first = judge.trial(partition)
        trials = [*([first] if short is None else []), *between_branches(judge, first, places)]
        if not trials:
            continue
        if schedule.synchronous:
            best = climb(judge, trials, SIMULATIONS)
        else:
            fastest = min(trial.seconds for trial in trials)
            near = [trial for trial in trials if trial.seconds <= fastest * (1 + WORTH)]
            best = min(near, key=lambda trial: trial.schedule.depths[0])
        better[mode] = best.partition
    if short is not None and modes[-1] not in better:
        raise short
    return better


def between_branches(judge: Judge, trial: SimulatedPlan, places: Sequence[int]) -> list[SimulatedPlan]:
    """Trials with cuts at the borders of branches, near those of a trial and others, as far as they fit."""
    trials = []
    for cuts in dict.fromkeys(cut_at(judge.profile, places, trial.partition.cuts)) if places else ():
        priced = of_cuts(judge.profile, judge.workers_of(cuts), cuts, mode=trial.candidate.mode)
        if isfinite(priced.bottleneck):
            trials.append(judge.trial(replace(priced, lower_bound=trial.partition.lower_bound)))
    return trials


_TRIED = (1, 2, 3, 4)
"""How many more workers are tried, and, above 1, how many times as many."""


def advised_partitions(
    profile: Profile,
    setting: Setting,
    count: int,
    modes: Sequence[str] = MODES,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Partition]:
    """Like `partitions`, for `count` workers; if nothing fits, the error says what would be enough.

    Raises:
        TooLittleMemory: nothing fits; the hint has the memory and the number of workers that would be enough.
    """
    workers = setting.workers(count)
    try:
        return partitions(profile, workers, modes, say)
    except TooLittleMemory as error:
        if len(set(setting.memory)) > 1 or len(set(setting.speeds)) > 1:
            error.hint = "give that worker more memory, or use more workers"
            raise
        enough = f"give every worker {size(error.share * setting.memory[0], enough=True)}"
        more = _enough_workers(profile, setting, count, say)
        several = setting.schedule_of(count).several
        alone = "" if several else "; more workers alone do not help"
        error.hint = f"{enough}, or use -n {more}" if more else f"{enough}{alone}"
        if setting.recompute == "none":
            error.hint += "; or let backwards compute values again (--recompute auto)"
        raise


def _enough_workers(profile: Profile, setting: Setting, count: int, say: Callable[[str], None]) -> int | None:
    """The smallest number of workers that fits, among the next few and a few larger ones."""
    if setting.schedule_of(count).several:
        return None  # several workers share a process, so more of them may not help
    tried = sorted({count + more for more in _TRIED} | {count * times for times in _TRIED[1:]})
    for more in tried:
        say(f"does it fit into {more} workers?")
        try:
            if fits(profile, setting.workers(more)):
                return more
        except (CutError, ProfileError, ScheduleError):  # links or placement are for another number of workers
            return None
    return None
