"""Does the emitted code compute what eager PyTorch computes? One synchronous step of both, compared.

The stages run one after the other in this process, microbatch by microbatch, on the example batch. Forward draws
random numbers in eager's own order, so dropout stays on and the masks are the same.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxpipe.build.build import Build
from fxpipe.plan.spec import Plan
from fxpipe.stages.loaded import load_stages
from fxpipe.stages.microbatch import run_microbatch
from fxpipe.task.batch import Splitter, split
from fxpipe.tracing.capture import Loss, autocasting
from fxpipe.tracing.held_tensors import HeldTensors
from fxpipe.tracing.model_state import preserved

FLOOR = 1e-3  # errors are relative to the tensor's norm, or to this part of the largest gradient's, if that is more


@dataclass(frozen=True)
class Agreement:
    """Largest relative errors against eager PyTorch: of the loss, of each gradient, of each buffer's new value."""

    loss: float
    gradients: dict[str, float]
    buffers: dict[str, float]

    @property
    def worst_gradient(self) -> tuple[str, float]:
        return max(self.gradients.items(), key=lambda item: item[1], default=("", 0.0))

    @property
    def largest(self) -> float:
        return max([self.loss, *self.gradients.values(), *self.buffers.values()])


def compare_with_eager(build: Build, model: nn.Module, loss: Loss, batch: Any, *, seed: int = 0) -> Agreement:
    """Run one minibatch both ways; the model is left as it was."""
    return compare(_emitted(build, batch, seed), eager_step(build.plan, model, loss, batch, seed))


@dataclass(frozen=True)
class Step:
    """What one minibatch gives: the loss, the mean gradients and the buffers' values after it, by first names."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def compare(found: Step, eager: Step) -> Agreement:
    """How far a step is from eager PyTorch's; a gradient that only one of them has is infinitely far, unless zero."""
    scale = FLOOR * max((g.norm().item() for g in eager.gradients.values()), default=0.0)
    gradients = {n: relative_error(found.gradients.get(n), g, scale) for n, g in eager.gradients.items()}
    gradients |= {n: math.inf for n, g in found.gradients.items() if n not in eager.gradients and g.any()}
    return Agreement(
        loss=relative_error(found.loss, eager.loss, 0.0),
        gradients=gradients,
        buffers={n: relative_error(found.buffers[n], b, 0.0) for n, b in eager.buffers.items()},
    )


def relative_error(found: torch.Tensor | None, expected: torch.Tensor, floor: float) -> float:
    """The norm of the difference over the norm of what is expected, or over `floor` if that is more.

    Infinite where nothing was found, or where other values are not finite than should be.
    """
    if found is None:
        return math.inf
    if found.numel() == 0:
        return 0.0
    wide = torch.complex128 if expected.is_complex() else torch.float64
    found, expected = found.detach().to(wide), expected.detach().to(wide)
    difference = (found - expected).norm().item()
    if not math.isfinite(difference):
        return 0.0 if torch.allclose(found, expected, equal_nan=True) else math.inf
    return difference / max(expected.norm().item(), floor, 1e-30)


def eager_step(plan: Plan, model: nn.Module, loss: Loss, batch: Any, seed: int = 0) -> Step:
    """One minibatch in eager PyTorch, microbatch by microbatch as the plan cuts it; the model is left as it was.

    The model itself runs, with its own tensors: nothing of how capture looks at a model is taken for granted.
    """
    held = HeldTensors(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    batch = pytree.tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, batch)  # the step may change it
    total = torch.zeros(())
    with torch.random.fork_rng(), preserved(model), _values_kept((*held.values, *parameters.values())):
        for j, part in enumerate(split(batch, plan.microbatches)):
            torch.manual_seed(seed + j)
            with autocasting(plan.device, plan.autocast):
                value = loss(model, part)
            value.backward()  # its own gradient, as hooks in a pipeline see it; the mean is taken below
            total = total + value.detach().cpu() / plan.microbatches
        gradients = {}
        for p in plan.parameters:
            # Names of one memory may be tensors of their own, each with its gradient.
            tied = {id(parameters[name]): parameters[name].grad for name in p.names if name in parameters}
            found = [gradient for gradient in tied.values() if gradient is not None]
            if found and (p.trained or any(gradient.any() for gradient in found)):
                gradients[p.name] = sum(found[1:], found[0]) / plan.microbatches
        now = held.now()
        buffers = {b.name: now[b.name].detach().clone() for b in plan.buffers if b.name in now}
    return Step(total, gradients, buffers)


@contextlib.contextmanager
def _values_kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, tensors have no gradients yet; afterwards they have the values, gradients and flags of before."""
    tensors = list({id(tensor): tensor for tensor in tensors}.values())
    leaves = [(t, t.requires_grad, t.grad) for t in tensors if t.is_leaf]
    before = [(t.detach(), t.detach().clone()) for t in tensors]
    for tensor, *_ in leaves:
        tensor.grad = None
    try:
        yield
    finally:
        for memory, value in before:
            if not torch.equal(memory, value):
                memory.copy_(value)
        for tensor, trained, gradient in leaves:
            tensor.requires_grad_(trained)
            tensor.grad = gradient


def _emitted(build: Build, batch: Any, seed: int) -> Step:
    plan = build.plan
    stages = load_stages(plan, build.files)
    state = dict(build.tensors)
    gradients: dict[str, torch.Tensor] = {}
    total = torch.zeros(())
    with torch.random.fork_rng(), torch.no_grad():
        for j, part in enumerate(Splitter(plan.batch, plan.batch_spec, plan.microbatches, plan.device)(batch, 0)):
            leaves = dict(zip([leaf.name for leaf in plan.batch], part, strict=True))
            torch.manual_seed(seed + j)
            for call, made in run_microbatch(plan, lambda worker, phase: stages[worker].function(phase), state, leaves):
                if made.loss is not None:
                    total = total + made.loss.cpu() / plan.microbatches
                for name, gradient in zip(call.spec.gradients, made.gradients, strict=True):
                    share = gradient / plan.microbatches
                    gradients[name] = gradients[name] + share if name in gradients else share
    return Step(total, gradients, {b.name: state[b.name] for b in plan.buffers})
