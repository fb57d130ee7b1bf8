"""Captures microbatches along the right dimensions, and compares them with the whole batch before anything is cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import BatchError, CaptureError, FxpipeError
from fxpipe.ir.program import Program, value
from fxpipe.lowering.agreement import Agreement, Step, compare, metric_errors
from fxpipe.lowering.compare_with_eager import SumOfMicrobatches, run_eagerly
from fxpipe.lowering.options import CompileOptions
from fxpipe.lowering.own_rounding import Exact, in_float64, rounding_text, without_rounding
from fxpipe.lowering.separate_batch_norm import SeparateBatchNorm
from fxpipe.lowering.steady_randomness import SteadyRandomness
from fxpipe.lowering.step_costs import has_no_values
from fxpipe.lowering.where_samples_meet import where_samples_meet
from fxpipe.passes import front_passes
from fxpipe.passes.analysis.microbatches import microbatches_of
from fxpipe.passes.analysis.share import Share
from fxpipe.passes.analysis.whole_call import next_to
from fxpipe.passes.fold import Fold
from fxpipe.passes.keep_layouts import KeepLayouts
from fxpipe.passes.whole_loss import UNPROVED, WholeLoss
from fxpipe.plan.spec import LOSS_SCALE, LOSS_WEIGHT
from fxpipe.stages.compare import EXACT, FLOOR_OF_SUMS, tolerance
from fxpipe.stages.minibatch import TRIED_SCALE, totals_of, weights_of
from fxpipe.task.batch import Batch, Dims, as_scalar, said
from fxpipe.task.hooks import Loss
from fxpipe.tracing.capture import OF_HOOKS, autocasting, capture

SMALL = 1e-5
"""The largest difference of two losses, relative to the larger, that counts as rounding."""

UNLIKE = 1e-3
"""The same for two metrics."""

GROWN = 1e-2
"""The same through batch norms, which amplify the last bits of values that are nearly equal."""


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
        options: how many microbatches, and where leaves are cut, if given.
        whole: of the same batch, captured with another number of microbatches, or empty.

    Raises:
        BatchError: the batch cannot be cut.
        CaptureError: as `capture`.
    """
    whole = whole or WholeStep()
    if options.count == 1:
        program = capture(model, loss, batch, autocast=options.autocast, params=options.params)
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
            program = next_to(program, whole.found)
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
            model, loss, replace(batch, cut=None), autocast=options.autocast, params=options.params, state_notes=False
        )
    except FxpipeError as error:
        return f"the step on the whole batch is refused: {error.what}"


def _captured(model: nn.Module, loss: Loss, batch: Batch, options: CompileOptions, dims: Dims) -> Program:
    batch = replace(batch, cut=dims)
    batch.check_sizes()
    parts = batch.split(options.count)
    _check_constants(parts)
    return capture(model, loss, parts[0], autocast=options.autocast, params=options.params)


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
    return microbatches_of(Fold()(program), dims).loss in (Share.MEAN, Share.SUM)


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

    Args:
        program: the captured one.

    Raises:
        BatchError: loss or gradients differ beyond rounding, and the options do not accept it.
        CaptureError: the same with one microbatch.
    """
    tried = options.whole_loss()
    if has_no_values(program):
        return program, tried
    batch = _whole_batch(batch.cut_as(b.leaf for b in program.batch), options)
    options = replace(options, dp=options.joint)
    parts = batch.split(options.count)
    made = _made(program, tried)
    steady = SteadyRandomness()
    with steady:
        eager = _whole(program, model, loss, batch.given, options.count)
        found = _step(made, parts, options)
    agreement, limit = compare(found, eager, FLOOR_OF_SUMS), _limit(program)
    checked = tried
    if tried is not None:
        if not steady.unknown:
            tried = replace(tried, unlike=_unlike(found, eager, max(UNLIKE, limit)))
        checked = replace(tried, checked=_count_differently(parts, program, options))
    if agreement.largest <= limit:
        return program, checked
    if steady.unknown or made.differs_from_whole:
        return program, tried
    if _is_rough(made, tried, limit) and _same(found.loss, eager.loss, max(GROWN, limit)):
        return program, checked

    def exact() -> Exact | None:
        with SteadyRandomness():
            true = in_float64(lambda m, b: _whole(program, m, loss, b, options.count), model, batch, program.params)
            return None if true is None else Exact(true)

    if program.autocast is None:
        agreement = without_rounding(agreement, found, eager, limit, FLOOR_OF_SUMS, exact)
    if agreement.largest <= limit:
        return replace(program, warnings=(*program.warnings, rounding_text(agreement))), checked
    if tried is None:
        raise _unseen(found.loss, eager, agreement)
    if options.accept_microbatch_loss:
        return program, replace(tried, accepted=True)
    with steady:
        why = _where_samples_meet(program, made, model, loss, batch, parts, limit if limit > EXACT else SMALL, options)
    raise _differs(why, found.loss, eager, agreement, options)


def _is_rough(made: Program, tried: WholeLoss | None, limit: float) -> bool:
    """Whether a step amplifies rounding so much that only its loss can be compared, if what it computes is proved."""
    if tried is None:
        return limit > EXACT or bool(microbatches_of(made).batch_norms)
    return bool(made.batch_norm) and (_is_weighed(made) or not _unproved(made))


def _unlike(found: Step, eager: Step, limit: float) -> tuple[str, ...]:
    """A sentence for each metric that differs between the microbatches and the whole batch."""
    return tuple(
        f"the metric {name!r} is a mean over microbatches: {found.metrics[0][name]:.4g} on the first batch; "
        f"eager PyTorch computes {eager.metrics[0][name]:.4g} on the whole batch"
        for name, error in metric_errors(found, eager.metrics).items()
        if error > limit
    )


def _limit(program: Program) -> float:
    """The largest relative error that counts as rounding."""
    dtypes = {str(v.dtype).removeprefix("torch.") for n in program if isinstance(v := value(n), Tensor)}
    return tolerance(dtypes, program.autocast)


def _made(program: Program, whole_loss: WholeLoss | None) -> Program:
    """The captured program in a form that can run."""
    for step in front_passes(False, whole_loss, bool(program.metrics()), program.scales_loss):
        program = step(program)
    return program


def _scale(program: Program) -> float | None:
    """The factor on the loss before backward in the comparison; None without float16."""
    return TRIED_SCALE if program.scales_loss else None


def _whole(program: Program, model: nn.Module, loss: Loss, batch: Any, microbatches: int) -> Step:
    with SeparateBatchNorm(microbatches):
        return run_eagerly(
            model,
            loss,
            [batch],
            parameters=[(p.names, p.trained) for p in program.parameters],
            context=lambda: autocasting(program.device, program.autocast),
            params=program.params,
            scale=_scale(program),
        )


def _step(program: Program, parts: Sequence[Batch], options: CompileOptions) -> Step:
    """Loss and gradients of a minibatch, from the program that `WholeLoss` made."""
    batches = [_fed(program, part) for part in parts]
    made: dict[str, list[Tensor]] = {}
    if program.totals is not None:
        made = {name: [t] * len(parts) for name, t in _added_up(program.totals, batches).items()}
    if options.loss_weight is not None:
        made[LOSS_WEIGHT] = weights_of(options.loss_weight, parts, 0, program.device)
    divisor = len(parts) if program.loss_of_microbatches == "mean" else 1
    scale = _scale(program)
    if scale is not None:
        made[LOSS_SCALE] = [torch.full((), scale / divisor, device=program.device)] * len(parts)
    more = [
        {b.node: made[b.leaf.name][j] for b in program.batch if b.node and b.leaf.name in made}
        for j in range(len(parts))
    ]
    minibatch = SumOfMicrobatches(divisor, program.loss_metrics, scale)
    names = {p.node: p.names[0] for p in program.parameters}
    values = dict(program.values)
    for batch, extra in zip(batches, more, strict=True):
        results = _run(program, values, {**batch, **extra}, len(parts))
        for output, result in zip(program.outputs, results, strict=True):
            if output.kind == "loss":
                minibatch.add_loss(result)
            elif output.kind == "buffer":
                values[output.target] = result
            else:
                minibatch.add_gradient(names[output.target], result)
    return minibatch.step({})


def _added_up(totals: Program, batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The totals of a minibatch, by leaf name."""
    adding = KeepLayouts()(Fold()(totals))
    names = [o.target for o in adding.outputs]
    nodes = {b.leaf.name: b.node for b in adding.batch if b.node and b.leaf.name in names}

    def add(batch: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return adding.run(batch={**batch, **{node: known[name] for name, node in nodes.items()}})

    return totals_of(add, batches, names, {name: adding.example[node] for name, node in nodes.items()})


def _fed(program: Program, batch: Batch) -> dict[str, Tensor]:
    """The values of a batch for a program, by placeholder."""
    given = [(i, b.node) for i, b in enumerate(program.batch) if b.node and b.leaf.name.startswith("batch")]
    return {node: _copied(batch.values[i], program.device) for i, node in given}


def _copied(leaf: Any, device: str) -> Tensor:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else as_scalar(leaf, device)


def _run(program: Program, values: Mapping[str, Tensor], batch: Mapping[str, Tensor], count: int) -> tuple[Tensor, ...]:
    try:
        return program.run(values=values, batch=batch)
    except (RuntimeError, IndexError) as error:  # eager PyTorch has computed it on the whole batch
        if count == 1:
            raise
        raise BatchError(
            f"eager PyTorch computes the step on the whole batch, but on one of its {count} microbatches it fails: "
            f"{type(error).__name__}: {str(error).splitlines()[0]}",
            hint="use --microbatches 1, or say with microbatch_dims which leaves are cut and where; a leaf with "
            "indices of samples refers to the whole batch",
            page="microbatches",
        ) from error


def _count_differently(parts: Sequence[Batch], program: Program, options: CompileOptions) -> bool:
    """Whether these microbatches differ enough to find wrong weights: without the hook, results must differ."""
    if options.loss_weight is None:
        return True
    weights = torch.stack(weights_of(options.loss_weight, parts, 0, program.device))
    return not _same(weights.min(), weights.max())


def _is_weighed(program: Program) -> bool:
    return any(b.leaf.name == LOSS_WEIGHT for b in program.batch)


def _unproved(program: Program) -> list[str]:
    """Why it is not proved that the microbatches give the whole batch's loss; empty if it is."""
    return [w.partition(": ")[2] for w in program.warnings if w.startswith(UNPROVED)]


def _same(found: Tensor, expected: Tensor, far: float = SMALL) -> bool:
    return torch.allclose(found.double(), expected.double(), rtol=far, atol=SMALL * SMALL, equal_nan=True)


def _unseen(found: Tensor, eager: Step, agreement: Agreement) -> CaptureError:
    """The error that says how far the program is from the eager step that it captured."""
    return CaptureError(
        "the captured step computes something different from eager PyTorch on the same batch: "
        + _difference(f"its loss is {found:.6g}, eager PyTorch's {eager.loss:.6g}", found, eager, agreement),
        hint="capture does not see what changes the step: a value from outside the model and the batch (a file, "
        "the clock, a counter); or torch traces an operator differently from how it runs it",
    )


def _difference(losses: str, found: Tensor, eager: Step, agreement: Agreement) -> str:
    """How far two steps differ: by their losses, or if these are equal, by a gradient."""
    name, error = agreement.worst_gradient
    return f"{losses}, and the gradient of {name} differs by {error:.1e}" if _same(found, eager.loss) else losses


def _where_samples_meet(
    program: Program,
    made: Program,
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    parts: Sequence[Batch],
    far: float,
    options: CompileOptions,
) -> list[str]:
    """Why the microbatches' loss is not the whole batch's.

    Args:
        program, made: the captured one, and the one that can run.
    """
    if _is_weighed(made):
        return ["each microbatch's loss is weighted by loss_weight(batch)"]
    known = _unproved(made)
    if not known or made.batch_norm or isinstance(whole := _captured_whole(model, loss, batch, options), str):
        return known
    found = where_samples_meet(program, whole, [_fed(program, part) for part in parts], _fed(whole, batch), far)
    return known if found is None else [found]


def _differs(
    why: Sequence[str], found: Tensor, eager: Step, agreement: Agreement, options: CompileOptions
) -> BatchError:
    """The error that says how far the microbatches' loss is from the whole batch's, why, and what cures it."""
    numbers = f"the loss of the whole batch is {eager.loss:.6g}, of its {options.count} microbatches {found:.6g}"
    numbers = _difference(numbers, found, eager, agreement)
    return BatchError(
        "; ".join([numbers, *why]),
        hint="use --microbatches 1. If something is computed over all samples together (a router's balance), compute "
        "it for each sample and take the mean; if the loss is a mean over different numbers in each microbatch, "
        "weight them with the hook loss_weight(batch); if samples are along other dimensions, set microbatch_dims in "
        "the model file; if the difference is intended, use --accept-microbatch-loss",
        page="microbatches",
    )
