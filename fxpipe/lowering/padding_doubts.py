"""Finds in eager PyTorch whether padding changes what is trained or measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import BatchError, CaptureError, FxpipeError
from fxpipe.lowering.agreement import Step, agreement_of, metric_errors
from fxpipe.lowering.eager_step import EagerStep
from fxpipe.lowering.first_of_each import first_of_each
from fxpipe.lowering.options import CompileOptions
from fxpipe.lowering.steady_randomness import SteadyRandomness
from fxpipe.plan.spec import PadSpec
from fxpipe.stages.compare import AMPLIFIED, FLOOR_OF_SUMS, tolerance
from fxpipe.task.batch import Batch, is_named
from fxpipe.task.hooks import Loss, Metrics
from fxpipe.task.loss_weights import weight_of
from fxpipe.task.meta import are_on_meta
from fxpipe.tracing.evaluation import eval_mode


def padding_doubts(
    model: nn.Module, loss: Loss, batches: Sequence[Batch], padding: Sequence[PadSpec], options: CompileOptions
) -> tuple[str, ...]:
    """Warnings: loss, gradients, metrics or `loss_weight` that padding changes, or that could not be compared.

    For every shape, eager PyTorch steps on the first batch that padding changes, unpadded and padded; random numbers
    are the same for every sample and token in both.

    Raises:
        BatchError: eager PyTorch steps on a batch, and fails on it when padded.
    """
    if not padding:
        return ()
    if are_on_meta(list(model.parameters())):
        return ("whether padding changes the loss was not compared: parameters have no values (--meta)",)
    told = first_of_each(batches, padding, values=0)
    pairs = [(batch, after) for batch in told if (after := batch.padded(padding)) is not batch]
    if not pairs:
        return (
            "whether padding changes the loss was not compared: no batch that was read needs any (--scan reads more)",
        )
    return _told(doubt for batch, after in pairs for doubt in _of_step(model, loss, batch, after, padding, options))


def _of_step(
    model: nn.Module, loss: Loss, batch: Batch, after: Batch, padding: Sequence[PadSpec], options: CompileOptions
) -> Iterator[str]:
    device = next((p.device.type for p in model.parameters()), "cpu")
    parameters = [((name,), p.requires_grad) for name, p in model.named_parameters()]

    step = EagerStep(model, loss, parameters, device=device, autocast=options.autocast, params=options.params)
    place = f"of a batch of {batch}"
    steady = SteadyRandomness()
    with steady:
        own = None
        try:
            own = step([batch])
            made = step([after])
        except FxpipeError as error:
            if own is not None and isinstance(error, CaptureError):
                raise _needs_more(error, batch, after, padding) from error
            yield f"whether padding changes the loss was not compared {place}: {error.what}"
            return
    if (hook := options.loss_weight) is not None:
        weight, padded = (weight_of(hook, one.given) for one in (batch, after))
        if weight != padded:
            yield (
                f"padding changes loss_weight(batch) {place}: {weight:g} unpadded, {padded:g} padded: "
                "do not count padding"
            )
    if steady.unknown:
        drawn = ", ".join(sorted(steady.unknown))
        yield f"whether padding changes the loss was not compared: {drawn} cannot draw the same numbers for both"
        return
    agreement = agreement_of(made, own, FLOOR_OF_SUMS)
    limit = _limit(model.parameters(), options.autocast or options.params)
    name, error_of_gradient = agreement.worst_gradient
    if not agreement.loss <= limit:
        yield (
            f"padding changes the loss {place}: {own.loss:.6g} unpadded, {made.loss:.6g} padded: it trains something "
            "else; let the model mask what is appended, and the loss leave it out"
        )
    elif not error_of_gradient <= limit:
        yield (
            f"padding changes gradients {place}: {name}'s by {error_of_gradient:.1e} (relative), though the loss "
            "is the same; let the model mask what is appended"
        )
    yield from _metrics("metric", own, made, limit, place)


def _needs_more(error: CaptureError, batch: Batch, after: Batch, padding: Sequence[PadSpec]) -> BatchError:
    """The error if the padded batch fails: perhaps another leaf of the same length is not padded."""
    before, now = ({name: tuple(tensor.shape) for name, tensor in one.tensors.items()} for one in (batch, after))
    lengths = {a for name in before for a, b in zip(before[name], now[name], strict=True) if a != b}
    named = [rule.leaf for rule in padding]
    alike = [name for name, shape in before.items() if not is_named(name, named) and lengths & set(shape[1:])]
    return BatchError(
        f"eager PyTorch steps on a batch of {batch}, but fails on it padded to {after}: {error.what}",
        where=error.where,
        hint=f"pad does not name {', '.join(alike)}, which has the same length: name it, too"
        if alike
        else "name all leaves that have this length in pad, or choose another pad_to",
        page="batch-shapes",
    )


def evaluation_doubts(
    model: nn.Module, metrics: Metrics, batches: Iterable[Batch], padding: Sequence[PadSpec], params: str | None = None
) -> tuple[str, ...]:
    """Warnings: metrics of an evaluation that padding changes; the model is in eval mode.

    Batches are as the data give them, on the model's device; those that padding does not change are skipped.
    """
    if are_on_meta(list(model.parameters())):
        return ()  # the warning on the loss says it

    def measured(model: nn.Module, batch: Any) -> Any:
        with torch.no_grad():
            return torch.zeros((), requires_grad=True), metrics(model, batch)

    def evaluated(batch: Batch) -> Step:
        with eval_mode(model), torch.enable_grad():
            return EagerStep(model, measured, params=params)([batch])

    doubts: list[str] = []
    for batch in batches:
        if (after := batch.padded(padding)) is batch:
            continue
        place = f"of a batch of eval_data() of {batch}"
        try:
            with SteadyRandomness() as steady:
                own, made = evaluated(batch), evaluated(after)
        except FxpipeError as error:
            doubts.append(f"whether padding changes metrics was not compared {place}: {error.what}")
            continue
        if steady.unknown:
            doubts.append(f"whether padding changes metrics was not compared {place}: they draw random numbers")
            continue
        doubts += _metrics("evaluation metric", own, made, _limit(model.parameters(), params), place)
    return _told(doubts)


def _metrics(what: str, own: Step, made: Step, limit: float, place: str) -> Iterator[str]:
    for name, error in metric_errors(made, own.metrics).items():
        if not error <= limit:
            yield (
                f"padding changes the {what} {name!r} {place}: {own.metrics[0][name]:.6g} unpadded, "
                f"{made.metrics[0][name]:.6g} padded: leave out what is appended"
            )


def _limit(parameters: Iterable[Tensor], computed: str | None) -> float:
    """The relative difference that counts as rounding: padding that a model does not mask changes more, in 16 bits."""
    return min(AMPLIFIED, tolerance((p.dtype for p in parameters), computed))


def _told(doubts: Iterable[str]) -> tuple[str, ...]:
    """The first doubt of each kind, and for how many more batches it holds."""
    kinds: dict[str, list[str]] = {}
    for doubt in doubts:
        kinds.setdefault(doubt.partition(" of a batch of ")[0], []).append(doubt)
    return tuple(
        first + (f" (the same for {len(rest)} more shapes)" if rest else "") for first, *rest in kinds.values()
    )
