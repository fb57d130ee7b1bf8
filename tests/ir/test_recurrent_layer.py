"""Recurrent layers as operators: eager PyTorch's bits, forward and backward, whichever kernel computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import covering
from torch import Tensor, nn
from torch.library import opcheck

import fxpipe
from fxpipe.ir.recurrent_layer import has_kernel, recurrent_layer, recurrent_layer_backward

CASES = {
    "lstm": lambda **options: nn.LSTM(4, 5, **options),
    "projection": lambda **options: nn.LSTM(4, 5, proj_size=3, **options),
    "gru": lambda **options: nn.GRU(4, 5, **options),
    "rnn_tanh": lambda **options: nn.RNN(4, 5, **options),
    "rnn_relu": lambda **options: nn.RNN(4, 5, nonlinearity="relu", **options),
}


@pytest.mark.parametrize(
    ("case", "dtype", "both", "bias"),
    covering(CASES, [torch.float32, torch.float64, torch.bfloat16], [False, True], [True, False]),
)
def test_a_layer_has_the_bits_of_eager(case: str, dtype: torch.dtype, both: bool, bias: bool) -> None:
    torch.manual_seed(0)
    kind = "lstm" if case == "projection" else case
    layer: Any = CASES[case](bidirectional=both, bias=bias).to(dtype)
    sizes = {"projection": (3, 5), "lstm": (5, 5)}.get(case, (5,))
    hidden = [torch.randn(1 + both, 3, size, dtype=dtype, requires_grad=True) for size in sizes]
    x = torch.randn(6, 3, 4, dtype=dtype, requires_grad=True)
    output, last = layer(x, hidden[0] if len(hidden) == 1 else tuple(hidden))
    last = [last] if isinstance(last, Tensor) else list(last)
    given = [torch.randn_like(output), torch.randn_like(last[0])]
    leaves = [x, *hidden, *layer.parameters()]
    expected = torch.autograd.grad([output, last[0]], leaves, given, materialize_grads=True)

    with torch.no_grad():
        own, weights = [h.detach() for h in hidden], [p.detach() for p in layer.parameters()]
        results = recurrent_layer(kind, x.detach(), own, weights, bias)
        gradients = [*given, *[None] * (len(hidden) - 1)]
        found = recurrent_layer_backward(gradients, results, kind, x.detach(), own, weights, bias)
    assert all(torch.equal(*pair) for pair in zip(results, [output, *last], strict=False))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert (results[-2].numel() > 0) == has_kernel(kind, x, hidden)
    opcheck(recurrent_layer, (kind, x.detach(), own, weights, bias), test_utils="test_faketensor")
    opcheck(
        recurrent_layer_backward,
        (gradients, results, kind, x.detach(), own, weights, bias),
        test_utils="test_faketensor",
    )


class Stacked(nn.Module):
    def __init__(self, make: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.layers = make(num_layers=2, batch_first=True, bidirectional=True, dropout=0.5)
        self.head = nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        output, last = self.layers(x)
        last = last if isinstance(last, Tensor) else last[0]
        out: Tensor = self.head(output.mean(1)) + last.mean((0, 2))[:, None]
        return out


def compiled(model: nn.Module, loss: Any, **options: Any) -> fxpipe.Build:
    torch.manual_seed(0)
    x = torch.randn(4, 6, 4, dtype=next(model.parameters()).dtype)
    return fxpipe.compile(model, loss, x, workers=2, cost="analytic", **options)


def calls(build: fxpipe.Build) -> int:
    return sum(text.count("recurrent_layer.default(") for text in build.files.values())


@pytest.mark.parametrize("case", CASES)
def test_a_module_is_one_operator_a_layer(case: str) -> None:
    model = Stacked(CASES[case])
    model(torch.randn(4, 6, 4))
    build = compiled(model, lambda model, x: model(x).square().mean(), microbatches=2)
    assert calls(build) == 2
    assert "import fxpipe.ir.recurrent_layer" in "".join(build.files.values())
    assert not build.warnings, build.warnings  # microbatches are proved to give the whole batch's loss


def test_gradients_that_are_differentiated_go_through_the_steps() -> None:
    """A gradient penalty: torch's kernels have no second derivative."""
    model = nn.LSTM(4, 5).double()

    def loss(model: Any, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        (gradient,) = torch.autograd.grad(model(x)[0].square().sum(), x, create_graph=True)
        return gradient.square().mean()

    x = torch.randn(4, 6, 4, dtype=torch.float64)
    expected = torch.autograd.grad(loss(model, x.clone()), list(model.parameters()))
    build = fxpipe.compile(model, loss, x, workers=1, cost="analytic")
    with build.local(optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1.0)) as pipeline:
        before = {name: value.clone() for name, value in pipeline.state_dict().items()}
        pipeline.step(x.clone())
        pipeline.flush()
        for (name, value), gradient in zip(pipeline.state_dict().items(), expected, strict=True):
            torch.testing.assert_close(before[name] - value, gradient, rtol=1e-9, atol=1e-12)
