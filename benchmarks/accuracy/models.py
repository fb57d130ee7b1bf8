"""The study's models: plain PyTorch, each with at least eight pieces to cut between. None uses dropout.

Every model maps its inputs to logits whose last dimension is the classes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Norm = Callable[[int], nn.Module]


def group_norm(channels: int) -> nn.Module:
    """Over groups of four channels of one sample: what a microbatch is makes no difference to it."""
    return nn.GroupNorm(channels // 4, channels)


def convolution(inputs: int, outputs: int, norm: Norm, stride: int = 1) -> nn.Sequential:
    """3×3 convolution, norm, ReLU."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), norm(outputs), nn.ReLU())


class VGG(nn.Module):
    """Six convolutions with norms and two linear layers: images [batch, 1, 8, 8] to logits [batch, 10]."""

    def __init__(self, norm: Norm = nn.BatchNorm2d, width: int = 12) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            convolution(1, width, norm),
            nn.Sequential(convolution(width, width, norm), nn.MaxPool2d(2)),  # 4×4
            convolution(width, 2 * width, norm),
            convolution(2 * width, 2 * width, norm),
            nn.Sequential(convolution(2 * width, 2 * width, norm), nn.MaxPool2d(2)),  # 2×2
            convolution(2 * width, 4 * width, norm),
            nn.Sequential(nn.Flatten(), nn.Linear(16 * width, 4 * width), nn.ReLU()),
            nn.Linear(4 * width, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class BasicBlock(nn.Module):
    """ResNet's block: two convolutions with batch norm beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, norm: Norm, stride: int = 1) -> None:
        super().__init__()
        self.first = convolution(inputs, outputs, norm, stride)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm = norm(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.second(self.first(x))) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, six basic blocks and a linear head: images [batch, 1, 8, 8] to logits [batch, 10]."""

    def __init__(self, norm: Norm = nn.BatchNorm2d, width: int = 8) -> None:
        super().__init__()
        self.stem = convolution(1, width, norm)
        self.blocks = nn.Sequential(
            BasicBlock(width, width, norm),
            BasicBlock(width, width, norm),
            BasicBlock(width, 2 * width, norm, stride=2),  # 4×4
            BasicBlock(2 * width, 2 * width, norm),
            BasicBlock(2 * width, 4 * width, norm, stride=2),  # 2×2
            BasicBlock(4 * width, 4 * width, norm),
        )
        self.head = nn.Linear(4 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


def _self_normalising(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer with LeCun's initial weights, which SELU is made for."""
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    nn.init.zeros_(layer.bias)
    return layer


class SNN(nn.Module):
    """A self-normalising network, 32 linear layers with SELU: images [batch, 1, 8, 8] to logits [batch, 10]."""

    def __init__(self, width: int = 64, depth: int = 32) -> None:
        super().__init__()
        sizes = [64, *[width] * (depth - 1), 10]
        self.layers = nn.ModuleList(_self_normalising(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        for layer in self.layers[:-1]:
            x = F.selu(layer(x))
        return self.layers[-1](x)


class ResidualLSTM(nn.Module):
    """LSTM layers, each added to its input: tokens [batch, length] to logits [batch, classes]."""

    def __init__(self, vocabulary: int, classes: int, layers: int = 8, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x.mean(1))


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int, causal: bool, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Pre-norm blocks. A causal one gives logits for every next token, any other one for the whole text.

    Tokens [batch, length] to logits [batch, length, classes], or [batch, classes].
    """

    def __init__(self, vocabulary: int, length: int, classes: int, causal: bool, blocks: int = 8) -> None:
        super().__init__()
        width = 32
        self.causal = causal
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(0.1 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width, causal) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        nn.init.normal_(self.embed.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x if self.causal else x.mean(1)))
