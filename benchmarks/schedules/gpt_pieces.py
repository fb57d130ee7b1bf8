"""The model of the schedules benchmark: a GPT of 8 blocks, width 256, 16 windows of 128 bytes a minibatch."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "links" / "models"))
from blocks import Block, Embedding, Head

WIDTH, BLOCKS, HEADS, VOCABULARY, BATCH, CONTEXT = 256, 8, 4, 256, 16, 128

Batch = tuple[Tensor, Tensor]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (Block(WIDTH, HEADS, causal=True) for _ in range(BLOCKS))
    return nn.Sequential(Embedding(VOCABULARY, CONTEXT, WIDTH), *blocks, Head(WIDTH, VOCABULARY, whole=False))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def train_data() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (16, BATCH, CONTEXT + 1), generator=generator)
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in ids]


def optimizer(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named_parameters], lr=1e-4)
