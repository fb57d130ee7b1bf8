"""A model of masked texts, and batches of many lengths: padding must leave as it is what they train."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LENGTHS = (5, 9, 4, 12, 7, 3, 10)
PAD = {"ids": 0, "mask": 0, "labels": -100}


class Reader(nn.Module):
    """Attends to the tokens of its text that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.embed(ids)
        scores = self.query(hidden) @ self.key(hidden).transpose(1, 2)
        scores = scores.masked_fill(~mask[:, None].bool(), -torch.inf)
        return self.head(self.norm(hidden + scores.softmax(-1) @ self.value(hidden)))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["ids"], batch["mask"]).flatten(0, 1), batch["labels"].flatten())


def tokens(batch: Any) -> Any:
    return (batch["labels"] >= 0).sum()


def metrics(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    right = (model(batch["ids"], batch["mask"]).argmax(-1) == batch["labels"]) & (batch["labels"] >= 0)
    return {"loss": loss(model, batch), "accuracy": right.sum() / (batch["labels"] >= 0).sum()}


def batch_of(length: int, seed: int = 0, samples: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 11, (samples, length), generator=generator)
    labels = torch.randint(0, 11, (samples, length), generator=generator)
    labels[:, ::3] = -100
    labels[0] = -100  # microbatches count differently
    labels[:, 0] = 3
    mask = torch.ones_like(ids)
    mask[1, 1:] = 0
    return {"ids": ids, "mask": mask, "labels": labels}


def data() -> list[dict[str, Tensor]]:
    return [batch_of(length, seed) for seed, length in enumerate(LENGTHS)]


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return Reader().double()


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], 0.1, momentum=0.9)
