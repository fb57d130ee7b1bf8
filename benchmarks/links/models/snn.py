"""A self-normalising net: 32 linear layers of width 512 with SELU on scikit-learn's digits; 64 images a minibatch.

Many weights and little work on each: 8 million of them, and 131 kB of activations between two layers.
"""

from __future__ import annotations

import torch
from samples import Batch, digits
from torch import Tensor, nn

WIDTH, DEPTH, BATCH, RATE = 512, 32, 64, 0.001


def _layer(inputs: int, outputs: int) -> nn.Linear:
    """With LeCun's initial weights, which SELU is made for."""
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    nn.init.zeros_(layer.bias)
    return layer


def model() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Flatten(), _layer(64, WIDTH), nn.SELU())
    middle = (nn.Sequential(_layer(WIDTH, WIDTH), nn.SELU()) for _ in range(DEPTH - 2))
    return nn.Sequential(first, *middle, _layer(WIDTH, 10))


def criterion(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, labels)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return criterion(model(batch[0]), batch[1])


def train_data() -> list[Batch]:
    return digits(BATCH)


def optimizer(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named_parameters], lr=RATE, momentum=0.9)
