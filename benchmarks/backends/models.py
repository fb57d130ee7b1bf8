"""The models of this benchmark, by name: a module, its loss and a batch; plain PyTorch, sizes for one thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256
CLASSES = 10


class Block(nn.Module):
    """A transformer block with layer norm in front."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A language model of bytes."""

    def __init__(self, width: int, depth: int, context: int) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, width)
        self.pos = nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, width // 64, True) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


class ViT(nn.Module):
    """ViT-Tiny (Dosovitskiy et al., 2020; sizes of DeiT): width 192, 12 blocks, 3 heads."""

    def __init__(self, size: int, patch: int, width: int = 192, depth: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.pos = nn.Parameter(torch.randn((size // patch) ** 2, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, 3, False) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.pos
        return self.head(self.norm(self.blocks(x)).mean(1))


def vgg16() -> nn.Module:
    """VGG16 (Simonyan and Zisserman, 2014) for small images: its thirteen convolutions, one small layer behind them."""
    layers: list[nn.Module] = []
    channels = 3
    for entry in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
        if entry:
            layers += [nn.Conv2d(channels, entry, 3, padding=1), nn.ReLU()]
            channels = entry
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))


class Residual(nn.Module):
    """ResNet's basic block."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.skip: nn.Module = nn.Identity()
        if before != after:
            self.skip = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.skip(x))


def resnet18() -> nn.Module:
    """ResNet-18 (He et al., 2015)."""
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks: list[nn.Module] = []
    before = 64
    for after in (64, 128, 256, 512):
        blocks += [Residual(before, after, 1 if after == 64 else 2), Residual(after, after, 1)]
        before = after
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))


class ResidualLSTM(nn.Module):
    """LSTM layers with a sum around each, as in GNMT."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x).flatten(0, 1)


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Cross entropy."""
    x, y = batch
    return F.cross_entropy(model(x), y.flatten())


def _tokens(samples: int, length: int) -> Any:
    return torch.randint(0, VOCABULARY, (samples, length)), torch.randint(0, VOCABULARY, (samples, length))


def _images(samples: int, size: int) -> Any:
    return torch.randn(samples, 3, size, size), torch.randint(0, CLASSES, (samples,))


Made = tuple[Callable[[], nn.Module], Callable[[], Any]]
MODELS: dict[str, Made] = {
    "gpt-256": (lambda: GPT(256, 6, 128), lambda: _tokens(4, 128)),
    "gpt-768": (lambda: GPT(768, 4, 128), lambda: _tokens(4, 128)),
    "vgg16": (vgg16, lambda: _images(4, 64)),
    "resnet18": (resnet18, lambda: _images(4, 96)),
    "vit-tiny": (lambda: ViT(96, 8), lambda: _images(4, 96)),
    "lstm": (lambda: ResidualLSTM(256, 4), lambda: _tokens(16, 16)),
}
TINY: dict[str, Made] = {"gpt-tiny": (lambda: GPT(64, 2, 16), lambda: _tokens(2, 16))}
"""What `--quick` measures, and no one else."""
