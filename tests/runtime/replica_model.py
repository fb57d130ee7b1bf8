"""A model file with what replicas could do differently: batch norm, dropout, evaluation."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

OWN_DATA = False


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.relu(self.b(torch.relu(self.a(x)))))
        return self.c(self.norm(hidden))


def model() -> nn.Module:
    return Net()


def loss(net: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def train_data() -> Iterable[Any]:
    generator = torch.Generator().manual_seed(os.getpid() if OWN_DATA else 1)
    return [(torch.randn(12, 8, generator=generator), torch.arange(12) % 4) for _ in range(6)]


def eval_data() -> Iterable[Any]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(size, 8, generator=generator), torch.arange(size) % 4) for size in (12, 12, 7)]


def metrics(net: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"held_out": loss(net, batch)}


def optimizer(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=1e-2)
