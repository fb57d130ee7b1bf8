"""A small network for four workers, and its batches: what runs that are interrupted train."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Net(nn.Module):
    """Linear layers behind a batch norm, whose buffers forwards update.

    Args:
        dropout: random numbers in stages depend on the worker.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(5))
        self.drop = nn.Dropout(dropout)
        self.leave = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.enter(x))
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return self.leave(self.drop(x))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batches(count: int) -> list[Any]:
    """The first so many, always the same."""
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 6, generator=draw), torch.randint(0, 3, (8,), generator=draw)) for _ in range(count)]
