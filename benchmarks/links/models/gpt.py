"""A byte-level GPT of 8 blocks of width 128 on Python's standard library; 8 windows of 64 bytes a minibatch."""

from __future__ import annotations

import torch
from blocks import Block, Embedding, Head
from samples import Batch, windows
from torch import Tensor, nn

WIDTH, BLOCKS, HEADS, LENGTH, BATCH, RATE = 128, 8, 4, 64, 8, 1e-3


def model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (Block(WIDTH, HEADS, causal=True) for _ in range(BLOCKS))
    return nn.Sequential(Embedding(256, LENGTH, WIDTH), *blocks, Head(WIDTH, 256, whole=False))


def criterion(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return criterion(model(batch[0]), batch[1])


def train_data() -> list[Batch]:
    return windows(BATCH, LENGTH)


def optimizer(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named_parameters], lr=RATE)
