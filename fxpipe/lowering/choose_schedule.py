"""Chooses schedule, number of microbatches and cuts for `schedule="auto"`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import nn

from fxpipe.errors import BatchError, FxpipeError, ScheduleError
from fxpipe.lowering.captured_step import CapturedStep, captured_step, compared, uncompared_step
from fxpipe.lowering.choose_codecs import PLAIN, ratios_of
from fxpipe.lowering.choose_cuts import choose_cuts
from fxpipe.lowering.minibatch_loss import WholeStep
from fxpipe.lowering.model_profile import StepProfile, profile_model
from fxpipe.lowering.option_rules import setting_of
from fxpipe.lowering.options import AUTO, CompileOptions
from fxpipe.lowering.step_costs import SharedCosts, StepCosts
from fxpipe.plan.cost_records import ScheduleForecast
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.partition import Partition
from fxpipe.planner.profile import PlanInput
from fxpipe.planner.setting import Setting
from fxpipe.planner.workers import Ratios
from fxpipe.schedule.base import FLOAT16
from fxpipe.search import Counts, Question, Ranking, Sized, counted, microbatch_counts, schedules_of, search
from fxpipe.task.batch import Batch
from fxpipe.task.hooks import Loss

Say = Callable[[str], None]

_CAPTURED_FOR = "1f1b"
"""A step is the same for every schedule; this one has no defaults of its own."""


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
    counts = counts_of(options, [batch, *shapes, *([] if last is None else [last])])
    comparison = _OfModel(options, counts, say, model=model, loss=loss, batch=batch, shapes=shapes, last=last)
    ranking = comparison.ranking(otherwise=() if options.microbatches is not None else (1,))
    taken, setting = comparison.profiles[ranking.best.setting.microbatches], ranking.best.setting
    costs = taken.costs_of_apart if taken.step.options.splits_backward else taken.costs_of_whole
    return ChosenSchedule(taken.step, {setting.ratios: ranking.partitions}, costs, ranking.rows)


@dataclass
class Comparison:
    """Plans and simulates every schedule, or the named one, with several numbers of microbatches.

    Attributes:
        counts: the numbers to try.
        modes: the kinds of cuts; if empty, all that a schedule can use; None: as the options say.
    """

    options: CompileOptions
    counts: Counts
    say: Say
    modes: Sequence[str] | None = None
    _inputs: dict[int, PlanInput] = field(default_factory=dict)
    _usable: dict[int, Sized] = field(default_factory=dict)
    _errors: dict[int, FxpipeError] = field(default_factory=dict)

    def read(self, count: int, say: Say) -> PlanInput:
        """Capture and cost the step with a number of microbatches."""
        raise NotImplementedError

    def fixed(self, count: int) -> Cuts | None:
        """The cuts, if they are given."""
        return None

    def take(self, best: Setting, say: Say) -> None:
        """Is called with the best; where it raises, the search goes on without that number of microbatches."""

    def ranking(self, otherwise: Sequence[int] = ()) -> Ranking:
        """What was compared, with the numbers of microbatches that no schedule can use as the last rows.

        Args:
            otherwise: the numbers to try if no other can be captured.

        Raises:
            CutError: nothing fits into memory; the error says what would.
            FxpipeError: as `read` or `take`, where no number of microbatches can be used.
        """
        for counts in (self.counts.first, tuple(count for count in otherwise if count not in self.counts.first)):
            for count in counts:
                self._sized(count)
            while self._usable:
                ranking = search(list(self._usable.values()), self._question(), self.say, self._larger)
                best = ranking.best.setting
                try:
                    self.take(best, self._of(best.microbatches))
                except FxpipeError as error:
                    self._errors[best.microbatches] = error
                    del self._usable[best.microbatches]
                    continue
                refused = [ScheduleForecast("", "", count, why=error.what) for count, error in self._errors.items()]
                return replace(ranking, rows=(*ranking.rows, *refused))
        raise [*self._errors.values()][-1 if otherwise else 0]

    def _sized(self, count: int) -> Sized | None:
        """With this number of microbatches; None if it cannot be captured."""
        try:
            read = self._inputs[count] = self.read(count, self._of(count))
        except FxpipeError as error:
            self._errors[count] = error
            return None
        ratios = ratios_of(PLAIN if self.options.encoding.auto else self.options.encoding)
        setting = replace(setting_of(for_count(self.options, count), read.device, read.optimizer), ratios=ratios)
        self._usable[count] = Sized(setting, read.whole, read.separate, read.samples, self.fixed(count))
        return self._usable[count]

    def _larger(self, count: int) -> Sized | None:
        """With more microbatches, if batch norms do not change what is trained with them."""
        more = None if any(read.batch_norm for read in self._inputs.values()) else self.counts.after(count)
        return None if more is None or more in {*self._inputs, *self._errors} else self._sized(more)

    def _question(self) -> Question:
        first = next(iter(self._inputs.values()))
        asked = question(self.options, first.optimizer.momentum)
        if self.modes is not None:
            asked = replace(asked, modes=tuple(self.modes))
        return asked if self.options.schedule == AUTO else replace(asked, schedules=(self.options.schedule,))

    def _of(self, count: int) -> Say:
        return lambda text: self.say(f"{counted(count)}: {text}")


@dataclass(kw_only=True)
class _OfModel(Comparison):
    """A comparison for a model that is compiled: what was taken is captured again with its schedule.

    Attributes:
        profiles: of the step, by the number of microbatches.
    """

    model: nn.Module
    loss: Loss
    batch: Batch
    shapes: Sequence[Batch]
    last: Batch | None
    profiles: dict[int, StepProfile] = field(default_factory=dict)
    _costs: SharedCosts = field(default_factory=SharedCosts)
    _whole: WholeStep = field(default_factory=WholeStep)

    def read(self, count: int, say: Say) -> PlanInput:
        capture = partial(uncompared_step, whole=self._whole)
        of_step = self.model, self.loss, self.batch, for_count(self.options, count)
        self.profiles[count] = profile_model(*of_step, capture=capture, say=say, shared=self._costs)
        return self.profiles[count].input

    def fixed(self, count: int) -> Cuts | None:
        profile, options = self.profiles[count], self.profiles[count].step.options
        if options.planned:
            return None
        setting = setting_of(options, profile.program.device)
        return choose_cuts(profile.program, profile.input.whole, options, setting).cuts

    def take(self, best: Setting, say: Say) -> None:
        model, loss, batch, options = self.model, self.loss, self.batch, self.options
        decided = options if options.microbatches is not None else options.of_microbatches(best.microbatches)
        decided = replace(decided, schedule=best.schedule)
        profile = self.profiles[best.microbatches]
        say("comparing with eager PyTorch")
        if self.shapes or self.last is not None:
            step = captured_step(model, loss, batch, decided, self.shapes, self.last, say)
        else:
            step = compared(replace(profile.step, options=decided), model, loss, batch.padded(decided.padding([batch])))
        self.profiles[best.microbatches] = replace(profile, step=step)


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
