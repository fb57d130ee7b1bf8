"""Chooses schedule, number of microbatches and cuts for `schedule="auto"`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from fxpipe.errors import BatchError, FxpipeError, ScheduleError
from fxpipe.lowering.captured_step import CapturedStep, captured_step, compared, uncompared_step
from fxpipe.lowering.choose_codecs import PLAIN, ratios_of
from fxpipe.lowering.choose_cuts import choose_cuts
from fxpipe.lowering.minibatch_loss import WholeStep
from fxpipe.lowering.model_profile import StepProfile, profile_model
from fxpipe.lowering.options import AUTO, CompileOptions
from fxpipe.lowering.step_costs import SharedCosts, StepCosts
from fxpipe.plan.cost_records import ScheduleForecast
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.partition import Partition
from fxpipe.planner.profile import PlanInput
from fxpipe.planner.setting import Setting
from fxpipe.planner.workers import Ratios
from fxpipe.schedule.loss_scaling import FLOAT16
from fxpipe.search import Counts, Question, SimulatedPlan, Sized, counted, microbatch_counts, schedules_of, search
from fxpipe.task.batch import Batch
from fxpipe.task.hooks import Loss

Say = Callable[[str], None]

_CAPTURED_FOR = "1f1b"
"""A step is the same for every schedule; this one has no defaults of its own."""


@dataclass(frozen=True)
class Compared:
    """Schedules, each with several numbers of microbatches.

    Attributes:
        best: the fastest.
        rows: all candidates, the best first; then the numbers of microbatches that no schedule can use.
        partitions: as in `Ranking`.
        ratios: the bytes that travel for each byte of values.
    """

    best: SimulatedPlan
    rows: tuple[ScheduleForecast, ...]
    partitions: tuple[Partition, ...]
    ratios: Ratios


@dataclass(frozen=True)
class ChosenSchedule:
    """The choice of the search, and its results.

    Attributes:
        step: captured, with the schedule and the microbatches among its options.
        known: the partitions that were compared, its own last, by the bytes that travel for each byte of values.
        costs: of the step with that schedule.
        rows: all candidates, the chosen one first.
    """

    step: CapturedStep
    known: Mapping[Ratios, tuple[Partition, ...]]
    costs: StepCosts
    rows: tuple[ScheduleForecast, ...]


def choose_schedule(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    options: CompileOptions,
    shapes: Sequence[Batch] = (),
    last: Batch | None = None,
    say: Say = lambda text: None,
) -> ChosenSchedule:
    """Capture and cost the step with each number of microbatches, search, and capture what was chosen.

    Args:
        batch, shapes, last: as for `captured_step`.
        say: is called with what is being done.

    Raises:
        CutError: nothing fits into memory; the error says what would. Or as `choose_cuts`.
        ScheduleError: workers are to have different numbers of replicas.
        FxpipeError: as `captured_step`, where no number of microbatches can be captured.
    """
    if options.replicas:
        raise ScheduleError(
            f"schedule 'auto' is for workers with equally many replicas, not {', '.join(map(str, options.replicas))}",
            hint="name the schedule: 1f1b, gpipe or async",
        )
    found: dict[int, StepProfile] = {}
    shared, capture = SharedCosts(), partial(uncompared_step, whole=WholeStep())

    def read(count: int, say: Say) -> PlanInput:
        asked = for_count(options, count)
        found[count] = profile_model(model, loss, batch, asked, capture=capture, say=say, shared=shared)
        return found[count].input

    def fixed(count: int) -> Cuts | None:
        """The cuts, if they are given."""
        one, own = found[count], found[count].step.options
        if own.planned:
            return None
        return choose_cuts(one.program, one.input.whole, own, own.setting(one.program.device)).cuts

    def take(best: Setting, say: Say) -> None:
        decided = options if options.microbatches is not None else options.of_microbatches(best.microbatches)
        decided = replace(decided, schedule=best.schedule)
        one = found[best.microbatches]
        say("comparing with eager PyTorch")
        if shapes or last is not None:
            step = captured_step(model, loss, batch, decided, shapes, last, say)
        else:
            step = compared(replace(one.step, options=decided), model, loss, batch.padded(decided.padding([batch])))
        found[best.microbatches] = replace(one, step=step)

    counts = counts_of(options, [batch, *shapes, *([] if last is None else [last])])
    otherwise = () if options.microbatches is not None else (1,)
    chosen = compare(read, options, counts, say, otherwise, fixed=fixed, take=take)
    taken = found[chosen.best.setting.microbatches]
    costs = taken.costs_of_apart if taken.step.options.splits_backward else taken.costs_of_whole
    return ChosenSchedule(taken.step, {chosen.ratios: chosen.partitions}, costs, chosen.rows)


def compare(
    read: Callable[[int, Say], PlanInput],
    options: CompileOptions,
    counts: Counts,
    say: Say,
    otherwise: Sequence[int] = (),
    *,
    modes: Sequence[str] | None = None,
    fixed: Callable[[int], Cuts | None] = lambda count: None,
    take: Callable[[Setting, Say], None] = lambda best, say: None,
) -> Compared:
    """Plan and simulate every schedule, or the named one, with several numbers of microbatches.

    Args:
        read: captures and costs the step with a number of microbatches.
        counts: the numbers to try; `otherwise` those to try if none of these can be captured.
        modes: the kinds of cuts; if empty, all that a schedule can use; None: as the options say.
        fixed: gives the cuts, if they are given.
        take: is called with the best; where it raises, the search goes on without that number of microbatches.

    Raises:
        CutError: nothing fits into memory; the error says what would.
        FxpipeError: as `read` or `take`, where no number of microbatches can be used.
    """
    ratios = ratios_of(PLAIN if options.encoding.auto else options.encoding)
    inputs: list[PlanInput] = []
    tried: set[int] = set()
    usable: dict[int, Sized] = {}
    refused: list[ScheduleForecast] = []
    failures: list[FxpipeError] = []

    def of(count: int) -> Say:
        return lambda text: say(f"{counted(count)}: {text}")

    def refuse(count: int, error: FxpipeError) -> None:
        refused.append(ScheduleForecast("", "", count, why=error.what))
        failures.append(error)

    def size(count: int) -> Sized | None:
        """With this number of microbatches; None if it cannot be captured."""
        tried.add(count)
        try:
            found = read(count, of(count))
        except FxpipeError as error:
            refuse(count, error)
            return None
        inputs.append(found)
        setting = replace(for_count(options, count).setting(found.device, found.optimizer), ratios=ratios)
        usable[count] = Sized(setting, found.whole, found.separate, samples=found.samples, fixed=fixed(count))
        return usable[count]

    def larger(count: int) -> Sized | None:
        """With more microbatches, if batch norms do not change what is trained with them."""
        more = None if any(found.batch_norm for found in inputs) else counts.after(count)
        return None if more is None or more in tried else size(more)

    for first in (counts.first, tuple(count for count in otherwise if count not in counts.first)):
        for count in first:
            size(count)
        while usable:
            asked = question(options, inputs[0].optimizer.momentum)
            if modes is not None:
                asked = replace(asked, modes=tuple(modes))
            if options.schedule != AUTO:
                asked = replace(asked, schedules=(options.schedule,))
            ranking = search(list(usable.values()), asked, say, larger)
            best = ranking.best.setting
            try:
                take(best, of(best.microbatches))
            except FxpipeError as error:
                refuse(best.microbatches, error)
                del usable[best.microbatches]
                continue
            rows = (*ranking.rows, *refused)
            return Compared(ranking.best, rows, ranking.partitions, ratios)
    raise failures[-1 if otherwise else 0]


def counts_of(options: CompileOptions, batches: Sequence[Batch]) -> Counts:
    """The numbers of microbatches to try: the given one, or divisors of all of these minibatches."""
    if options.microbatches is not None:
        return Counts((options.microbatches,))
    try:
        samples = math.gcd(*(options.cut(batch).samples for batch in batches)) // options.dp
    except BatchError:
        return Counts((1,))
    return microbatch_counts(options.workers, max(1, samples), question(options).schedules)


def for_count(options: CompileOptions, count: int) -> CompileOptions:
    """The options to capture and cost a step with this number of microbatches, for any schedule."""
    return replace(options, schedule=_CAPTURED_FOR, policy=None, microbatches=count)


def question(options: CompileOptions, momentum: bool = False) -> Question:
    """The search's question, from the options."""
    flush = options.synchronous or options.autocast == FLOAT16  # whose loss is scaled, see `check_loss_scaling`
    modes = () if options.cuts == "auto" or not options.planned else (str(options.cuts),)
    return Question(options.workers, schedules_of(flush), options.policy, momentum, modes, options.virtual)
