"""A residual LSTM of 8 layers of width 256, which says from which package lines of source are; 32 texts a minibatch."""

from __future__ import annotations

import torch
from samples import PACKAGES, VOCABULARY, Batch, lines
from torch import Tensor, nn

WIDTH, LAYERS, BATCH, RATE = 256, 8, 32, 0.03


class Residual(nn.Module):
    """An LSTM layer, added to its input: [batch, length, WIDTH] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(x)[0]


class Head(nn.Module):
    """The mean over the text to logits: [batch, length, WIDTH] to [batch, classes]."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, len(PACKAGES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.mean(1))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *(Residual() for _ in range(LAYERS)), Head())


def criterion(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, labels)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return criterion(model(batch[0]), batch[1])


def train_data() -> list[Batch]:
    return lines(BATCH)


def optimizer(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named_parameters], lr=RATE, momentum=0.9)
