"""A VGG-like CNN: large activations and little weight in front, the reverse at the end."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

BATCH, SIDE = 8, 64


def model() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in ((32, 2), (64, 2), (128, 3), (256, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    flat = channels * (SIDE // 16) ** 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, 1024), nn.ReLU(), nn.Linear(1024, 100))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train_data() -> Iterator[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(0)
    for _ in range(1000):
        yield torch.randn(BATCH, 3, SIDE, SIDE, generator=random), torch.randint(100, (BATCH,), generator=random)
