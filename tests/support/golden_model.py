"""The model behind the golden stages: a line moved here moves in them, so leave it alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Golden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.hidden = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed(ids))
        x = x + self.drop(torch.relu(self.hidden(x)))
        return self.head(x)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    ids, targets = batch
    return F.cross_entropy(model(ids), targets)


def batch() -> tuple[Tensor, Tensor]:
    return torch.arange(6) % 7, torch.arange(6).flip(0)
