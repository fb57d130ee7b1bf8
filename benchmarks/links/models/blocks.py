"""What the transformers of this folder are made of."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Embedding(nn.Module):
    """Tokens [batch, length] to [batch, length, width], with a vector for each place."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(0.1 * torch.randn(length, width))
        nn.init.normal_(self.tokens.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.places


class Block(nn.Module):
    """One pre-norm block: attention and an MLP, each added to its input [batch, length, width]."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Head(nn.Module):
    """Logits of every place, or of the text as a whole: [batch, length, width] to [batch, (length,) classes]."""

    def __init__(self, width: int, classes: int, whole: bool) -> None:
        super().__init__()
        self.norm, self.head, self.whole = nn.LayerNorm(width), nn.Linear(width, classes), whole

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x.mean(1) if self.whole else x))
