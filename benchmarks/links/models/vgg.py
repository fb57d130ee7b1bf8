"""A VGG-like net with group norm and two wide linear layers, on scikit-learn's digits; 64 images a minibatch."""

from __future__ import annotations

import torch
from samples import Batch, digits
from torch import Tensor, nn

WIDTH, HIDDEN, BATCH, RATE = 32, 1024, 64, 0.01


def _convolution(inputs: int, outputs: int) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(layer, nn.GroupNorm(outputs // 4, outputs), nn.ReLU())


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        _convolution(1, WIDTH),
        _convolution(WIDTH, WIDTH),
        nn.MaxPool2d(2),  # 4×4
        _convolution(WIDTH, 2 * WIDTH),
        _convolution(2 * WIDTH, 2 * WIDTH),
        nn.MaxPool2d(2),  # 2×2
        _convolution(2 * WIDTH, 4 * WIDTH),
        _convolution(4 * WIDTH, 4 * WIDTH),
        nn.Sequential(nn.Flatten(), nn.Linear(16 * WIDTH, HIDDEN), nn.ReLU()),
        nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU()),
        nn.Linear(HIDDEN, 10),
    )


def criterion(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, labels)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return criterion(model(batch[0]), batch[1])


def train_data() -> list[Batch]:
    return digits(BATCH)


def optimizer(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named_parameters], lr=RATE, momentum=0.9)
