"""Language features in small models: each trains through a pipeline as it does in eager PyTorch.

A feature is a step that is cut for three workers, backward earlier than forward at one cut and later at the other, and
run in the local transport: two synchronous steps of two microbatches against eager, then some asynchronous ones.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from random_cuts import with_units
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.builds.build import Build
from fxpipe.checkpoint.shard import buffer_worker
from fxpipe.ir.program import Program
from fxpipe.lowering.compare_with_eager import compare_with_eager
from fxpipe.passes.analysis.profile import glued_positions
from fxpipe.planner.cuts import Cuts
from fxpipe.runtime.process.pipeline import Pipeline
from fxpipe.stages.compare import relative_error
from fxpipe.task.batch import split
from fxpipe.tracing.capture import autocasting

WIDTH = 6
WORKERS = 3
MICROBATCHES = 2
STEPS = 2


def layers(count: int) -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(count)])


class Around(nn.Module):
    """Two layers, the module of interest, two more layers: it is cut before, within and behind that module."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.before = layers(2)
        self.middle = middle
        self.after = layers(2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.before:
            x = torch.tanh(layer(x))
        x = self.middle(x)
        for layer in self.after:
            x = torch.tanh(layer(x))
        return x


class Chain(nn.Module):
    """Four layers; what is of interest is in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def squared(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def vectors(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.randn(size, WIDTH)


@dataclass(frozen=True)
class Feature:
    """A step: a middle module between other layers, or a whole model with its loss and batches.

    Attributes:
        make: makes the module.
        alone: it is the whole model.
        draws: whether the step draws random numbers, so that only runs in eager's own order can be compared.
        tolerance: of every gradient and buffer, relative to its norm.
    """

    name: str
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor] = squared
    batch: Callable[[int], Any] = vectors
    alone: bool = False
    autocast: str | None = None
    draws: bool = False
    tolerance: float = 1e-5

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make() if self.alone else Around(self.make())

    def batches(self, count: int) -> list[Any]:
        torch.manual_seed(1)
        return [self.batch(4 * MICROBATCHES) for _ in range(count)]

    def program(self) -> Program:
        model = self.model()
        before = copy.deepcopy(model.state_dict())
        program = fxpipe.capture(model, self.loss, split(self.batches(1)[0], MICROBATCHES)[0], autocast=self.autocast)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name]), f"capture has changed {name}"
        return program


def lowered(program: Program, cuts: Cuts, **options: Any) -> Build:
    """A build of microbatches; some features mix samples, so that their loss is not meant to be the whole batch's."""
    return fxpipe.lower(
        program,
        workers=WORKERS,
        microbatches=MICROBATCHES,
        schedule="1f1b",
        accept_microbatch_loss=True,
        cost="analytic",
        cuts=cuts,
        **options,
    )


def apart(program: Program) -> Cuts:
    """Forward cut into thirds as far as that is legal; backward earlier at the first cut, and later at the second."""
    program = with_units(program, MICROBATCHES)
    count, glued = len(program.units), glued_positions(program)
    free = [p for p in range(1, count) if p not in glued]
    forward = [free[len(free) * k // WORKERS] for k in range(1, WORKERS)]
    shift = max(1, count // 6)
    return Cuts((0, *forward, count), (0, max(forward[0] - shift, 0), min(forward[1] + shift, count), count))


def check(feature: Feature) -> None:
    """Assert that it trains as in eager with its cuts apart, and asynchronously without anything not finite."""
    program = feature.program()
    build = lowered(program, apart(program))
    agrees(feature, build)
    pipeline = build.local(optimizer=sgd, schedule="async", policy="stash")
    losses = pipeline.run(feature.batches(3))
    assert all(map(math.isfinite, losses)), losses
    assert all(bool(v.isfinite().all()) for v in pipeline.state_dict().values() if v.is_floating_point())


def agrees(feature: Feature, build: Build) -> None:
    if feature.draws:
        agreement = compare_with_eager(build, feature.model(), feature.loss, feature.batches(1)[0])
        assert agreement.largest < feature.tolerance, agreement
        return
    batches = feature.batches(STEPS)
    pipeline = build.local(optimizer=sgd)
    losses = [pipeline.step(batch).item() for batch in copy.deepcopy(batches)]
    model, expected = trained(feature)
    for found, wanted in zip(losses, expected, strict=True):
        assert math.isclose(found, wanted, rel_tol=feature.tolerance, abs_tol=1e-6), (losses, expected)
    compare_gradients(pipeline, model, feature.tolerance)
    compare_state(pipeline, model, feature.tolerance)


@functools.lru_cache(maxsize=1)  # the features come one after the other
def trained(feature: Feature) -> tuple[nn.Module, list[float]]:
    """The model after its eager training, with the last step's gradients, and the losses."""
    model = feature.model()
    return model, train(model, feature, "cpu", feature.batches(STEPS))


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9)


def train(model: nn.Module, feature: Feature, device: str, batches: list[Any]) -> list[float]:
    """The losses of eager training; the model keeps the last step's gradients."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = sgd(named)
    losses = []
    for batch in copy.deepcopy(batches):
        optimizer.zero_grad()
        total = 0.0
        for part in split(batch, MICROBATCHES):
            with autocasting(device, feature.autocast):
                loss = feature.loss(model, part)
            loss.backward()  # hooks see the gradient of a microbatch's own loss
            total += loss.item() / MICROBATCHES
        for _, parameter in named:
            if parameter.grad is not None:
                parameter.grad /= MICROBATCHES
        optimizer.step()
        losses.append(total)
    return losses


def compare_gradients(pipeline: Pipeline, model: nn.Module, tolerance: float) -> None:
    found = pipeline.gradients()
    expected = {n: p.grad for n, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    floor = 1e-3 * max(g.norm().item() for g in expected.values())  # gradients that are zero but for rounding
    for name, gradient in expected.items():
        if name in found or gradient.any():
            assert relative_error(found.get(name), gradient, floor) < tolerance, f"gradient of {name}"
    assert not {n for n, g in found.items() if n not in expected and g.any()}


def compare_state(pipeline: Pipeline, model: nn.Module, tolerance: float) -> None:
    """Every parameter, every buffer, persistent or not, and every tensor that is a plain attribute."""
    state = pipeline.state_dict()
    expected = model.state_dict()
    assert set(state) == set(expected)
    for name, tensor in expected.items():
        assert state[name].dtype == tensor.dtype, name
        assert relative_error(state[name], tensor, 1e-3) < tolerance, name
    kept = {name: b for b in pipeline.plan.buffers for name in b.names}
    weights = {name for p in pipeline.plan.parameters for name in p.names}
    for name, tensor in model.named_buffers(remove_duplicate=False):
        if name in weights:
            continue  # a parameter's memory under another name
        assert name in kept, name
        buffer = kept.pop(name)
        value = pipeline.executors[buffer_worker(buffer)].buffers[buffer.name]
        assert value.dtype == tensor.dtype
        assert relative_error(value, tensor, 1e-3) < tolerance, name
    for name, buffer in kept.items():
        if buffer.home is not None:
            value = pipeline.executors[buffer.home].buffers[buffer.name]
            assert relative_error(value, attribute(model, name), 1e-3) < tolerance, name


def attribute(model: nn.Module, path: str) -> Tensor:
    """What a path such as `middle.cache.mask` leads to."""
    found: Any = model
    for key in path.split("."):
        if isinstance(found, dict):
            found = found[key]
        elif isinstance(found, (list, tuple)):
            found = found[int(key)]
        else:
            found = getattr(found, key)
    assert isinstance(found, Tensor)
    return found
