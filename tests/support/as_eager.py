"""Training through the runtime beside training in eager PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from cached import captured
from small_models import Case
from torch import Tensor, nn

from fxpipe.build.build import Build
from fxpipe.task.batch import split


def optimizer(named: Any) -> torch.optim.Optimizer:
    """Of SGD with momentum and weight decay."""
    return torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9, weight_decay=1e-3)


def eager(case: Case, model: nn.Module, batches: list[Any], microbatches: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """The trained model and the gradients of its last step."""
    model = copy.deepcopy(model)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    update = optimizer(trained)
    for batch in batches:
        update.zero_grad(set_to_none=True)
        for part in split(batch, microbatches):
            (case.loss(model, part) / microbatches).backward()
        update.step()
    return model, {n: p.grad for n, p in trained if p.grad is not None}


def error(found: Tensor, expected: Tensor, scale: float = 0.0) -> float:
    found, expected = found.double(), expected.double()
    return ((found - expected).norm() / max(expected.norm().item(), scale, 1e-12)).item()


def equals_eager(name: str, steps: int, build: Build) -> None:
    """Assert that some steps of a build of a case end where they do in eager PyTorch."""
    microbatches = build.plan.microbatches
    case, model, _ = captured(name, microbatches)
    batches = case.batches(steps)
    pipeline = build.local(optimizer=optimizer)
    for batch in batches:
        pipeline.step(batch)
    expected, gradients = eager(case, model, batches, microbatches)

    found = pipeline.gradients()
    assert set(found) == set(gradients)
    scale = 1e-3 * max(g.norm().item() for g in gradients.values())  # of gradients that are zero but for rounding
    for parameter, gradient in gradients.items():
        assert error(found[parameter], gradient, scale) < 1e-5, parameter
    state, reference = pipeline.state_dict(), expected.state_dict()
    assert set(state) == set(reference)
    for entry, tensor in reference.items():
        assert state[entry].dtype == tensor.dtype
        assert error(state[entry], tensor, 1e-3) < 1e-5, entry
    assert not all(torch.equal(tensor, model.state_dict()[k]) for k, tensor in state.items()), "nothing was trained"
