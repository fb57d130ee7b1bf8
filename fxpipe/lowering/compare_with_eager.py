"""Compares one synchronous step of the emitted code with eager PyTorch.

The stages run one after the other in this process, microbatch by microbatch, on the example batch. In the comparison
with the whole batch, dropout drops nothing. Microbatch by microbatch, forward draws random numbers in eager's order, so
dropout stays on with the same masks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fxpipe.build.build import Build
from fxpipe.codecs import without_codecs
from fxpipe.errors import CaptureError
from fxpipe.lowering.agreement import FLOOR, LIMIT, Agreement, Step, _each, compare, metric_errors, of_minibatch
from fxpipe.lowering.independent_replicas import of_one_replica
from fxpipe.lowering.own_rounding import THE_LOSS, Exact, in_float64, without_rounding
from fxpipe.lowering.separate_batch_norm import SeparateBatchNorm
from fxpipe.lowering.steady_randomness import SteadyRandomness
from fxpipe.plan.spec import FUNCTIONS, Phase, Plan
from fxpipe.random_state import alike, seed_torch, torch_state, torch_state_kept
from fxpipe.runtime.worker.gradients import summed_in
from fxpipe.stages.compare import FLOOR_OF_SUMS
from fxpipe.stages.loaded import explained, load_stages
from fxpipe.stages.microbatch import run_microbatch
from fxpipe.stages.minibatch import TRIED_SCALE, Minibatches, weights_of
from fxpipe.stages.part_call import Function
from fxpipe.stages.pure_function import all_float64, wide
from fxpipe.task.batch import Batch
from fxpipe.task.bf16_parameters import narrow
from fxpipe.task.hooks import Loss
from fxpipe.task.loss_weights import LossWeight
from fxpipe.task.metrics import loss_and_metrics
from fxpipe.torch_private import pytree
from fxpipe.tracing import user_lines
from fxpipe.tracing.capture import autocasting
from fxpipe.tracing.held_tensors import HeldTensors
from fxpipe.tracing.model_state import preserved


def compare_with_eager(
    build: Build, model: nn.Module, loss: Loss, batch: Any, *, seed: int = 0, loss_weight: LossWeight | None = None
) -> Agreement:
    """Run one minibatch both ways; the model is left as it was.

    Eager PyTorch steps on the whole batch; only batch norm sees one microbatch at a time, and random numbers are the
    same for every sample in both. What cannot be compared this way is compared microbatch by microbatch, with the
    random numbers of a run: the new values of buffers, and a loss that differs from the whole batch's by design
    (`Plan.differs_from_whole`). Codecs are off: `codec_effect` says what they change. Where values differ by more than
    `LIMIT`, both steps in float64 say whether that is rounding (`without_rounding`).

    Args:
        loss_weight: the hook that the build was compiled with, if any.

    Raises:
        RunError: the emitted code fails, and eager PyTorch does not.
    """
    build, batch = of_one_replica(build, batch)
    plan = build.plan
    eager = eager_step(plan, model, loss, batch, seed)  # first: if it cannot run, the emitted code is not to blame
    emitted = emitted_step(build, batch, seed, loss_weight)
    metrics = of_minibatch(eager, _weights(plan, batch, loss_weight))
    own = partial(_without_rounding, build, model, loss, batch, seed, loss_weight)
    by_parts = own(emitted, eager, FLOOR)
    if eager.draws_again and by_parts.largest > LIMIT:
        by_parts = _without_draws(build, model, loss, batch, seed, loss_weight, by_parts)
    by_parts = replace(by_parts, metrics=metric_errors(emitted, metrics))
    if plan.microbatches == 1 or plan.differs_from_whole:
        return by_parts
    steady = SteadyRandomness()
    with steady:
        eager = eager_step(plan, model, loss, batch, seed, whole=True)
        emitted = emitted_step(build, batch, seed, loss_weight)
    whole = own(emitted, eager, FLOOR_OF_SUMS if plan.batch_norm else FLOOR, whole=True)
    whole = replace(whole, metrics=metric_errors(emitted, eager.metrics))
    changed = bool(plan.made or plan.whole_numbers)  # a microbatch's loss is not the user's function of that microbatch
    if changed:
        finite = tuple(name for name in by_parts.not_finite if name in by_parts.buffers)
        by_parts = replace(by_parts, loss=0.0, gradients={}, rounding={}, not_finite=finite)
    if steady.unknown:
        by_parts = replace(by_parts, metrics={} if changed else by_parts.metrics)
        why = f"{', '.join(sorted(steady.unknown))} cannot draw alike for a batch and its microbatches"
        return replace(by_parts, not_compared=why) if changed else by_parts
    gradients = {n: max(error, by_parts.gradients.get(n, 0.0)) for n, error in whole.gradients.items()}
    if plan.batch_norm and not changed:  # it amplifies rounding, and kernels differ by size
        gradients = by_parts.gradients
        whole = replace(whole, rounding={n: e for n, e in whole.rounding.items() if n == THE_LOSS})
    metric = {n: min(error, by_parts.metrics.get(n, error)) for n, error in whole.metrics.items()}
    together = replace(by_parts, loss=max(whole.loss, by_parts.loss), gradients=gradients, zero=whole.zero)
    together = replace(together, metrics=metric, rounding={**whole.rounding, **by_parts.rounding})
    together = replace(together, cause=whole.cause or by_parts.cause)
    return replace(together, not_finite=_each(by_parts.not_finite, whole.not_finite))


def _without_rounding(
    build: Build,
    model: nn.Module,
    loss: Loss,
    batch: Any,
    seed: int,
    loss_weight: LossWeight | None,
    found: Step,
    eager: Step,
    floor: float,
    *,
    whole: bool = False,
    steady: bool = False,
) -> Agreement:
    """The agreement without errors that rounding explains.

    Args:
        whole: as in `eager_step`.
        steady: draws the same random numbers for every sample; always so if `whole`.
    """

    def exact() -> Exact | None:
        with SteadyRandomness() if whole or steady else contextlib.nullcontext():
            plan = build.plan
            true = in_float64(lambda m, b: eager_step(plan, m, loss, b, seed, whole=whole), model, batch, plan.params)
            if true is None:
                return None
            try:
                return Exact(true, emitted_step(build, batch, seed, loss_weight, precise=True))
            except Exception:  # an operator that has no float64
                return Exact(true)

    return without_rounding(compare(found, eager, floor), found, eager, LIMIT, floor, exact)


def _without_draws(
    build: Build,
    model: nn.Module,
    loss: Loss,
    batch: Any,
    seed: int,
    loss_weight: LossWeight | None,
    drawn: Agreement,
) -> Agreement:
    """The agreement where eager's backward draws other random numbers than its forward: compared with steady numbers.

    Args:
        drawn: the agreement with random numbers.
    """
    with SteadyRandomness() as steady:
        eager = eager_step(build.plan, model, loss, batch, seed)
        found = emitted_step(build, batch, seed, loss_weight)
    if steady.unknown:
        return replace(
            drawn, cause=f"{_DRAWS_AGAIN}, and {', '.join(sorted(steady.unknown))} cannot draw alike in both"
        )
    made = _without_rounding(build, model, loss, batch, seed, loss_weight, found, eager, FLOOR, steady=True)
    note = f"gradients were compared without random numbers: {_DRAWS_AGAIN}"
    return replace(made, notes=(note,)) if made.largest <= LIMIT else drawn


_DRAWS_AGAIN = (
    "eager PyTorch draws other random numbers in backward than in forward (torch.utils.checkpoint with "
    "preserve_rng_state=False), so its gradients do not belong to the loss that it returns; a stage draws once"
)


class SumOfMicrobatches:
    """The loss and the gradients of a minibatch, summed over its microbatches.

    Args:
        divisor: what the sums are divided by.
        metrics: the names of the values after the loss, in one tensor.
        scale: the factor on the losses before backward, which divided them, too; None if there was none.
    """

    def __init__(self, divisor: int, metrics: Sequence[str] = (), scale: float | None = None) -> None:
        self._divisor = divisor
        self._scale = scale
        self._names = metrics
        self._metrics = torch.zeros(len(metrics))
        self.loss = torch.zeros(())
        self.gradients: dict[str, torch.Tensor] = {}
        self._kinds: dict[str, torch.dtype] = {}

    def add_loss(self, value: torch.Tensor) -> None:
        if self._names:
            self._metrics += value[1:].detach().cpu() / self._divisor
            value = value[0]
        self.loss = self.loss + value.detach().cpu() / self._divisor

    def add_gradient(self, name: str, value: torch.Tensor) -> None:
        self._kinds[name] = value.dtype
        share = value.to(summed_in(value.dtype)) / (self._scale or self._divisor)
        self.gradients[name] = self.gradients[name] + share if name in self.gradients else share

    def step(self, buffers: dict[str, torch.Tensor]) -> Step:
        named = dict(zip(self._names, self._metrics.tolist(), strict=True))
        rounded = {name: gradient.to(self._kinds[name]) for name, gradient in self.gradients.items()}
        return Step(self.loss, rounded, buffers, (named,))


def _weights(plan: Plan, batch: Any, loss_weight: LossWeight | None) -> list[float]:
    """How much each microbatch counts, if not all count the same."""
    if not plan.loss_weight or loss_weight is None:
        return []
    return [float(w) for w in weights_of(loss_weight, _cut(plan, batch), 0, "cpu")]


def _cut(plan: Plan, batch: Any) -> list[Batch]:
    """The microbatches, as the plan cuts them."""
    return Batch.of(batch).cut_as(plan.given).split(plan.microbatches)


def eager_step(plan: Plan, model: nn.Module, loss: Loss, batch: Any, seed: int = 0, *, whole: bool = False) -> Step:
    """One minibatch in eager PyTorch; the model is left as it was.

    Args:
        whole: on the whole batch, of which only batch norm sees one microbatch at a time; else microbatch by
            microbatch as the plan cuts it.
    """
    parts = [Batch.of(batch)] if whole else _cut(plan, batch)
    with SeparateBatchNorm(plan.microbatches) if whole else contextlib.nullcontext():
        return run_eagerly(
            model,
            loss,
            [part.given for part in parts],
            parameters=[(p.names, p.trained) for p in plan.parameters],
            buffers=[b.name for b in plan.buffers],
            context=lambda: autocasting(plan.device, plan.autocast),
            params=plan.params,
            divisor=1 if whole else plan.loss_divisor,
            scale=TRIED_SCALE if plan.scales_loss else None,
            seed=seed,
        )


def run_eagerly(
    model: nn.Module,
    loss: Loss,
    parts: Sequence[Any],
    *,
    parameters: Sequence[tuple[Sequence[str], bool]] = (),
    buffers: Sequence[str] = (),
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    divisor: int = 1,
    params: str | None = None,
    scale: float | None = None,
    seed: int = 0,
) -> Step:
    """The sums of the losses and gradients of some batches in eager PyTorch; the model is left as it was.

    The model itself runs, with its own tensors: independent of how capture treats a model.

    Args:
        parts: the batches, one after the other.
        parameters: the names of each parameter whose gradient is wanted, and whether it is trained.
        buffers: the names of those whose new values are wanted.
        context: what the loss is computed in.
        divisor: what the sums are divided by.
        params: 'bf16' lets the model compute in bfloat16.
        scale: what the summed losses are multiplied by before backward, and their gradients divided by afterwards.
        seed: of torch's generators at the first batch; each next batch has the next number.
    """
    held = HeldTensors(model)
    known = dict(model.named_parameters(remove_duplicate=False))
    parts = pytree.tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, parts)  # the step may change it
    total, again = torch.zeros(()), False
    named: list[dict[str, float]] = []
    with torch_state_kept(), preserved(model, loss), _values_kept((*held.values, *known.values())):
        if params is not None:
            narrow(model)
        for j, part in enumerate(parts):
            seed_torch(seed + j)
            with _eager(loss, "loss(model, batch)", params), context():
                value, metrics = loss_and_metrics(loss(model, part))
            named.append({name: float(torch.as_tensor(v).detach()) for name, v in metrics.items()})
            with _eager(loss, "backward()", params), _buffers_kept(held, buffers):
                before = torch_state()
                # Its own gradient, as hooks in a pipeline see it; it is divided below.
                (value if scale is None else value * (scale / divisor)).backward()
                again |= not alike(before, torch_state())
            total = total + value.detach().cpu() / divisor
        gradients = {}
        for names, trained in parameters:
            # Several tensors may share one memory, each with its own gradient.
            tied = {id(known[name]): known[name].grad for name in names if name in known}
            found = [gradient for gradient in tied.values() if gradient is not None]
            if found and (trained or any(gradient.any() for gradient in found)):
                gradients[names[0]] = sum(found[1:], found[0]) / (scale or divisor)
        now = held.now()
        values = {name: now[name].detach().clone() for name in buffers if name in now}
    return Step(total, gradients, values, tuple(named), again)


_TRAINS = "make the step train without fxpipe first: loss(model, batch).backward() must run repeatedly"
_CASTS = (
    "--params bf16 computes as after model.to(torch.bfloat16): cast floating-point tensors of the batch to the type of "
    "the weights, x.to(layer.weight.dtype)"
)


@contextlib.contextmanager
def _eager(loss: Loss, call: str, params: str | None) -> Iterator[None]:
    """Errors in here are eager PyTorch's own: the step that was captured does not train without fxpipe.

    Raises:
        CaptureError: with eager's message.
    """
    try:
        yield
    except Exception as error:
        raise CaptureError(
            f"eager PyTorch itself fails on this step, in {call}: {type(error).__name__}: {error}",
            where=user_lines.user_traceback(error) or user_lines.definition(loss),
            hint=_TRAINS if params is None else _CASTS,
        ) from error


@contextlib.contextmanager
def _buffers_kept(held: HeldTensors, names: Sequence[str]) -> Iterator[None]:
    """Afterwards, these buffers have their former values.

    A batch norm in a region of `torch.utils.checkpoint` updates its statistics again when backward computes the region
    again; a stage updates them once a step, of which capture warns.
    """
    now = held.now()
    before = {name: now[name].detach().clone() for name in names if name in now}
    yield
    now = held.now()
    with torch.no_grad():
        for name, value in before.items():
            if not torch.equal(now[name], value):
                now[name].copy_(value)


@contextlib.contextmanager
def _values_kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, tensors have no gradients yet; afterwards they have their former values, gradients and flags."""
    tensors = list({id(tensor): tensor for tensor in tensors}.values())
    leaves = [(t, t.requires_grad, t.grad) for t in tensors if t.is_leaf]
    before = [(t, t.detach(), t.detach().clone()) for t in tensors]
    for tensor, *_ in leaves:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, memory, value in before:
            if tensor.dtype != memory.dtype:
                tensor.data = memory
            if not torch.equal(memory, value):
                memory.copy_(value)
        for tensor, trained, gradient in leaves:
            tensor.requires_grad_(trained)
            tensor.grad = gradient


def emitted_step(
    build: Build,
    batch: Any,
    seed: int,
    loss_weight: LossWeight | None,
    *,
    with_codecs: bool = False,
    precise: bool = False,
) -> Step:
    """One minibatch by the emitted stages, for the build's first shape of batch.

    Args:
        with_codecs: whether values are packed as in a run; else they are not packed.
        precise: in float64.
    """
    plan = build.plan
    stages = load_stages(plan, build.files)
    state = {name: wide(tensor) for name, tensor in build.tensors.items()} if precise else dict(build.tensors)
    made = SumOfMicrobatches(plan.loss_divisor, plan.metrics, TRIED_SCALE if plan.scales_loss else None)

    def function(worker: int, phase: Phase) -> Function:
        stage, name = stages[worker], FUNCTIONS[phase]
        said = f"eager PyTorch runs this step, but the emitted {name}"
        return explained(stage.path, worker, lambda: said, "use smaller batches")(stage.functions[phase])

    crossing = contextlib.nullcontext() if with_codecs else without_codecs()
    parts = Minibatches(plan, build.files, build.tensors, loss_weight)(batch, 0)
    if precise:
        parts = [tuple(wide(v) if isinstance(v, torch.Tensor) else v for v in part) for part in parts]
    with torch_state_kept(), torch.no_grad(), crossing, all_float64() if precise else contextlib.nullcontext():
        for j, part in enumerate(parts):
            leaves = dict(zip([leaf.name for leaf in plan.batch], part, strict=True))
            seed_torch(seed + j)
            for call, returned in run_microbatch(plan, function, state, leaves, packed=not precise):
                if returned.loss is not None:
                    made.add_loss(returned.loss)
                for name, gradient in zip(call.spec.gradients, returned.gradients, strict=True):
                    made.add_gradient(name, gradient)
    return made.step({b.name: state[b.name] for b in plan.buffers})
