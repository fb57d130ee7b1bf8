"""A model of two towers that read different parts of the batch, and a head that reads both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CUTS = ("left.0", "left.2", "right.0", "right.2", "head")
"""Where workers may begin; the right tower is at the third of them."""


def tower(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())


class Head(nn.Module):
    """Reads what both towers make."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 5)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.linear(torch.cat([left, right], 1))


class Towers(nn.Module):
    """With `frozen`, nothing of the right tower is trained: no gradient goes there. With `in_turns`, the towers'
    layers take turns."""

    def __init__(self, frozen: bool = False, in_turns: bool = False) -> None:
        super().__init__()
        self.left, self.right, self.head = tower(4), tower(3), Head()
        self.right.requires_grad_(not frozen)
        self.in_turns = in_turns

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.in_turns:
            for left, right in zip(self.left, self.right, strict=True):
                x, y = left(x), right(y)
            return self.head(x, y)
        left = self.left(x)
        return self.head(left, self.right(y))


def batch_of(size: int) -> Any:
    return torch.randn(size, 4), torch.randn(size, 3), torch.randint(5, (size,))


def loss(model: nn.Module, batch: Any) -> Tensor:
    x, y, classes = batch
    return F.cross_entropy(model(x, y), classes)
