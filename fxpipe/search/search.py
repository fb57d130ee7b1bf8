"""The search: every candidate planned and simulated, the promising ones improved, all of them ranked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf
from typing import NoReturn

from fxpipe.errors import FxpipeError, PolicyError
from fxpipe.plan.cost_records import ScheduleForecast
from fxpipe.planner.branches import borders
from fxpipe.planner.candidates import MODES, PINNED
from fxpipe.planner.partition import Partition, TooLittleMemory, of_cuts
from fxpipe.planner.quantity import size
from fxpipe.planner.search import EPSILON
from fxpipe.planner.separate_cuts import worth_messages
from fxpipe.search.candidate import Candidate, Question, Sized, candidates, counted
from fxpipe.search.climb import climb
from fxpipe.search.plans import ByMode, Plans
from fxpipe.search.reasons import TIE, complexity, reason
from fxpipe.search.side_by_side import SIMULATIONS, advised_partitions, between_branches
from fxpipe.search.simulated_plan import Judge, SimulatedPlan

STARTS = 3
"""From how many plans they are improved."""

NEAR = 1.2
"""How many times the fastest one's time a schedule with a flush may take to be improved: moving cuts gains less."""

ALIKE = 0.1
"""If memory is short: a still larger number of microbatches is tried unless the last increase was slower by more."""

Say = Callable[[str], None]
Larger = Callable[[int], Sized | None]
"""Gives the minibatch in more microbatches than this number; None if it cannot be cut into more."""

_Pair = tuple[str, int]
_Failed = tuple[FxpipeError, Candidate]


@dataclass(frozen=True)
class Ranking:
    """What was compared.

    Attributes:
        best: what to take.
        rows: one for each schedule and number of microbatches: the best one first, then by their time; then those that
            do not fit, and those that are refused.
        partitions: the best's, after the one that its kind of cuts is compared with, if there is one.
    """

    best: SimulatedPlan
    rows: tuple[ScheduleForecast, ...]
    partitions: tuple[Partition, ...]


def search(
    sizes: Sequence[Sized], question: Question, say: Say = lambda text: None, larger: Larger = lambda count: None
) -> Ranking:
    """The schedule, number of microbatches and cuts that take the least simulated time, and what the others lose.

    Every schedule is planned for every kind of cuts that is of use to it, with the memory that it needs; plans
    of one schedule are tried under the others, too. Those with a flush, which are not far behind and could be faster,
    are improved further (`climb`).
    Separate cuts count where they are worth their messages (`worth_messages`).
    Of all within 1% of the fastest, the simplest is taken: without stale weights or separate weight gradients, with
    fewer kinds of cuts, with less memory. So nothing that any schedule's own plan with shared cuts promises is more
    than 1% faster.

    More microbatches than those of `sizes` are tried as long as they may gain (`_more_may_gain`): bubbles are shorter
    then, and a microbatch saves less.

    Args:
        sizes: the numbers of microbatches to begin with, in rising order, each with its own costs.
        larger: asked with the largest number so far; None: no others are tried.

    Raises:
        TooLittleMemory: nothing fits; says what would, and which schedule needs it.
        PolicyError: the policy makes no sense with any of the schedules.
        CutError: more workers than units; given cuts that are impossible, or do not fit.
    """
    trials: list[SimulatedPlan] = []
    refused: list[ScheduleForecast] = []
    failed: list[_Failed] = []
    waiting = [*sizes]
    while waiting:
        sized = waiting.pop(0)
        wide = _Planning(sized, question, say)
        trials += wide.trials()
        refused += wide.refused
        failed += wide.failed
        if not waiting and _more_may_gain(sized, trials, failed):
            more = larger(sized.microbatches)
            waiting = [] if more is None else [more]
    if not trials:
        _raise(failed, question, say)
    flushing = [trial for trial in trials if trial.schedule.synchronous and trial.candidate.mode != PINNED]
    fastest = min((trial.pace for trial in flushing), default=0.0)
    by_pace = sorted(_by_pair(flushing).items(), key=lambda pair: min(trial.pace for trial in pair[1]))
    for (schedule, microbatches), pair_trials in by_pace:
        near = min(trial.pace for trial in pair_trials) <= NEAR * fastest
        if near and min(trial.least for trial in pair_trials) < fastest:
            say(f"{schedule}, {counted(microbatches)}: moving cuts")
            better = _improved(pair_trials, question)
            trials += better
            fastest = min([fastest, *(trial.pace for trial in better)])
    worthwhile = _worth_messages(trials)
    best = simplest(worthwhile)
    return Ranking(best, (*_rows(worthwhile, best), *refused), _compared(best, trials))


def _more_may_gain(largest: Sized, trials: Sequence[SimulatedPlan], failed: Sequence[_Failed]) -> bool:
    """Whether still more microbatches than the largest number may be better.

    They may where it is better than all others: faster, or, where nothing fits yet, in need of less memory. And where
    it has to compute again and is not much slower: with more there is less to compute again.
    """

    def best(values: Sequence[tuple[float, Sized]], of_largest: bool) -> float:
        return min((value for value, sized in values if (sized is largest) == of_largest), default=inf)

    if not trials:
        shares = [(_share_of(one), one[1].sized) for one in failed]
        return best(shares, True) < (1 - TIE) * best(shares, False)
    paces = [(trial.pace, trial.candidate.sized) for trial in trials]
    largest_trials = [trial for trial in trials if trial.candidate.sized is largest]
    fastest = min(largest_trials, key=lambda trial: trial.pace, default=None)
    again = fastest is not None and any(load.recompute for load in fastest.partition.loads)
    return best(paces, True) < (1 + ALIKE if again else 1 - TIE) * best(paces, False)


class _Planning:
    """The plans and trials of one number of microbatches."""

    def __init__(self, sized: Sized, question: Question, say: Say) -> None:
        self.sized, self.question = sized, question
        self.say: Say = lambda text: say(f"{counted(sized.microbatches)}: {text}")
        self.refused: list[ScheduleForecast] = []
        self.failed: list[_Failed] = []
        self._plans = Plans(self.say)

    def trials(self) -> list[SimulatedPlan]:
        """The trials of every candidate's own plan, and of the plans made for other schedules."""
        planned: list[tuple[Judge, ByMode]] = []
        by_schedule: dict[str, list[Candidate]] = {}
        for candidate in candidates(self.question, self.sized):
            by_schedule.setdefault(candidate.schedule, []).append(candidate)
        ordered = sorted(by_schedule.items(), key=lambda pair: -len(pair[1]))  # wide ones serve narrow ones
        for number, (schedule, schedule_candidates) in enumerate(ordered, 1):
            self.say(f"planning for {schedule}, {number} of {len(ordered)} schedules")
            try:
                planned += self._planned(schedule_candidates)
            except (TooLittleMemory, PolicyError) as error:
                self._refuse(schedule_candidates[-1], error)
        trials = [judge.trial(plans[judge.candidate.mode]) for judge, plans in planned]
        if self.sized.fixed is None:
            for (judge, _), trial in zip(planned, trials[:], strict=True):
                trials += between_branches(judge, trial, borders(judge.profile, judge.workers.count))
        return [*trials, *self._borrowed(planned, trials)]

    def _planned(self, of_schedule: Sequence[Candidate]) -> list[tuple[Judge, ByMode]]:
        """The plans of one schedule, by its candidates.

        Raises:
            TooLittleMemory: none fits.
            PolicyError: the schedule is refused.
        """
        judges = [Judge.of(candidate, self.question) for candidate in of_schedule]
        if self.sized.fixed is not None:
            return [(judge, {PINNED: _fixed(judge)}) for judge in judges]
        fitting: list[tuple[Judge, ByMode]] = []
        short: TooLittleMemory | None = None
        for profile in {id(judge.profile): judge.profile for judge in judges}.values():
            group = [judge for judge in judges if judge.profile is profile]
            modes = tuple(mode for mode in MODES if mode in {judge.candidate.mode for judge in group})
            try:
                plans = self._plans.of(profile, group[0].workers, modes)
            except TooLittleMemory as error:
                short = error if short is None or error.share < short.share else short
                continue
            fitting += [(judge, plans) for judge in group if judge.candidate.mode in plans]
        if not fitting:
            assert short is not None
            raise short
        return fitting

    def _borrowed(self, planned: list[tuple[Judge, ByMode]], trials: Sequence[SimulatedPlan]) -> list[SimulatedPlan]:
        """Plans that were made for other schedules, where they fit: their objectives are the same."""
        tried = {(t.candidate.schedule, t.candidate.mode, t.cuts) for t in trials}
        borrowed = []
        for judge, _ in planned:
            for trial in trials:
                key = (judge.candidate.schedule, trial.candidate.mode, trial.cuts)
                same = trial.candidate.mode == judge.candidate.mode and trial.placement == judge.placement
                if same and trial.candidate.mode != PINNED and key not in tried:
                    tried.add(key)
                    borrowed += [other for other in judge.of_cuts([trial.partition.cuts]) if other is not None]
        return borrowed

    def _refuse(self, candidate: Candidate, error: TooLittleMemory | PolicyError) -> None:
        self.failed.append((error, candidate))
        row = ScheduleForecast(candidate.schedule, self.question.policy or "", candidate.microbatches, why=error.what)
        if isinstance(error, TooLittleMemory):
            policy = self.question.setting(self.sized, candidate.schedule).policy or ""
            memory = self.sized.setting.memory
            enough = error.share * memory[0] if len(set(memory)) == 1 else None
            why = "does not fit" if enough is None else f"does not fit: {size(enough, enough=True)} would be enough"
            row = replace(row, policy=policy, memory_bytes=enough or 0.0, enough_bytes=enough, why=why)
        self.refused.append(row)


def _fixed(judge: Judge) -> Partition:
    """The partition by the given cuts.

    Raises:
        TooLittleMemory: they do not fit.
    """
    cuts, workers = judge.candidate.sized.fixed, judge.workers
    assert cuts is not None
    priced = of_cuts(judge.profile, workers, cuts)
    shares = [load.memory / memory for load, memory in zip(priced.loads, workers.memory, strict=True)]
    if max(shares) > 1 + EPSILON:
        fullest = shares.index(max(shares))
        room = f"{size(priced.loads[fullest].memory, enough=True)} on worker {fullest}"
        what = f"these cuts do not fit into memory: they need {room}, which has {size(workers.memory[fullest])}"
        raise TooLittleMemory(what, max(shares), hint="give it that much, or let the planner choose the cuts")
    return priced


def _raise(failed: Sequence[_Failed], question: Question, say: Say) -> NoReturn:
    """Nothing fits: say what would have to change for the candidate that needs the least memory."""
    short = [(error, candidate) for error, candidate in failed if isinstance(error, TooLittleMemory)]
    if not short:
        raise failed[0][0]
    error, candidate = min(short, key=_share_of)
    if candidate.sized.fixed is None:  # once more, for its advice
        setting = question.setting(candidate.sized, candidate.schedule)
        count = len(setting.placement) or question.workers
        try:
            advised_partitions(candidate.profile, setting, count, (candidate.mode,), say)
        except TooLittleMemory as advised:
            error = advised
    least = f" ({candidate.schedule} with {counted(candidate.microbatches)}, which needs least)" if short[1:] else ""
    raise TooLittleMemory(f"{error.what}{least}", error.share, where=error.where, hint=error.hint) from error


def _share_of(failed: _Failed) -> float:
    error = failed[0]
    return error.share if isinstance(error, TooLittleMemory) else inf


def simplest(trials: Sequence[SimulatedPlan]) -> SimulatedPlan:
    """Of all trials within `TIE` of the fastest, the one that needs least."""
    fastest = min(trial.pace for trial in trials)
    return min((t for t in trials if t.pace <= fastest * (1 + TIE)), key=_simplicity)


def _worth_messages(trials: Sequence[SimulatedPlan]) -> list[SimulatedPlan]:
    """All with the fewest kinds of cuts under their schedule, and the simplest with more where that is worth it."""
    kept: list[SimulatedPlan] = []
    for pair_trials in _by_pair(trials).values():
        fewest, *more = (list(group) for _, group in groupby(sorted(pair_trials, key=_kind), _kind))
        kept += fewest
        same = min(fewest, key=lambda trial: trial.pace)
        for separate in map(simplest, more):
            if _is_worth(separate, same):
                kept.append(separate)
                same = separate
    return kept


def _is_worth(separate: SimulatedPlan, same: SimulatedPlan) -> bool:
    noise = separate.candidate.profile.noise(len(separate.partition.loads))
    return worth_messages(separate, same, SimulatedPlan.seconds_over, separate.setting.links, noise)


def _kind(trial: SimulatedPlan) -> int:
    """How many kinds of cuts more than one it has."""
    return MODES.index(trial.candidate.mode) if trial.candidate.mode in MODES else 0


def _compared(best: SimulatedPlan, trials: Sequence[SimulatedPlan]) -> tuple[Partition, ...]:
    """The best's partition, after what its cuts are compared with: shared ones; or the fastest separate ones."""
    pair_trials = _by_pair(trials)[best.candidate.schedule, best.candidate.microbatches]
    others = [trial for trial in pair_trials if (_kind(trial) == 0) != (_kind(best) == 0)]
    compared = [*sorted(others, key=lambda trial: trial.pace)[:1], best]
    return tuple(replace(trial.partition, simulated=trial.seconds) for trial in compared)


def _simplicity(trial: SimulatedPlan) -> tuple[int, int, int, float, float]:
    return trial.staleness, complexity(trial), _kind(trial), trial.memory, trial.pace


def _improved(of_schedule: Sequence[SimulatedPlan], question: Question) -> list[SimulatedPlan]:
    """The best trial of each kind of cuts of one schedule, after moving its cuts."""
    improved: list[SimulatedPlan] = []
    for mode in [mode for mode in MODES if mode in {t.candidate.mode for t in of_schedule}]:
        starts = [t for t in (*of_schedule, *improved) if MODES.index(t.candidate.mode) <= MODES.index(mode)]
        starts = sorted(starts, key=lambda trial: trial.pace)[:STARTS]
        better = climb(Judge.of(replace(starts[0].candidate, mode=mode), question), starts, SIMULATIONS)
        improved += [] if any(better is start for start in starts) else [better]
    return improved


def _rows(trials: Sequence[SimulatedPlan], best: SimulatedPlan) -> list[ScheduleForecast]:
    """Each schedule and number of microbatches with its own best cuts; the best of all first."""
    rows = [(best, "")]
    for pair, pair_trials in _by_pair(trials).items():
        if pair != (best.candidate.schedule, best.candidate.microbatches):
            trial = simplest(pair_trials)
            rows.append((trial, reason(trial, best)))
    rows[1:] = sorted(rows[1:], key=lambda pair: pair[0].pace)
    return [
        ScheduleForecast(
            trial.setting.schedule,
            trial.setting.policy or "",
            trial.setting.microbatches,
            trial.candidate.mode,
            trial.seconds,
            trial.simulation.bubble,
            trial.memory,
            staleness=trial.staleness,
            why=why,
        )
        for trial, why in rows
    ]


def _by_pair(trials: Sequence[SimulatedPlan]) -> dict[_Pair, list[SimulatedPlan]]:
    by_pair: dict[_Pair, list[SimulatedPlan]] = {}
    for trial in trials:
        by_pair.setdefault((trial.candidate.schedule, trial.candidate.microbatches), []).append(trial)
    return by_pair
