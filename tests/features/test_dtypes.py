"""Dtypes: integers, booleans, low precision, autocast, complex numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from features import WIDTH, Around, Feature, check, layers, squared
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Integers(nn.Module):
    """Integers, booleans and bytes that are made in one layer and read in later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(4)
        self.table = nn.Embedding(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layers[0](x))
        ids = (y * 3).round().long().sum(1).remainder(7)
        positive = y > 0
        small = (y * 10).to(torch.int8)
        y = torch.tanh(self.layers[1](y)) + self.table(ids)
        order = y.argsort(dim=1)
        y = torch.tanh(self.layers[2](torch.where(positive, y, 0.1 * y)))
        y = y.gather(1, order) + small / 10
        return self.layers[3](y) * positive.logical_not().to(y.dtype) + (ids % 2 == 0)[:, None]


class LowPrecision(nn.Module):
    """bfloat16, float16 and float64 modules inside a float32 model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(2)
        self.brain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).bfloat16()
        self.norm = nn.LayerNorm(WIDTH).bfloat16()
        self.fp16 = nn.Linear(WIDTH, WIDTH).half()
        self.fp64 = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layers[0](x)).bfloat16()
        y = self.norm(self.brain(y) + y)
        y = torch.tanh(self.fp16(y.half())).float()
        y = torch.tanh(self.fp64(y.double()))
        return self.layers[1](y.to(x))


class Mixed(nn.Module):
    """What runs under autocast: low-precision products, float32 norms, batch norm, a checkpoint, a region without."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(5)
        self.norm = nn.LayerNorm(WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.convolution = nn.Conv1d(2, 2, 3, padding=1)
        self.group_norm = nn.GroupNorm(2, 2)
        self.shared = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.batch_norm(self.norm(torch.tanh(self.layers[0](x))))
        y = checkpoint(self.block, y, use_reentrant=False)
        with torch.autocast(x.device.type, enabled=False):
            y = torch.tanh(self.layers[3](y.float()))
        y = self.group_norm(self.convolution(y.unflatten(1, (2, 3)))).flatten(1)
        return self.layers[4](y @ self.shared) @ self.shared.t()

    def block(self, x: Tensor) -> Tensor:
        return self.layers[2](F.gelu(self.layers[1](x))) + x


class Fourier(nn.Module):
    """FFT, complex weights, a product, the inverse FFT: complex values between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(2)
        self.filter = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.split_filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2))
        self.register_buffer("phase", torch.polar(torch.ones(WIDTH), torch.linspace(0, 3, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.fft.fft(torch.tanh(self.layers[0](x)))
        y = y * self.filter
        y = torch.fft.ifft(y.conj() * self.phase)
        y = y.real + y.imag * y.abs()
        z = torch.fft.rfft(y, norm="ortho") * torch.view_as_complex(self.split_filter)
        z = torch.fft.irfft(z, n=WIDTH, norm="ortho")
        return self.layers[1](z) + torch.view_as_real(torch.complex(z, y)).sum(-1) * torch.angle(self.phase)


class Conjugated(nn.Module):
    """Real and imaginary parts of conjugates and of views of them: marks on tensors that travel as plain memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(3)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(self.layers[0](x), x).conj()
        y = torch.tanh(self.layers[1](z.imag))
        turned = z.unsqueeze(1).transpose(0, 1)
        y = y + turned.imag[0] + z.real
        return self.layers[2](y) + turned[0].real * z.resolve_conj().imag


class ComplexLayers(nn.Module):
    """Layers with complex weights: products, a complex tanh, rotary embedding by complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.complex64)
        self.second = nn.Linear(WIDTH, WIDTH, dtype=torch.complex64)
        self.register_buffer("turn", torch.polar(torch.ones(3), torch.linspace(0, 1, 3)))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x.to(torch.complex64)))
        y = self.second(y).mH.transpose(-2, -1).conj()
        pairs = y.real.reshape(-1, 3, 2).contiguous()
        y = torch.view_as_real(torch.view_as_complex(pairs) * self.turn).flatten(1) + y.imag
        return torch.tanh(y)


class Promotion(nn.Module):
    """Python numbers, integers and tensors of no dimension mixed with floats; scalars of other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(3)
        self.register_buffer("whole", torch.arange(WIDTH))
        self.register_buffer("wide", torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layers[0](x)) * self.whole / 3 + self.wide
        y = torch.tanh(self.layers[1](y)).detach() // 0.3 + y % 2 + self.whole.float().mean()
        return self.layers[2](y * True - 1)


def brain_model() -> nn.Module:
    return Around(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh())).bfloat16()


def brains(size: int) -> Any:
    return torch.randn(size, WIDTH).bfloat16(), torch.randn(size, WIDTH).bfloat16()


FEATURES = [
    Feature("integers", Integers),
    Feature("low-precision", LowPrecision),
    Feature("autocast", Mixed, autocast="bf16"),
    Feature("fourier", Fourier),
    Feature("complex-layers", ComplexLayers),
    Feature("conjugated", Conjugated),
    Feature("promotion", Promotion),
    Feature("bfloat16", brain_model, squared, brains, alone=True),
]


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.name)
def test_dtypes(feature: Feature) -> None:
    check(feature)
