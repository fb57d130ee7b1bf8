"""A model whose gradients overflow float16 where a batch says so, and eager PyTorch's training of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fxpipe.task.batch import split

LAYERS = 3
SPIKE = 3e4
"""Times a gradient of 1, this is nearly too much for float16."""


class Layer(nn.Module):
    """A layer with a second product that changes no output; its weight's gradient is as large as its input is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.main = nn.Linear(width, width)
        self.aside = nn.Linear(2, width, bias=False)
        nn.init.constant_(self.aside.weight, 1e-3)

    def forward(self, x: Tensor, spikes: Tensor) -> Tensor:
        aside = self.aside(spikes)
        return torch.tanh(self.main(x)) + (aside - aside.detach())


class Overflowing(nn.Module):
    """Layers, each of which overflows alone."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(LAYERS))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor, spikes: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, spikes[:, number])
        return self.head(x)


def loss(model: nn.Module, batch: Any) -> Tensor:
    x, y, spikes = batch
    return nn.functional.mse_loss(model(x, spikes).float(), y)


def batches(count: int, seed: int, overflows: dict[int, Sequence[int]] | None = None) -> list[Any]:
    """Minibatches of eight samples; `overflows` names the layers whose gradients overflow in a minibatch."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for minibatch in range(count):
        x, y = torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator)
        spikes = torch.rand(8, LAYERS, 2, generator=generator)
        for layer in (overflows or {}).get(minibatch, ()):
            spikes[int(torch.randint(8, (), generator=generator)), layer] = SPIKE
        found.append((x, y, spikes))
    return found


def made(seed: int = 0) -> Overflowing:
    torch.manual_seed(seed)
    return Overflowing()


@dataclass
class Eager:
    """What training in eager PyTorch gave, by step.

    Attributes:
        scales: what each step's loss was multiplied by, and at the end the next one.
        weights: after the last step.
        averages: of the weights, if there are some.
    """

    scales: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    averages: dict[str, Tensor] = field(default_factory=dict)


def eager(
    model: nn.Module,
    data: Sequence[Any],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    initial: float,
    interval: int,
    microbatches: int = 1,
    clip: float | None = None,
    scheduler: Callable[[Any], Any] | None = None,
    ema: float | None = None,
) -> Eager:
    """The loop of torch's documentation, with `torch.amp.GradScaler`, on a copy of the model."""
    model = copy.deepcopy(model)
    made = optimizer(list(model.named_parameters()))
    paced = None if scheduler is None else scheduler(made)
    average = None if ema is None else AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(ema))
    scaler = torch.amp.GradScaler("cpu", init_scale=initial, growth_interval=interval)
    found = Eager()
    for batch in data:
        found.scales.append(scaler.get_scale())
        found.rates.append(made.param_groups[0]["lr"])
        made.zero_grad()
        losses = []
        for part in split(batch, microbatches, {f"batch[{i}]": 0 for i in range(3)}):
            with torch.autocast("cpu", torch.float16):
                value = loss(model, part)
            losses.append(value.detach())
            scaler.scale(value / microbatches).backward()
        found.losses.append(float(sum(losses[1:], losses[0]) / microbatches))
        if clip is not None:
            scaler.unscale_(made)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(made)
        scaler.update()
        if paced is not None:
            paced.step()
        if average is not None:
            average.update_parameters(model)
    found.scales.append(scaler.get_scale())
    found.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if average is not None:
        found.averages = {n: v.detach().clone() for n, v in average.module.state_dict().items()}
    return found
