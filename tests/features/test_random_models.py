"""Random models of random blocks, each a language feature, under random legal cuts: against eager PyTorch.

All computes in float64: there no difference of rounding flips a comparison, an order or a cast behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from features import MICROBATCHES, Feature, agrees, lowered
from hypothesis import given
from hypothesis import strategies as st
from random_cuts import legal_cuts, with_units
from searched import searched
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 4
SIZE = 8


class OddSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x * ctx.factor, None


class Block(nn.Module):
    """A layer of parameters, a buffer, and the feature: a method that maps [size, WIDTH] to the same."""

    def __init__(self, kind: str, tied: Block | None) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("state", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)
        if tied is not None:
            self.layer.weight = tied.layer.weight
        made = MODULES.get(kind)
        self.inner = made() if made else None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(FEATURES[self.kind](self, x, y)) + 0.3 * y


def conv(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return block.inner(x.view(-1, 1, 2, 2).contiguous(memory_format=torch.channels_last)).flatten(1)


def recurrent(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return block.inner(x.unflatten(1, (2, 2)))[0].flatten(1)


def frozen(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return F.linear(x, block.layer.weight.detach()) + block.layer.bias


def counter(block: Block, x: Tensor, y: Tensor) -> Tensor:
    block.count += 1
    return block.layer(x) / block.count


def averaged(block: Block, x: Tensor, y: Tensor) -> Tensor:
    out = block.layer(x - block.state)
    block.state = 0.9 * block.state + 0.1 * x.detach().mean(0)
    return out


def averaged_in_place(block: Block, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        block.state.mul_(0.5).add_(x.mean(0))
    return block.layer(x) * block.state


def in_place(block: Block, x: Tensor, y: Tensor) -> Tensor:
    out = block.layer(x)
    out[:, 1:3] *= 2
    out.add_(y).t()[0].sub_(1)
    return out.relu_()


def written(block: Block, x: Tensor, y: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[::2] = block.layer(x)[::2]
    out.masked_fill_(y > 1, 0.5).index_put_((torch.tensor([0, 1]), torch.tensor([1, 2])), y[:2, 0])
    return out


def transposed(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return block.layer((x.t() * y.t()).t().flip(1)[:, ::2].repeat(1, 2))


def expanded(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return x.mean(1, keepdim=True).expand(-1, WIDTH) * block.layer(y) + x[0].expand_as(x)


def permuted(block: Block, x: Tensor, y: Tensor) -> Tensor:
    cube = x.view(-1, 2, 2).permute(2, 0, 1) + y.sum()
    return block.layer(cube.permute(1, 2, 0).reshape(x.shape))


def masked(block: Block, x: Tensor, y: Tensor) -> Tensor:
    scores = block.layer(x) @ y.t()
    causal = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(causal, float("-inf")).softmax(-1) @ x


def chosen(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return torch.where((x > 0) & (y < 1), block.layer(x), 0.1 * y)


def checkpointed(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return checkpoint(lambda a, b: torch.tanh(block.layer(torch.tanh(block.layer(a)) + b)), x, y, use_reentrant=False)


def reentrant(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return checkpoint(lambda a: torch.sigmoid(block.layer(a)) * a.sin(), x * y, use_reentrant=True)


def without_gradient(block: Block, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(block.layer(y))
    return block.layer(x) * gate


def detached(block: Block, x: Tensor, y: Tensor) -> Tensor:
    hard = (x > 0).to(x)
    return block.layer(hard + x - x.detach()) + y.detach()


def own_function(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return OddSquare.apply(block.layer(x), 0.7)


def fourier(block: Block, x: Tensor, y: Tensor) -> Tensor:
    spectrum = torch.fft.fft(block.layer(x)) * torch.fft.fft(y).conj()
    return torch.fft.ifft(spectrum).real + spectrum.imag * 0.1


def low_precision(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return (x.bfloat16() @ block.layer.weight.bfloat16()).to(x)


def summed(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return torch.einsum("bi,ci,cj->bj", block.layer(x), y, x) / SIZE


def gathered(block: Block, x: Tensor, y: Tensor) -> Tensor:
    ids = (y * 3).long().abs() % WIDTH
    return block.layer(x).gather(1, ids) + torch.zeros_like(x).scatter_add(1, ids, x)


def sorted_rows(block: Block, x: Tensor, y: Tensor) -> Tensor:
    values, places = block.layer(x).topk(2, dim=1)
    return values.repeat(1, 2) + x[y[:, 0].argsort()] + places[:, :1]


def scalars(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return block.layer(x) * y.square().mean() + (x > 0).sum() / x.numel()


def empty(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return block.layer(torch.cat([x, (y * 2)[:0]])) + y[:, :0].exp().sum()


def hooked(block: Block, x: Tensor, y: Tensor) -> Tensor:
    out = block.layer(x)
    out.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
    return out


def embedded(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return F.embedding((x > 0).long().sum(1) % WIDTH, block.layer.weight) + y


def plain(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return block.layer(x) if block.inner is None else block.inner(block.layer(x))


def attending(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return block.inner(x[None], y[None], y[None], need_weights=False)[0][0]


def chunked(block: Block, x: Tensor, y: Tensor) -> Tensor:
    a, b = block.layer(x).chunk(2, dim=1)
    return torch.stack([a * b, y.view(-1, 2, 2).unbind(1)[0]], dim=2).flatten(1)


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Conv2d(2, 1, 1))


def weight_normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


def spectral_normed() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "conv": convolution,
    "lstm": lambda: nn.LSTM(2, 2, batch_first=True),
    "gru": lambda: nn.GRU(2, 1, batch_first=True, bidirectional=True),
    "attention": lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "weight norm": weight_normed,
    "spectral norm": spectral_normed,
    "dropout": lambda: nn.Dropout(0.3),
}
FEATURES: dict[str, Callable[[Block, Tensor, Tensor], Tensor]] = {
    "plain": plain,
    "tied": plain,
    "conv": conv,
    "lstm": recurrent,
    "gru": recurrent,
    "attention": attending,
    "batch norm": plain,
    "layer norm": plain,
    "weight norm": plain,
    "spectral norm": plain,
    "dropout": plain,
    "frozen": frozen,
    "counter": counter,
    "average": averaged,
    "average in place": averaged_in_place,
    "in place": in_place,
    "written": written,
    "transposed": transposed,
    "expanded": expanded,
    "permuted": permuted,
    "masked": masked,
    "where": chosen,
    "checkpoint": checkpointed,
    "reentrant": reentrant,
    "no_grad": without_gradient,
    "detached": detached,
    "function": own_function,
    "fourier": fourier,
    "bfloat16": low_precision,
    "einsum": summed,
    "gather": gathered,
    "sort": sorted_rows,
    "scalars": scalars,
    "empty": empty,
    "hook": hooked,
    "embedding": embedded,
    "chunks": chunked,
}
Row = tuple[str, int, int, bool]  # kind, which earlier values it reads, whether its weight is the last one's


class Random(nn.Module):
    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__()
        self.rows = rows
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList()
        for kind, _, _, tied in rows:
            earlier = self.blocks[-1] if self.blocks and (tied or kind == "tied") else None
            self.blocks.append(Block(kind, earlier))  # type: ignore[arg-type]
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        # Blocks read values of weights alone: what a model sums over the batch itself, fxpipe sums over the whole
        # batch (passes/whole_loss.py), and the eager step that these models are held to has microbatches.
        values = [self.enter(x)]
        for block, (_, a, b, _) in zip(self.blocks, self.rows, strict=True):
            values.append(block(values[-1 - a % len(values)], values[-1 - b % len(values)]))
        return values[-1]


def batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH, dtype=torch.float64), torch.randn(size, WIDTH, dtype=torch.float64)


ROWS = st.lists(
    st.tuples(st.sampled_from(sorted(FEATURES)), st.integers(0, 3), st.integers(0, 3), st.booleans()),
    min_size=3,
    max_size=7,
)


def check(rows: Sequence[Row], seed: int) -> None:
    kinds = {kind for kind, *_ in rows}
    feature = Feature(
        "random",
        lambda: Random([("plain", 0, 0, False), *rows, ("plain", 0, 1, False)]),
        batch=batch,
        alone=True,
        draws="dropout" in kinds,
        tolerance=1e-2 if "bfloat16" in kinds else 1e-8,
    )
    program = feature.program()
    numbered = with_units(program, MICROBATCHES)
    for part in range(2):
        cuts = legal_cuts(numbered, 3, f"{seed}/{part}")
        agrees(feature, lowered(program, cuts, split_backward=part == 1))


@pytest.mark.slow
@searched(10)
@given(rows=ROWS, seed=st.integers(0, 10**6))
def test_random_models(rows: list[Row], seed: int) -> None:
    check(rows, seed)


@pytest.mark.slow
@searched(25, derandomize=False)
@given(rows=ROWS, seed=st.integers(0, 10**6))
def test_many_random_models(rows: list[Row], seed: int) -> None:
    check(rows, seed)
