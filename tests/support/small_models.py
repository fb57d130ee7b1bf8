"""Small models with what makes pipelines go wrong: ties, skips, buffers, custom backwards, checkpoints, dict batches.

Each case gives a model, its loss and a generator of batches; `CASES` lists them by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        scores = (q @ k.transpose(-2, -1)) * (w // self.heads) ** -0.5
        y = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(b, t, w)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Tied embedding and head, one causal mask for all blocks, dropout."""

    def __init__(self, width: int = 16, depth: int = 4, vocabulary: int = 23, context: int = 8, dropout: float = 0.0):
        super().__init__()
        self.tok = nn.Embedding(vocabulary, width)
        self.pos = nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = nn.ModuleList([Block(width, 2, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids: Tensor) -> Tensor:
        t = ids.shape[1]
        mask = torch.ones(t, t, dtype=torch.bool, device=ids.device).tril()
        x = self.tok(ids) + self.pos[:t]
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class ConvNet(nn.Module):
    """Batch norm, so buffers with new values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for i in range(4):
            self.layers.append(
                nn.Sequential(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
            )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.pool(x).flatten(1))


class UNet(nn.Module):
    """Skips that jump over stages."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.down1 = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.down2 = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up1 = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.up2 = nn.ConvTranspose2d(16, 4, 2, stride=2)
        self.head = nn.Linear(8 * 8 * 8, 5)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.stem(x))
        b = F.relu(self.down1(a))
        c = F.relu(self.down2(b))
        d = F.relu(self.middle(c))
        y = F.relu(self.up1(torch.cat([d, c], 1)))
        y = F.relu(self.up2(torch.cat([y, b], 1)))
        return self.head(torch.cat([y, a], 1).flatten(1))


class ResidualLSTM(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, width)
        self.layers = nn.ModuleList([nn.LSTM(width, width, batch_first=True) for _ in range(4)])
        self.head = nn.Linear(width, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x[:, -1])


class ScaledSquare(torch.autograd.Function):
    """Its backward is deliberately not the derivative of its forward: losing it would show."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(6)])
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = ScaledSquare.apply(layer(x))
        return self.head(x)


class Checkpointed(nn.Module):
    """Blocks recomputed in backward: even ones by the non-reentrant form, odd ones by the reentrant form."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Tanh()) for _ in range(4)]
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            x = x + checkpoint(block, x, use_reentrant=i % 2 == 1)
        return self.head(x)


class DictModel(nn.Module):
    """Two inputs that enter at different places, a mask, a weight per sample, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(4, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.head = nn.Linear(8, 5)
        self.scale = nn.Parameter(torch.full((8,), 1.5), requires_grad=False)
        self.unused = nn.Parameter(torch.zeros(3))
        self.register_buffer("shift", torch.linspace(0, 1, 8))

    def forward(self, x: Tensor, extra: Tensor, keep: Tensor) -> Tensor:
        h = torch.tanh(self.a(x)) * self.scale
        for i, layer in enumerate(self.layers):
            h = torch.tanh(layer(h)) + self.shift
            if i == 1:
                h = h + self.b(extra)
        return self.head(torch.where(keep[:, None], h, h * 0.5))


def _classify(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def _next_token(model: nn.Module, batch: Any) -> Tensor:
    ids, targets = batch
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def _from_dict(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["inputs"]["x"], extra=batch["inputs"]["extra"], keep=batch["keep"])
    losses = F.cross_entropy(logits, batch["y"], reduction="none", label_smoothing=batch["smoothing"])
    return (losses * batch["weight"]).mean()


@dataclass(frozen=True)
class Case:
    """A model with its step.

    Attributes:
        paths: module paths in order of execution, for pinned cuts.
    """

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Callable[[int], Any]
    paths: tuple[str, ...]

    def make(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.model()

    def batches(self, count: int, size: int = 8) -> list[Any]:
        torch.manual_seed(1234)
        return [self.batch(size) for _ in range(count)]


def _images(size: int) -> Any:
    return torch.randn(size, 3, 8, 8), torch.randint(0, 5, (size,))


def _vectors(size: int) -> Any:
    return torch.randn(size, 6), torch.randint(0, 5, (size,))


def _dicts(size: int) -> Any:
    return {
        "inputs": {"x": torch.randn(size, 6), "extra": torch.randn(size, 4)},
        "keep": torch.rand(size) > 0.5,
        "y": torch.randint(0, 5, (size,)),
        "weight": torch.rand(size),
        "smoothing": 0.1,
    }


def _tokens(size: int) -> Any:
    return torch.randint(0, 23, (size, 8)), torch.randint(0, 23, (size, 8))


BLOCKS = tuple(f"blocks.{i}" for i in range(4))
LAYERS = tuple(f"layers.{i}" for i in range(4))
CASES = {
    case.name: case
    for case in (
        Case("gpt", GPT, _next_token, _tokens, ("tok", *BLOCKS, "head")),
        Case("gpt-dropout", lambda: GPT(dropout=0.2), _next_token, _tokens, ("tok", *BLOCKS, "head")),
        Case("conv", ConvNet, _classify, _images, (*LAYERS, "pool", "head")),
        Case("unet", UNet, _classify, _images, ("stem", "down1", "down2", "middle", "up1", "up2", "head")),
        Case("lstm", ResidualLSTM, _classify, lambda n: (torch.randint(0, 17, (n, 3)), torch.randint(0, 5, (n,))),
             ("embed", *LAYERS, "head")),
        Case("function", OwnFunction, _classify, _vectors, (*LAYERS, "layers.4", "layers.5", "head")),
        Case("checkpoint", Checkpointed, _classify, _vectors, ("first", *BLOCKS, "head")),
        Case("dict", DictModel, _from_dict, _dicts, ("a", *LAYERS, "head")),
    )
}  # fmt: skip
