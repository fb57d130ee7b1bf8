"""Captures microbatches along the right dimensions, and compares them with the whole batch before anything is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fxpipe.builds.build import Build
from fxpipe.errors import BatchError, CaptureError, FxpipeError, RunError
from fxpipe.ir.program import Buffer, Parameter, Program, value
from fxpipe.ir.transform import run_passes
from fxpipe.lowering.agreement import Agreement, Step, agreement_of, metric_errors
from fxpipe.lowering.compare_with_eager import BothSteps
from fxpipe.lowering.evaluation import with_totals
from fxpipe.lowering.lowering import Lowering
from fxpipe.lowering.make_plan import make_plan
from fxpipe.lowering.option_rules import setting_of
from fxpipe.lowering.options import CompileOptions
from fxpipe.lowering.own_rounding import rounding_text
from fxpipe.lowering.steady_randomness import SteadyRandomness
from fxpipe.lowering.step_costs import has_no_values
from fxpipe.lowering.where_samples_meet import where_samples_meet
from fxpipe.passes.analysis.microbatches import microbatches_of
from fxpipe.passes.analysis.share import Share
from fxpipe.passes.cost import Cost
from fxpipe.passes.fold import Fold
from fxpipe.passes.next_to import NextTo
from fxpipe.passes.whole_loss import UNPROVED, WholeLoss
from fxpipe.planner.cuts import Cuts
from fxpipe.stages.compare import AMPLIFIED, EXACT, FLOOR_OF_SUMS, relative_error, tolerance
from fxpipe.task.batch import Batch, Dims, said
from fxpipe.task.hooks import Loss
from fxpipe.tracing.capture import OF_HOOKS, capture
from fxpipe.tracing.origin import version_hint

UNLIKE = 1e-3
"""The largest relative difference of two metrics that is not worth a warning."""


@dataclass
class WholeStep:
    """The step on the whole batch, or why there is none: captured once for all numbers of microbatches."""

    found: Program | str | None = None


def capture_microbatch(
    model: nn.Module, loss: Loss, batch: Batch, options: CompileOptions, whole: WholeStep | None = None
) -> Program:
    """Capture the step on the first microbatch; leaves are cut where the graph says that samples are.

    Args:
        batch: one whole minibatch.
        whole: of the same batch, captured with another number of microbatches, or empty.

    Raises:
        BatchError: the batch cannot be cut.
        CaptureError: as `capture`.
    """
    whole = whole or WholeStep()
    if options.count == 1:
        program = capture(model, loss, batch, autocast=options.autocast, params=options.params, hooks=options.hooks)
        whole.found = program
        return replace(program, warnings=tuple(w for w in program.warnings if not w.startswith(OF_HOOKS)))
    ways = _ways(batch) if options.microbatch_dims is None else [options.cut(batch).dims]
    first: Program | None = None
    best: Program | None = None
    failed: FxpipeError | None = None
    for dims in ways:
        try:
            if first is not None and not _is_proved(first, dims):
                continue
            program = _captured(model, loss, batch, options, dims)
            first = first or program
            if whole.found is None or options.outer is not None:
                whole.found = _captured_whole(model, loss, _whole_batch(replace(batch, cut=dims), options), options)
            program = replace(program, whole=whole.found)
            if _is_proved(program, dims):
                return program
            best = best or program
        except FxpipeError as error:
            failed = failed or error
    if best is not None:
        return best
    assert failed is not None
    if isinstance(failed, CaptureError) and failed.page in ("python-state", "randomness"):
        raise failed  # only with microbatches are later calls examined
    if isinstance(failed, CaptureError) and not isinstance(_captured_whole(model, loss, batch, options), str):
        raise CaptureError(
            f"the step can be captured on the whole batch, but not on one of its microbatches: {failed.what}",
            where=failed.where,
            hint="use --microbatches 1; or find the tensor or number of the model that has the size of the whole batch",
            page=failed.page,
        )
    raise failed


def _whole_batch(batch: Batch, options: CompileOptions) -> Batch:
    """The batch of a minibatch's loss: with independent replicas, the share of the first one."""
    return batch if options.outer is None else batch.share(options.count, options.dp)


def _captured_whole(model: nn.Module, loss: Loss, batch: Batch, options: CompileOptions) -> Program | str:
    """The step on the whole batch, or why there is none."""
    try:
        return capture(
            model,
            loss,
            replace(batch, cut=None),
            autocast=options.autocast,
            params=options.params,
            state_notes=False,
            hooks=options.hooks,
        )
    except FxpipeError as error:
        return f"the step on the whole batch is refused: {error.what}"


def _captured(model: nn.Module, loss: Loss, batch: Batch, options: CompileOptions, dims: Dims) -> Program:
    batch = replace(batch, cut=dims)
    batch.check_sizes()
    parts = batch.split(options.count)
    _check_constants(parts)
    return capture(model, loss, parts[0], autocast=options.autocast, params=options.params, hooks=options.hooks)


def _check_constants(parts: Sequence[Batch]) -> None:
    """Refuse microbatches whose constants differ: they share one program."""
    if not parts[0].constants:
        return
    first, *others = [[leaf for leaf in part.leaves if not leaf.tensor] for part in parts]
    for other in others:
        for expected, found in zip(first, other, strict=True):
            if repr(found.constant) != repr(expected.constant):
                raise BatchError(
                    f"{found.name} is a constant of the capture, and differs between microbatches: "
                    f"{said(expected.constant)} and {said(found.constant)}",
                    hint="use --microbatches 1, or batches of samples that have the same",
                )


def _is_proved(program: Program, dims: Dims) -> bool:
    folded = run_passes(program, [NextTo(), Fold()], dumped_as="cut_")
    return microbatches_of(folded, dims).loss in (Share.MEAN, Share.SUM)


def _ways(batch: Batch) -> list[Dims]:
    """Where samples may be, likeliest first: dimension 0 of all leaves, or of all but one; 1; or a given size."""
    tensors = {name: tuple(tensor.shape) for name, tensor in batch.tensors.items() if tensor.dim()}
    uncut: Dims = dict.fromkeys(batch.names)
    found: list[Dims] = [{**uncut, **dict.fromkeys(tensors, 0)}]
    if len(tensors) > 1:
        found += [{**found[0], name: None} for name in tensors]
    found.append({**uncut, **{name: min(1, len(shape) - 1) for name, shape in tensors.items()}})
    for size in dict.fromkeys(n for shape in tensors.values() for n in shape):
        found.append({**uncut, **{n: shape.index(size) for n, shape in tensors.items() if size in shape}})
    return [dims for i, dims in enumerate(found) if dims not in found[:i]]


def checked_loss(
    program: Program, model: nn.Module, loss: Loss, batch: Batch, options: CompileOptions
) -> tuple[Program, WholeLoss | None]:
    """The pass that makes the microbatches' losses the whole batch's, tried on the batch; None for one microbatch.

    The program gets a warning where a difference from eager PyTorch is float32's own rounding.

    Eager PyTorch steps on the whole batch, the program on every microbatch. In both, random numbers are the same for
    every sample, and batch norm sees one microbatch at a time. Without values of the parameters (`--meta`) nothing is
    compared.

    Raises:
        BatchError: loss or gradients differ beyond rounding, and the options do not accept it.
        CaptureError: the same with one microbatch.
    """
    whole_loss = options.whole_loss()
    if has_no_values(program):
        return program, whole_loss
    batch = _whole_batch(batch.cut_as(b.leaf for b in program.batch), options)
    build = _for_one_worker(program, options.own_count * options.joint, whole_loss)
    steps = BothSteps(build, batch, model, loss, loss_weight=options.loss_weight)
    with SteadyRandomness() as steady:
        eager = steps.eager(whole=True)
        try:
            emitted = steps.emitted()
        except RunError as error:
            raise _fails(error, steps) from error
    limit = tolerance((v.dtype for n in program if isinstance(v := value(n), Tensor)), program.autocast)
    if whole_loss is not None and not steady.unknown:
        whole_loss = replace(whole_loss, unlike=_unlike(emitted, eager, max(UNLIKE, limit)))
    if agreement_of(emitted, eager, FLOOR_OF_SUMS).largest <= limit:
        return program, _checked(whole_loss, steps)
    if steady.unknown or build.plan.step.differs_from_whole:
        return program, whole_loss  # there is nothing to compare with
    if _is_rough(program, build, limit) and _same(emitted.loss, eager.loss, max(AMPLIFIED, limit)):
        return program, _checked(whole_loss, steps)
    with steady:
        agreement = steps.agreement(emitted, eager, FLOOR_OF_SUMS, limit, whole=True)
    if agreement.largest <= limit:
        program = replace(program, warnings=(*program.warnings, rounding_text(agreement)))
        return program, _checked(whole_loss, steps)
    if whole_loss is not None and options.accept_microbatch_loss:
        return program, replace(whole_loss, accepted=True)
    numbers = _numbers(steps, emitted, eager, agreement)
    raise _unseen(numbers) if whole_loss is None else _differs(numbers, _why(program, steps, limit, options))


def _for_one_worker(program: Program, microbatches: int, whole_loss: WholeLoss | None) -> Build:
    """The build of a captured step for one worker; its tensors are the program's. Any other cuts compute the same."""
    options = CompileOptions(workers=1, schedule="gpipe", microbatches=microbatches)
    step = Lowering(program, options, dumped_as="compared_").front(whole_loss).through([Cost()])
    units = (0, len(step.program.units))
    program = step.wired(Cuts(units, units)).emitted().program
    held: tuple[Parameter | Buffer, ...] = (*program.parameters, *program.buffers)
    build = Build(
        plan=make_plan(program, setting_of(options, program.device)),
        files=program.files,
        tensors={row.names[0]: program.values[row.node].detach() for row in held},
        warnings=program.warnings,
    )
    return build if program.totals is None else with_totals(build, program.totals, options)


def _is_rough(program: Program, build: Build, limit: float) -> bool:
    """Whether a step amplifies rounding so much that only its loss can be compared, if what it computes is proved."""
    if build.plan.microbatches == 1:
        return limit > EXACT or bool(microbatches_of(run_passes(program, [Fold()])).batch_norms)
    return bool(build.plan.loss.batch_norm) and (build.plan.loss.weighted or not _unproved(build))


def _unlike(found: Step, eager: Step, limit: float) -> tuple[str, ...]:
    """A sentence for each metric that differs between the microbatches and the whole batch."""
    return tuple(
        f"the metric {name!r} is a mean over microbatches: {found.metrics[0][name]:.4g} on the first batch; "
        f"eager PyTorch computes {eager.metrics[0][name]:.4g} on the whole batch"
        for name, error in metric_errors(found, eager.metrics).items()
        if error > limit
    )


def _fails(error: RunError, steps: BothSteps) -> BatchError | CaptureError:
    """The error for stages that fail although eager PyTorch has computed the whole batch."""
    count = steps.build.plan.microbatches
    if count > 1:
        try:
            steps.eager()
        except CaptureError as eager:
            return BatchError(
                f"eager PyTorch computes the step on the whole batch, but not on its {count} microbatches: "
                + eager.what.splitlines()[0],
                where=eager.where,
                hint="use --microbatches 1, or say with microbatch_dims which leaves are cut and where; a leaf with "
                "indices of samples refers to the whole batch",
                page="microbatches",
            )
    cause = error.__cause__ or error
    return CaptureError(
        "eager PyTorch computes this step, but the program that was traced from it fails: "
        f"{type(cause).__name__}: {str(cause).splitlines()[0]}",
        hint="fxpipe cannot compile this step yet: torch traces an operator of it differently from how it runs it ("
        + version_hint()
        + ")",
    )


def _checked(whole_loss: WholeLoss | None, steps: BothSteps) -> WholeLoss | None:
    """The pass after the comparison, `checked` if these microbatches differ enough to find wrong weights: without the
    hook, results must differ."""
    weights = torch.tensor(steps.weights() or [0.0, 1.0])
    return whole_loss and replace(whole_loss, checked=not _same(weights.min(), weights.max()))


def _unproved(build: Build) -> list[str]:
    """Why it is not proved that the microbatches give the whole batch's loss; empty if it is."""
    return [w.partition(": ")[2] for w in build.warnings if w.startswith(UNPROVED)]


def _same(found: Tensor, expected: Tensor, far: float = EXACT) -> bool:
    return relative_error(found, expected, EXACT**2) <= far


def _numbers(steps: BothSteps, found: Step, eager: Step, agreement: Agreement) -> str:
    """How far two steps differ: by their losses, or if these are equal, by a gradient."""
    count = steps.build.plan.microbatches
    losses = f"the loss of the whole batch is {eager.loss:.6g}, of its {count} microbatches {found.loss:.6g}"
    if count == 1:
        losses = f"its loss is {found.loss:.6g}, eager PyTorch's {eager.loss:.6g}"
    name, error = agreement.worst_gradient
    is_gradient = _same(found.loss, eager.loss)
    return f"{losses}, and the gradient of {name} differs by {error:.1e}" if is_gradient else losses


def _unseen(numbers: str) -> CaptureError:
    """The error that says how far the stages are from the eager step that was captured."""
    return CaptureError(
        f"the captured step computes something different from eager PyTorch on the same batch: {numbers}",
        hint="capture does not see what changes the step: a value from outside the model and the batch (a file, "
        "the clock, a counter); or torch traces an operator differently from how it runs it",
    )


def _why(program: Program, steps: BothSteps, limit: float, options: CompileOptions) -> list[str]:
    """Why the microbatches' loss is not the whole batch's; up to `limit` is rounding."""
    plan, batch = steps.build.plan, steps.batch
    if plan.loss.weighted:
        return ["each microbatch's loss is weighted by loss_weight(batch)"]
    known = _unproved(steps.build)
    with SteadyRandomness():
        if (
            not known
            or plan.loss.batch_norm
            or isinstance(whole := _captured_whole(steps.model, steps.loss, batch, options), str)
        ):
            return known
        call = where_samples_meet(program, whole, batch.split(plan.microbatches), batch, limit)
    return known if call is None else [call]


def _differs(numbers: str, why: Sequence[str]) -> BatchError:
    """The error that says how far the microbatches' loss is from the whole batch's, why, and what cures it."""
    return BatchError(
        "; ".join([numbers, *why]),
        hint="use --microbatches 1. If something is computed over all samples together (a router's balance), compute "
        "it for each sample and take the mean; if the loss is a mean over different numbers in each microbatch, "
        "weight them with the hook loss_weight(batch); if samples are along other dimensions, set microbatch_dims in "
        "the model file; if the difference is intended, use --accept-microbatch-loss",
        page="microbatches",
    )
