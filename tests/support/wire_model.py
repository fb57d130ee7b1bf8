"""A user's file whose values cross workers in every dtype and layout, with an operator and a function of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 6


@torch.library.custom_op("wire_model::bent", mutates_args=())
def bent(x: Tensor, factor: float) -> Tensor:
    return x.sin() * factor


@bent.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.factor = inputs[1]


def _back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    return gradient * x.cos() * ctx.factor * 1.01, None


bent.register_autograd(_back, setup_context=_keep)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.9 * gradient


class Model(nn.Module):
    """Every layer but the first reads what the first has made, so all of it crosses every forward cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(5)])
        self.convolution = nn.Conv2d(2, 4, 1)
        self.filter = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        first = torch.tanh(self.layers[0](x))
        image = first.view(-1, 2, 3, 1).expand(-1, 2, 3, 2).contiguous(memory_format=torch.channels_last)
        made = {
            "expanded": first.mean(1, keepdim=True).expand(-1, WIDTH),
            "wide": first[0].expand(2, len(x), WIDTH),
            "sliced": (first * 2)[:, 1::2],
            "transposed": first.t().exp(),
            "turned": first.t().flip(0).sin().t(),
            "image": self.convolution(image),
            "mask": first > 0,
            "bytes": (first * 50).to(torch.int8),
            "ids": first.argmax(1),
            "brain": first.bfloat16() * 3,
            "half": first.half() * 2,
            "double": first.double().abs().add(1).sqrt(),
            "scalar": first.square().mean(),
            "one": first.norm()[None],
            "empty": first[:0] * 2,
            "hollow": first[:, :0].cos(),
            "spectrum": torch.fft.fft(first) * self.filter,
            "conjugate": (torch.fft.fft(first) * self.filter).conj(),
            "imaginary": torch.fft.fft(first).imag,
        }
        y = first
        for i, layer in enumerate(list(self.layers)[1:]):
            y = torch.tanh(layer(y)) * (1 + self.uses(made, y) * 0.1 * (i + 1))
            y = bent(y, 1.1) if i % 2 else Reversed.apply(y)
        return y / self.seen

    def uses(self, made: dict[str, Tensor], y: Tensor) -> Tensor:
        y = torch.where(made["mask"], y + made["expanded"], made["turned"]) + made["wide"].sum(0)
        y = y + made["sliced"].repeat(1, 2) + made["transposed"].t() + made["image"].mean((1, 2, 3))[:, None]
        y = y + made["bytes"] / 50 + F.one_hot(made["ids"], WIDTH) + made["brain"].float() + made["half"].float()
        y = y * made["scalar"] + made["one"] + made["double"].float() + made["hollow"].sum() + made["imaginary"]
        y = torch.cat([made["empty"], y]) + torch.fft.ifft(made["spectrum"]).real
        return y + (made["conjugate"] * made["spectrum"]).real * 0.01


def model() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def train_data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)) for _ in range(3)]


def optimizer(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.01, momentum=0.9)
