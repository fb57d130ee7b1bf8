"""A Transformer of 8 blocks of width 192, which says from which package lines of source are; 32 texts a minibatch."""

from __future__ import annotations

import torch
from blocks import Block, Embedding, Head
from samples import PACKAGES, VOCABULARY, WORDS, Batch, lines
from torch import Tensor, nn

WIDTH, BLOCKS, HEADS, BATCH, RATE = 192, 8, 4, 32, 0.003


def model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (Block(WIDTH, HEADS, causal=False) for _ in range(BLOCKS))
    return nn.Sequential(Embedding(VOCABULARY, WORDS, WIDTH), *blocks, Head(WIDTH, len(PACKAGES), whole=True))


def criterion(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, labels)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return criterion(model(batch[0]), batch[1])


def train_data() -> list[Batch]:
    return lines(BATCH)


def optimizer(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named_parameters], lr=RATE, momentum=0.9)
