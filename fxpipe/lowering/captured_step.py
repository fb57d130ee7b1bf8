"""The step as the options ask for it: captured on one microbatch, and compared with eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from fxpipe.errors import BatchError, CaptureError, FxpipeError
from fxpipe.ir.program import Program
from fxpipe.lowering.first_of_each import first_of_each, fits
from fxpipe.lowering.minibatch_loss import WholeStep, capture_microbatch, checked_loss
from fxpipe.lowering.option_rules import check
from fxpipe.lowering.options import CompileOptions
from fxpipe.lowering.shapes import CapturedShape, capture_shape, constants_of, further_shapes, left_out, refuse_changing
from fxpipe.passes.whole_loss import WholeLoss
from fxpipe.policy.accuracy_warnings import lost_by
from fxpipe.policy.spectrain import SpecTrain
from fxpipe.schedule.base import Schedule, divisors
from fxpipe.schedule.versions import most_missed
from fxpipe.task.batch import Batch
from fxpipe.task.hooks import Loss


@dataclass(frozen=True)
class CapturedStep:
    """A step, captured, with the options that were decided on the way.

    Attributes:
        program: of one microbatch.
        whole_loss: the pass that makes the microbatches' losses the whole batch's; None for one microbatch.
        shapes: the captured steps of minibatches of other shapes.
        options: as asked, with the number of microbatches.
        few: why there are fewer microbatches than suit the schedule; None if there are as many.
    """

    program: Program
    whole_loss: WholeLoss | None
    shapes: tuple[CapturedShape, ...]
    options: CompileOptions
    few: IdleTime | LateWeights | None = None


@dataclass(frozen=True)
class IdleTime:
    """With a flush, the last, smaller batch of an epoch allows fewer microbatches than is usual."""

    count: int
    usual: int
    last: Batch | None

    def warning(self, schedule: Schedule) -> str:
        """What that costs with the schedule that the build has.

        Of workers that are equally fast, each is idle for (N−1)/(M+N−1) of the time with M microbatches (Huang et al.
        2019, GPipe, section 2.3).
        """
        others = min(max(schedule.depths), schedule.ranks - 1)
        idle, less = (others / (count + others) for count in (self.count, self.usual))
        return (
            f"{_pieces(self.count)}, which leaves workers idle about {idle:.0%} of the time; {self.usual} microbatches "
            f"would leave {less:.0%}, but do not divide the last, smaller batch of an epoch ({self.last}); "
            f"drop_last=True in the DataLoader gives {self.usual}, or choose a batch size that leaves no such rest"
        )


@dataclass(frozen=True)
class LateWeights:
    """Without a flush, `why` there are few microbatches, and what can be done about it."""

    options: CompileOptions
    why: str
    cure: str

    def warning(self, schedule: Schedule) -> str:
        """How late weights are with the schedule that the build has, and what that costs where it was studied; '' if
        forwards miss one update at most."""
        late = most_missed(schedule)
        cost = lost_by(self.options.policy or SpecTrain.name, late)
        what = f"{_pieces(self.options.count)}, so that forwards miss up to {late} updates"
        return "; ".join([what, self.why, *([cost] if cost else []), self.cure]) if late > 1 else ""


def _pieces(count: int) -> str:
    return "the batch stays whole" if count == 1 else f"the batch is cut into {count} microbatches"


def captured_step(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    options: CompileOptions,
    shapes: Iterable[Batch] = (),
    last: Batch | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> CapturedStep:
    """Capture the step, and choose the number of microbatches if none is given.

    Without a flush a schedule also works with one microbatch, only with staler weights. So it gets one where the batch
    cannot be cut into the number that suits the schedule, or where microbatches would change the loss; likewise fewer
    where the batch, or the last one of an epoch, is too small. A warning says why and what it costs.

    Args:
        batch: one whole minibatch.
        shapes: more minibatches: if their shape or constants differ, they are captured, too.
        last: a smaller minibatch, such as the last of an epoch. The number of microbatches that is chosen divides it,
            too; where its step cannot be captured, a warning says so.
        say: is called with the part of the work that begins.
    """
    step = _chosen(model, loss, batch, options, shapes, last, say)
    known = [step.program, *(shape.program for shape in step.shapes)]
    if last is None or any(fits(program, last, step.options.count) for program in known):
        return step
    return _with_last(step, model, loss, batch, last)


def _chosen(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    options: CompileOptions,
    shapes: Iterable[Batch],
    last: Batch | None,
    say: Callable[[str], None],
) -> CapturedStep:
    """With the number of microbatches chosen."""
    others = list(first_of_each([batch, *shapes]))[1:]
    if options.microbatches is not None or options.kind.synchronous:
        chosen, without = _decided(options, [batch, *others], last)
        step = _captured(model, loss, batch, others, chosen, say)
        few = IdleTime(chosen.count, without.count, last)
        return step if chosen.count >= without.count else replace(step, few=few)
    decided = None
    try:
        decided, without = _decided(options, [batch, *others], last)
        step = _captured(model, loss, batch, others, decided, say)
    except (BatchError, CaptureError) as error:
        if decided is not None and decided.own_count == 1:
            raise
        step = _captured(model, loss, batch, others, options.of_microbatches(1), say)
        why = f"{'several' if decided is None else decided.count} microbatches are not possible: {error.what}"
        return replace(step, few=LateWeights(step.options, why, "--microbatches says what can be done about it"))
    if step.options.count < without.count:
        why = f"{without.count} microbatches do not divide the last, smaller batch of an epoch ({last})"
        cure = f"drop_last=True gives {without.count}"
    else:
        why = f"its samples cannot be cut into about {options.workers} equal microbatches"
        cure = f"with a batch size that is a multiple of {options.workers}, they miss 1"
    return replace(step, few=LateWeights(step.options, why, cure))


def _decided(
    options: CompileOptions, batches: Sequence[Batch], last: Batch | None
) -> tuple[CompileOptions, CompileOptions]:
    """The options with the number of microbatches, and what that would be without the last, smaller batch."""
    without = options.for_batches(batches)
    if last is None:
        return without, without
    try:
        return options.for_batches([*batches, last]), without
    except BatchError:
        return without, without


def _with_last(step: CapturedStep, model: nn.Module, loss: Loss, batch: Batch, last: Batch) -> CapturedStep:
    try:
        _check_divisible(step.program, batch, last, step.options)
    except BatchError as error:
        return _warned(step, left_out(last, error, str(error.hint)))
    try:
        shape = capture_shape(model, loss, last, step.options)
    except FxpipeError as error:
        return _warned(step, left_out(last, error))
    return replace(step, shapes=(*step.shapes, replace(shape, last=last)))


def _warned(step: CapturedStep, text: str) -> CapturedStep:
    return replace(step, program=replace(step.program, warnings=(*step.program.warnings, text)))


def _captured(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    others: Sequence[Batch],
    options: CompileOptions,
    say: Callable[[str], None],
) -> CapturedStep:
    say("capturing (1 of 4)")
    step = uncompared_step(model, loss, batch, options)
    say("comparing with eager PyTorch (2 of 4)")
    step = compared(step, model, loss, batch)
    program = step.program
    batch, *others = (replace(one, constants=constants_of(program, one)) for one in (batch, *others))
    others = further_shapes(program, options.count, others)
    refuse_changing(program, [batch, *others], options.constant_batch)
    shapes: list[CapturedShape] = []
    for number, other in enumerate(others, 1):
        if any(fits(shape.program, other, options.count) for shape in shapes):
            continue
        say(f"capturing the step of shape {number} of {len(others)}")
        try:
            _check_divisible(program, batch, other, options)
            shapes.append(capture_shape(model, loss, other, options))
        except FxpipeError as error:
            what = f"{error.what} (for batches like this one, after those of the first shape: {other})"
            raise type(error)(what, where=error.where, hint=error.hint, page=error.page) from error
    return replace(step, shapes=tuple(shapes))


def uncompared_step(
    model: nn.Module, loss: Loss, batch: Batch, options: CompileOptions, whole: WholeStep | None = None
) -> CapturedStep:
    """The step of one shape, with the number of microbatches of the options, before `compared`.

    Args:
        whole: as for `capture_microbatch`.
    """
    check(options)
    _check_shares(batch, options)
    return CapturedStep(capture_microbatch(model, loss, batch, options, whole), options.whole_loss(), (), options)


def compared(step: CapturedStep, model: nn.Module, loss: Loss, batch: Batch) -> CapturedStep:
    """The step, after a comparison with eager PyTorch."""
    program, whole_loss = checked_loss(step.program, model, loss, batch, step.options)
    return replace(step, program=program, whole_loss=whole_loss)


def _check_shares(batch: Batch, options: CompileOptions) -> None:
    """Refuse a minibatch that the replicas cannot share."""
    if options.dp == 1:
        return
    try:
        size = options.cut(batch).samples
    except BatchError:
        return  # the step may not read leaves of other sizes; else capture refuses
    if size % options.count == 0:
        return
    own = options.own_count
    each = "" if own == 1 else f" of {own} microbatches each"
    fit = [str(number) for number in divisors(size // own)] if size % own == 0 else []
    raise BatchError(
        f"a batch of {size} cannot be shared by {options.dp} replicas{each}",
        hint=(f"choose --dp from {', '.join(fit[:12])}, or " if fit else "choose ")
        + f"a batch size that {options.count} divides (--dp times --microbatches)",
    )


def _check_divisible(program: Program, first: Batch, other: Batch, options: CompileOptions) -> None:
    """Refuse a batch that cannot be cut into microbatches along the same dimensions as the first."""
    dims = {b.leaf.name: b.leaf.dim for b in program.batch}
    if options.count > 1 and any(dim is not None for dim in dims.values()):
        other.check_divisible(options.count, dims, replace(first, cut=dims).samples)
