"""Operators whose kernels lay results out otherwise than their fake implementations predict, and models of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


@torch.library.custom_op("fxpipe_test::packed", mutates_args=())
def packed(x: Tensor) -> Tensor:
    """Twice `x`, contiguous; predicted to lie as `x` does."""
    return (x * 2).contiguous()


@torch.library.custom_op("fxpipe_test::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    """Twice `x`, its last dimension outermost; predicted to be contiguous."""
    return (x * 2).movedim(-1, 0).contiguous().movedim(0, -1)


@torch.library.custom_op("fxpipe_test::raw", mutates_args=())
def raw(x: Tensor) -> Tensor:
    """A copy of `x` that takes its memory to be contiguous, as kernels do whose callers make it so."""
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride()).clone()


@torch.library.custom_op("fxpipe_test::channels_last", mutates_args=())
def channels_last(x: Tensor) -> Tensor:
    """Twice `x`, channels last; predicted to be contiguous."""
    return torch.empty_like(x, memory_format=torch.channels_last).copy_(x * 2)


packed.register_fake(torch.empty_like)
for _operator in (turned, raw, channels_last):
    _operator.register_fake(lambda x: x.new_empty(x.shape))


def _saves_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    pass


packed.register_autograd(lambda ctx, gradient: packed(gradient), setup_context=_saves_nothing)
turned.register_autograd(lambda ctx, gradient: turned(gradient), setup_context=_saves_nothing)
raw.register_autograd(lambda ctx, gradient: gradient * 1, setup_context=_saves_nothing)
channels_last.register_autograd(lambda ctx, gradient: channels_last(gradient), setup_context=_saves_nothing)


class Middle(nn.Module):
    """Two layers with `middle` between them, on values [sample, channel, time]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.middle(self.first(x).transpose(1, 2)).transpose(1, 2))
        return y

    def middle(self, x: Tensor) -> Tensor:
        return x


class Fails(Middle):
    """The last layer's view needs the layout that was predicted."""

    def middle(self, x: Tensor) -> Tensor:
        return packed(x).tanh()


class Differs(Middle):
    """`contiguous` finds nothing to do where the value is predicted to be so: another operator then reads wrongly."""

    def middle(self, x: Tensor) -> Tensor:
        return raw(turned(x).tanh().contiguous())


class Narrow(Middle):
    """A dimension of one element, whose stride says nothing and yet makes a convolution choose channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 3, 1)

    def middle(self, x: Tensor) -> Tensor:
        y: Tensor = self.convolution(channels_last(x[:, None].contiguous()))
        return y.reshape(len(y), -1, x.shape[-1])[:, : x.shape[1]]


class Remembers(Middle):
    """A buffer whose new value lies otherwise than the first one, and is read by a view in the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8, 5))

    def middle(self, x: Tensor) -> Tensor:
        y = x + self.seen.reshape(5, 8).t()
        self.seen = x.detach().mean(0).t().contiguous().t() * 0.5
        return y.tanh()


WRONG = (Fails, Differs, Narrow, Remembers)


def series() -> Tensor:
    """A batch [sample, time, feature]."""
    torch.manual_seed(1)
    return torch.randn(4, 5, 6)


def squared(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()
