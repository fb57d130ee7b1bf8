"""Models with many nodes: real ones from timm, an LSTM of 500 steps, a GPT of 96 blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES, VOCABULARY = 10, 100
Step = tuple[nn.Module, Callable[[nn.Module, Any], Tensor], Any]


class Recurrent(nn.Module):
    """One LSTM layer, computed step by step; classifies by its last state."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0])


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(samples, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(samples, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, depth: int, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def classify(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def next_token(model: nn.Module, batch: Any) -> Tensor:
    ids, targets = batch
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def recurrent(steps: int) -> Step:
    return Recurrent(), classify, (torch.randn(2, steps, 32), torch.randint(0, CLASSES, (2,)))


def gpt(depth: int) -> Step:
    ids = torch.randint(0, VOCABULARY, (2, 17))
    return GPT(depth), next_token, (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def of_timm(name: str, pixels: int) -> Step:
    import timm

    model = timm.create_model(name, num_classes=CLASSES)
    return model, classify, (torch.randn(2, 3, pixels, pixels), torch.randint(0, CLASSES, (2,)))


MODELS: dict[str, Callable[[], Step]] = {
    "Inception-ResNet-v2": lambda: of_timm("inception_resnet_v2", 107),
    "CoaT tiny": lambda: of_timm("coat_tiny", 224),
    "MaxViT tiny": lambda: of_timm("maxvit_tiny_tf_224", 224),
    "LSTM, 125 steps": lambda: recurrent(125),
    "LSTM, 500 steps": lambda: recurrent(500),
    "GPT, 24 blocks": lambda: gpt(24),
    "GPT, 96 blocks": lambda: gpt(96),
}
SCALED = (("LSTM, 125 steps", "LSTM, 500 steps"), ("GPT, 24 blocks", "GPT, 96 blocks"))
"""Pairs of which the second is four times the first."""
QUICK = tuple(small for small, _ in SCALED)
