"""One step of eager PyTorch, which is what all stages are compared with; the model is left as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxpipe import user_lines
from fxpipe.errors import CaptureError, FxpipeError
from fxpipe.lowering.agreement import Step
from fxpipe.lowering.separate_batch_norm import SeparateBatchNorm
from fxpipe.plan.plan import Plan
from fxpipe.random_state import alike, seed_torch, torch_state, torch_state_kept
from fxpipe.stages.minibatch import TRIED_SCALE
from fxpipe.task.batch import Batch
from fxpipe.task.bf16_parameters import narrow
from fxpipe.task.hooks import Loss, loss_and_metrics
from fxpipe.task.wrapped_tensors import wraps
from fxpipe.torch_private import disable_current_modes, pytree
from fxpipe.tracing.capture import autocasting
from fxpipe.tracing.held_tensors import HeldTensors
from fxpipe.tracing.model_state import preserved

_TRAINS = "make the step train without fxpipe first: loss(model, batch).backward() must run repeatedly"
_CASTS = (
    "--params bf16 computes as after model.to(torch.bfloat16): cast floating-point tensors of the batch to the type of "
    "the weights, x.to(layer.weight.dtype)"
)


def cut_as_planned(plan: Plan, batch: Any) -> list[Batch]:
    """The microbatches of a batch."""
    return Batch.of(batch).cut_as(plan.step.given).split(plan.microbatches)


def eager_step(plan: Plan, model: nn.Module, loss: Loss, batch: Any, seed: int = 0, *, whole: bool = False) -> Step:
    """One minibatch in eager PyTorch.

    If `whole`, on the whole batch, of which only batch norm sees one microbatch at a time; without the values of
    buffers, which it changes once. Else microbatch by microbatch as the plan cuts it.
    """
    step = EagerStep(
        model,
        loss,
        parameters=[(p.names, p.trained) for p in plan.parameters],
        buffers=() if whole else [b.name for b in plan.buffers],
        device=plan.device,
        autocast=plan.precision.autocast,
        params=plan.precision.params,
        divisor=1 if whole else plan.loss_divisor,
        scale=TRIED_SCALE if plan.scales_loss else None,
        seed=seed,
        batch_norms=plan.microbatches if whole else 1,
    )
    return step([Batch.of(batch)] if whole else cut_as_planned(plan, batch))


@dataclass(frozen=True)
class EagerStep:
    """Sums the losses and gradients of some batches.

    The model itself runs, with its own tensors: independent of how capture treats a model. What torch.compile made runs
    as the plain code.

    It gives the gradients of `parameters`, each with its names and whether it is trained, and new values of `buffers`.
    Sums are divided by the `divisor`. Losses are multiplied by the `scale` before backward, and gradients divided by it
    afterwards. The first batch has the `seed`, each next one the next number. Batch norms see a batch in `batch_norms`
    parts, one at a time.
    """

    model: nn.Module
    loss: Loss
    parameters: Sequence[tuple[Sequence[str], bool]] = ()
    buffers: Sequence[str] = ()
    device: str = "cpu"
    autocast: str | None = None
    params: str | None = None
    divisor: int = 1
    scale: float | None = None
    seed: int = 0
    batch_norms: int = 1

    def __call__(self, batches: Sequence[Batch]) -> Step:
        """The step on these batches, one after the other.

        Raises:
            CaptureError: the step fails in plain eager PyTorch, too.
            FxpipeError: it only fails in the modes that are active: with steady random numbers, say.
        """
        try:
            with SeparateBatchNorm(self.batch_norms) if self.batch_norms > 1 else contextlib.nullcontext():
                return self._step(batches)
        except CaptureError as error:
            with disable_current_modes():
                self._step(batches)
            raise FxpipeError(
                "the step runs in eager PyTorch, but not where fxpipe compares it, with random numbers that are the "
                f"same for every sample and batch norms that see one microbatch: {error.what.partition(': ')[2]}",
                where=error.where,
                hint="fxpipe cannot compare this step yet",
            ) from error

    def _step(self, batches: Sequence[Batch]) -> Step:
        held = HeldTensors(self.model)
        known = dict(self.model.named_parameters(remove_duplicate=False))
        parts = pytree.tree_map(_copied, [batch.given for batch in batches])  # the step may change them
        total, again = torch.zeros(()), False
        named: list[dict[str, float]] = []
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch_state_kept())
            stack.enter_context(preserved(self.model, self.loss))
            stack.enter_context(_values_kept((*held.values, *known.values())))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            if self.params is not None:
                narrow(self.model)
            for j, part in enumerate(parts):
                seed_torch(self.seed + j)
                with self._blamed("loss(model, batch)"), autocasting(self.device, self.autocast):
                    value, metrics = loss_and_metrics(self.loss(self.model, part))
                named.append({name: float(torch.as_tensor(v).detach()) for name, v in metrics.items()})
                with self._blamed("backward()"), _buffers_kept(held, self.buffers):
                    before = torch_state()
                    # Its own gradient, as hooks in a pipeline see it; it is divided below.
                    (value if self.scale is None else value * (self.scale / self.divisor)).backward()
                    again |= not alike(before, torch_state())
                total = total + value.detach().cpu() / self.divisor
            gradients = {}
            for names, trained in self.parameters:
                # Several tensors may share one memory, each with its own gradient.
                tied = {id(known[name]): known[name].grad for name in names if name in known}
                found = [gradient for gradient in tied.values() if gradient is not None]
                if found and (trained or any(gradient.any() for gradient in found)):
                    gradients[names[0]] = sum(found[1:], found[0]) / (self.scale or self.divisor)
            now = held.now()
            values = {name: now[name].detach().clone() for name in self.buffers if name in now}
        return Step(total, gradients, values, tuple(named), again)

    @contextlib.contextmanager
    def _blamed(self, call: str) -> Iterator[None]:
        """Errors in here are eager PyTorch's own: the step that was captured does not train without fxpipe."""
        try:
            yield
        except Exception as error:
            raise CaptureError(
                f"eager PyTorch itself fails on this step, in {call}: {type(error).__name__}: {error}",
                where=user_lines.user_traceback(error) or user_lines.definition(self.loss),
                hint=_TRAINS if self.params is None else _CASTS,
            ) from error


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


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
    tensors = list({id(tensor): tensor for tensor in tensors if not wraps(tensor)}.values())
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
