"""Which schedule, with how many microbatches and which cuts: what `schedule="auto"` takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fxpipe.errors import BatchError, CaptureError, FxpipeError, ScheduleError
from fxpipe.lowering.captured_step import CapturedStep, captured_step
from fxpipe.lowering.choose_codecs import PLAIN, ratios_of
from fxpipe.lowering.choose_cuts import choose_cuts
from fxpipe.lowering.model_profile import StepProfile, profile_step, samples_of_step
from fxpipe.lowering.options import CompileOptions
from fxpipe.lowering.step_costs import StepCosts
from fxpipe.plan.cost_records import OptimizerCosts, ScheduleForecast
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.partition import Partition
from fxpipe.planner.profile import Profile
from fxpipe.planner.workers import Ratios
from fxpipe.schedule.loss_scaling import FLOAT16
from fxpipe.search import Question, Sized, microbatch_counts, schedules_of, search
from fxpipe.task.batch import samples_of
from fxpipe.task.model_view import of_parameters
from fxpipe.tracing.capture import Loss

Say = Callable[[str], None]
Bare = Callable[[], nn.Module] | None
"""Gives the model without values."""

_CAPTURED_FOR = "1f1b"
"""A step is the same for every schedule; this one wants no default of its own."""


@dataclass(frozen=True)
class ChosenSchedule:
    """What the search took, and what it knew.

    Attributes:
        step: captured, with the schedule and the microbatches among its options.
        known: its partition, by what travels for each byte of values.
        costs: of the step as that schedule has it.
        rows: what was compared, the chosen one first.
    """

    step: CapturedStep
    known: Mapping[Ratios, Partition]
    costs: StepCosts
    rows: tuple[ScheduleForecast, ...]


def choose_schedule(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    options: CompileOptions,
    shapes: Sequence[Any] = (),
    last: Any = None,
    bare: Bare = None,
    say: Say = lambda text: None,
) -> ChosenSchedule:
    """Capture and cost the step with each number of microbatches, search, and capture what was chosen.

    Args:
        batch, shapes, last: as for `captured_step`.
        bare: for an optimizer that asks for the model.
        say: is told what is being done.

    Raises:
        CutError: nothing fits into memory; says what would. Or as `choose_cuts`.
        ScheduleError: workers are to have different numbers of replicas.
        FxpipeError: as `captured_step`, where no number of microbatches can be captured.
    """
    if options.replicas:
        raise ScheduleError(
            f"schedule 'auto' is for workers with equally many replicas, not {', '.join(map(str, options.replicas))}",
            hint="name the schedule: 1f1b, gpipe or async",
        )
    tried: dict[int, tuple[CapturedStep, StepProfile]] = {}
    refused: list[ScheduleForecast] = []
    counts = list(counts_of(options, [batch, *shapes, *([] if last is None else [last])]))
    while counts:
        count = counts.pop(0)

        def told(text: str, count: int = count) -> None:
            say(f"{counted(count)}: {text}")

        told("capturing")
        try:
            step = captured_step(model, loss, batch, for_count(options, count), say=told)
        except (BatchError, CaptureError) as error:
            refused.append(refusal(count, error))
            if not counts and not tried:
                if count == 1 or options.microbatches is not None:
                    raise
                counts = [1]
            continue
        found = profile_step(step, _costed(step.options, bare), say=told)
        tried[count] = step, found
    encoding = options.encoding
    ratios = ratios_of(PLAIN if encoding.auto else encoding)
    sizes = [
        sized(
            step.options,
            step.program.device,
            found.costs_of_whole.optimizer,
            (found.whole, found.apart),
            samples_of_step(step),
            _fixed(step.options, found),
            ratios,
        )
        for step, found in tried.values()
    ]
    momentum = next(iter(tried.values()))[1].costs_of_whole.optimizer.momentum
    ranking = search(sizes, question(options, momentum), say)
    best = ranking.best.setting
    step, found = tried[best.microbatches]
    decided = options if options.microbatches is not None else options.of_microbatches(best.microbatches)
    if best.rows:  # say themselves how many stages a process runs
        decided = replace(decided, schedule="\n".join(best.rows), virtual=None)
    else:
        decided = replace(decided, schedule=best.schedule)
    if shapes or last is not None:
        step = captured_step(model, loss, batch, decided, shapes, last, say)
    else:
        step = replace(step, options=decided)
    split = decided.splits_backward
    return ChosenSchedule(
        step,
        {ratios: ranking.best.partition},
        found.costs_of_apart if split else found.costs_of_whole,
        (*ranking.rows, *refused),
    )


def counts_of(options: CompileOptions, batches: Sequence[Any]) -> tuple[int, ...]:
    """The numbers of microbatches to try: the one that is asked, or some that divide all of these minibatches."""
    if options.microbatches is not None:
        return (options.microbatches,)
    try:
        dims = None if options.microbatch_dims is None else options.dims(batches[0])
        samples = math.gcd(*(samples_of(batch, dims, options.constant_batch) for batch in batches)) // options.dp
    except BatchError:
        return (1,)
    return microbatch_counts(options.workers, max(1, samples), question(options).schedules)


def for_count(options: CompileOptions, count: int) -> CompileOptions:
    """The options to capture and cost a step with so many microbatches, for whichever schedule."""
    return replace(options, schedule=_CAPTURED_FOR, policy=None, microbatches=count)


def question(options: CompileOptions, momentum: bool = False) -> Question:
    """What is searched, as the options ask it."""
    flush = options.synchronous or options.autocast == FLOAT16  # whose loss is scaled, see `check_loss_scaling`
    modes = () if options.cuts == "auto" or not options.planned else (str(options.cuts),)
    return Question(options.workers, schedules_of(flush), options.policy, momentum, modes, options.virtual)


def sized(
    options: CompileOptions,
    device: str,
    optimizer: OptimizerCosts,
    profiles: tuple[Profile, Profile],
    samples: int | None,
    fixed: Cuts | None,
    ratios: Ratios,
) -> Sized:
    """One number of microbatches, as the search takes it.

    Args:
        options: with that number.
        profiles: with W in B, and with W apart.
    """
    setting = replace(for_count(options, options.own_count).setting(device, optimizer), ratios=ratios)
    return Sized(setting, *profiles, samples=samples, fixed=fixed)


def refusal(count: int, error: FxpipeError) -> ScheduleForecast:
    """The row of a number of microbatches that no schedule can have."""
    return ScheduleForecast("", "", count, why=error.what)


def counted(count: int) -> str:
    """`1 microbatch`, `4 microbatches`."""
    return f"{count} microbatch{'' if count == 1 else 'es'}"


def _costed(options: CompileOptions, bare: Bare) -> CompileOptions:
    return replace(options, optimizer=of_parameters(options.optimizer, bare))


def _fixed(options: CompileOptions, found: StepProfile) -> Cuts | None:
    """The cuts, where they are given."""
    if options.planned:
        return None
    return choose_cuts(found.program, found.whole, options, options.setting(found.program.device)).cuts
