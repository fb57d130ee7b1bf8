"""The model of the schedules benchmark: a GPT of 8 blocks, width 256, as a sequence of pieces; 16 windows of 128 bytes.

The sequence is for torch.distributed.pipelining, which is given consecutive pieces; fxpipe takes the model as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, BLOCKS, HEADS, VOCABULARY, BATCH, CONTEXT = 256, 8, 4, 256, 16, 128

Batch = tuple[Tensor, Tensor]


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.places


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Embedding(), *(Block() for _ in range(BLOCKS)), Head())


def criterion(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return criterion(model(batch[0]), batch[1])


def train_data() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (16, BATCH, CONTEXT + 1), generator=generator)
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in ids]


def optimizer(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named_parameters], lr=1e-4)
