"""FLOPs and tokens of a step, against what the field's formulas say of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.costs.step_work import StepWork, step_work
from fxpipe.ir.transform import run_passes
from fxpipe.passes import front_passes

BATCH, LENGTH, WIDTH, WORDS = 4, 16, 32, 100
HIDDEN = 4 * WIDTH


class Block(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(BATCH, LENGTH, 4, 8).transpose(1, 2) for part in self.qkv(x).split(WIDTH, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))
        return x + self.down(F.gelu(self.up(x)))


class Words(nn.Module):
    def __init__(self, again: bool = False, causal: bool = True) -> None:
        super().__init__()
        self.again = again
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block(causal) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(x)


def predict(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def work(model: nn.Module, step: Any, batch: Any, **options: Any) -> StepWork:
    return step_work(run_passes(fxpipe.capture(model, step, batch, **options), front_passes()))


def ids(*shape: int) -> Tensor:
    return torch.randint(WORDS, shape)


def palm(tokens: int) -> float:
    """6 a weight and token, and 12 a layer, position and feature of attention (Chowdhery et al. 2022, appendix B)."""
    weights = 2 * (WIDTH * 3 * WIDTH + WIDTH * WIDTH + 2 * WIDTH * HIDDEN) + WIDTH * WORDS
    return tokens * (6.0 * weights + 12 * 2 * LENGTH * WIDTH)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_gpt_computes_what_palms_formula_says(again: bool, causal: bool) -> None:
    tokens = BATCH * LENGTH
    found = work(Words(again, causal), predict, ids(BATCH, LENGTH + 1))
    assert found == {"flops": {"float32": palm(tokens)}, "tokens": tokens}


def test_flops_are_told_apart_by_dtype() -> None:
    found = work(Words(), predict, ids(BATCH, LENGTH + 1), autocast="bf16")
    assert found["flops"] == {"bfloat16": palm(BATCH * LENGTH)}


def test_frozen_weights_have_no_gradients_to_count() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()
    model[0].requires_grad_(False)
    found = work(model, lambda m, x: m(x).sum(), torch.randn(10, 8).double())
    assert found == {"flops": {"float64": 2.0 * 10 * (8 * 16 + 2 * 16 * 4)}, "tokens": 0}


def test_a_convolution_counts_three_times_but_for_what_no_gradient_goes_to() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
    found = work(model, lambda m, x: m(x).mean(), torch.randn(2, 3, 6, 6))
    first, second = (2.0 * 2 * 36 * 9 * a * b for a, b in ((3, 8), (8, 4)))
    assert found == {"flops": {"float32": 2 * first + 3 * second}, "tokens": 0}


class Ids(nn.Module):
    """Looks ids up and goes on in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.embed, self.other = nn.Embedding(WORDS, WIDTH), nn.Embedding(2, WIDTH)
        self.lstm, self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)
        self.wide, self.convolution = nn.Linear(LENGTH * WIDTH, 8), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, *given: Tensor) -> Tensor:
        found = self.embed(given[0])
        match self.way:
            case "lstm":
                return self.lstm(found)[0]
            case "convolution":
                return self.convolution(found.transpose(1, 2))
            case "categories":
                return self.wide(found.flatten(1))
            case "bag":
                return self.layer(found.mean(1))
            case "label":
                return self.layer(self.embed(given[0][:, 0]))
            case "segments":
                return self.layer(found + self.other((given[1] > 3).long()))
            case "two":
                return self.layer(found).sum() + self.layer(self.embed(given[1])).sum()
        return self.layer(found)


@pytest.mark.parametrize(
    ("way", "batch", "tokens"),
    [
        ("layer", (ids(BATCH, LENGTH),), BATCH * LENGTH),
        ("lstm", (ids(BATCH, LENGTH),), BATCH * LENGTH),
        ("convolution", (ids(BATCH, LENGTH),), BATCH * LENGTH),
        ("segments", (ids(BATCH, LENGTH), ids(BATCH, LENGTH)), BATCH * LENGTH),
        ("categories", (ids(BATCH, LENGTH),), 0),
        ("bag", (ids(BATCH, LENGTH),), 0),
        ("label", (ids(BATCH, LENGTH),), 0),
        ("layer", (ids(BATCH),), 0),
        ("two", (ids(BATCH, LENGTH), ids(BATCH, 3)), 0),
    ],
)  # fmt: skip
def test_tokens_are_the_positions_of_sequences(way: str, batch: tuple[Tensor, ...], tokens: int) -> None:
    assert work(Ids(way), lambda m, b: m(*b).float().mean(), batch)["tokens"] == tokens


def test_an_operator_of_ones_own_may_multiply_anything() -> None:
    @torch.library.custom_op("own_work::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return 2 * x

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda ctx, g: 2 * g)
    found = work(nn.Linear(4, 4), lambda m, x: twice(m(x)).sum(), torch.randn(2, 4))
    assert found["flops"] == {}
    assert work(nn.Linear(4, 4), lambda m, x: m(x).sum(), torch.randn(2, 4))["flops"]
