"""Which schedule, with how many microbatches and which cuts: what `schedule="auto"` takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fxpipe.costs.yardstick import Yardstick
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
from fxpipe.search import Counts, Question, Sized, counted, microbatch_counts, schedules_of, search
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
    captured = _Captured(model, loss, batch, options, bare, say)
    counts = counts_of(options, [batch, *shapes, *([] if last is None else [last])])
    sizes = [found for found in map(captured.sized, counts.first) if found is not None]
    if not sizes and options.microbatches is None and 1 not in counts.first:
        counts = Counts((1,))
        sizes = [found for found in [captured.sized(1)] if found is not None]
    if not sizes:
        raise captured.failures[-1]

    def larger(count: int) -> Sized | None:
        more = None if captured.batch_norm else counts.after(count)
        return None if more is None else captured.sized(more)

    momentum = next(iter(captured.steps.values()))[1].costs_of_whole.optimizer.momentum
    ranking = search(sizes, question(options, momentum), say, larger)
    best = ranking.best.setting
    step, found = captured.steps[best.microbatches]
    decided = options if options.microbatches is not None else options.of_microbatches(best.microbatches)
    decided = replace(decided, schedule=best.schedule)
    if shapes or last is not None:
        step = captured_step(model, loss, batch, decided, shapes, last, say)
    else:
        step = replace(step, options=decided)
    split = decided.splits_backward
    return ChosenSchedule(
        step,
        {captured.ratios: ranking.best.partition},
        found.costs_of_apart if split else found.costs_of_whole,
        (*ranking.rows, *captured.refused),
    )


class _Captured:
    """The steps with the numbers of microbatches that were tried, captured and costed.

    Attributes:
        steps: by number, the step and what it costs.
        refused: a row for each number that cannot be captured.
        failures: why they cannot, in the same order.
        ratios: what travels for each byte of values.
    """

    def __init__(self, model: nn.Module, loss: Loss, batch: Any, options: CompileOptions, bare: Bare, say: Say) -> None:
        self._step, self._options, self._bare, self._say = (model, loss, batch), options, bare, say
        self._yardstick = Yardstick()
        self.steps: dict[int, tuple[CapturedStep, StepProfile]] = {}
        self.refused: list[ScheduleForecast] = []
        self.failures: list[FxpipeError] = []
        self.ratios = ratios_of(PLAIN if options.encoding.auto else options.encoding)

    @property
    def batch_norm(self) -> bool:
        """Whether batch norms see microbatches: their number then changes what is trained."""
        return any(found.program.batch_norm for _, found in self.steps.values())

    def sized(self, count: int) -> Sized | None:
        """With so many microbatches, as the search takes it; None: it cannot be captured so.

        Raises:
            FxpipeError: the step fails.
        """

        def told(text: str) -> None:
            self._say(f"{counted(count)}: {text}")

        told("capturing")
        try:
            step = captured_step(*self._step, for_count(self._options, count), say=told)
        except (BatchError, CaptureError) as error:
            self.refused.append(refusal(count, error))
            self.failures.append(error)
            return None
        options = step.options
        costed = replace(options, optimizer=of_parameters(options.optimizer, self._bare))
        found = profile_step(step, costed, say=told, yardstick=self._yardstick)
        self.steps[count] = step, found
        optimizer, profiles = found.costs_of_whole.optimizer, (found.whole, found.apart)
        device, samples, fixed = step.program.device, samples_of_step(step), _fixed(options, found)
        return sized(options, device, optimizer, profiles, samples, fixed, self.ratios)


def counts_of(options: CompileOptions, batches: Sequence[Any]) -> Counts:
    """The numbers of microbatches to try: the one that is asked, or such as divide all of these minibatches."""
    if options.microbatches is not None:
        return Counts((options.microbatches,))
    try:
        samples = math.gcd(*map(options.samples, batches)) // options.dp
    except BatchError:
        return Counts((1,))
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


def _fixed(options: CompileOptions, found: StepProfile) -> Cuts | None:
    """The cuts, where they are given."""
    if options.planned:
        return None
    return choose_cuts(found.program, found.whole, options, options.setting(found.program.device)).cuts
