"""A model whose gradients overflow float16 where a batch says so, and eager PyTorch's training of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

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
