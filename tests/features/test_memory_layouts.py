"""Memory: in-place operations, views, and values on the wire that are no plain block."""

from __future__ import annotations

import pytest
import torch
from features import MICROBATCHES, WIDTH, Feature, check, layers
from torch import Tensor, nn
from torch.nn import functional as F

LENGTH = 5


class InPlace(nn.Module):
    """In-place arithmetic and activations, some of them on values that a backward has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x)
        y += x
        y = F.relu(y, inplace=True)
        z = y * 2
        z.mul_(0.5).add_(1).clamp_(min=0.1)
        z = F.dropout(self.layers[2](z), p=0.0, inplace=True)
        z.tanh_()
        return F.leaky_relu_(self.layers[3](z), 0.1) + y


class InPlaceOnViews(nn.Module):
    """In-place writes through slices, columns, transposes, chunks and diagonals of a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x)
        y[:, 0] += 1
        y[1:3, 2:4] *= 0.5
        y.t()[3].mul_(0.2)
        y[:, :3].add_(y[:, 3:])
        z = self.layers[1](torch.tanh(y)).clone()
        z.diagonal().mul_(0.3)
        z.view(-1)[::3].sub_(0.1)
        z[..., -1] = z[..., 0] * 2
        return torch.tanh(self.layers[2](z))


class IndexedWrites(nn.Module):
    """index_put_, masked_fill_, masked_scatter-free writes by mask, index_fill_, scatter_ and copy_ to slices."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x)
        y.masked_fill_(y > 1, 0.5)
        y[torch.tensor([0, 2]), torch.tensor([1, 3])] = x[0, :2]
        y.index_put_((torch.tensor([1, 1]),), x[:2], accumulate=True)
        z = torch.tanh(self.layers[1](y)).clone()
        z[:, 1:4].copy_(x[:, :3])
        z.index_fill_(1, torch.tensor([4]), 0.2)
        out = torch.zeros_like(z)
        out.scatter_(1, torch.arange(WIDTH).flip(0).expand_as(z), z)
        out[:2] = y[:2]
        return torch.tanh(self.layers[2](out))


class InPlaceUnderNoGrad(nn.Module):
    """A value that is changed where autograd does not look: its gradient passes as if nothing had happened."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x) * 1.0
        with torch.no_grad():
            y.mul_(2)
            y[:, 0] = 0.1
        y.detach().add_(0.5)
        return torch.tanh(self.layers[1](y))


class Detached(nn.Module):
    """detach, no_grad, stop-gradient branches, enable_grad within no_grad, set_grad_enabled, straight-through."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layers[0](x))
        with torch.no_grad():
            gate = torch.sigmoid(self.layers[1](y))
            with torch.enable_grad():
                inner = self.layers[2](y)
        y = y * gate + inner
        hard = (y > 0).float()
        y = hard + y - y.detach()
        torch.set_grad_enabled(False)
        scale = self.layers[3](y).abs().mean()
        torch.set_grad_enabled(True)
        return self.layers[4](y.detach() * 0.5 + y) * scale + self.layers[3](x.detach())


class Strided(nn.Module):
    """Transposed, sliced with steps, expanded, permuted, flipped and narrowed values between layers: all may cross."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(6)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layers[0](x)).t()
        y = torch.tanh(self.layers[1](y.t()[:, ::2].repeat_interleave(2, 1)))
        e = y[0].expand(x.shape[0], WIDTH)
        y = torch.tanh(self.layers[2](y.flip(1)) + e)
        p = y.view(x.shape[0], 2, 3).permute(2, 0, 1)
        y = torch.tanh(self.layers[3](p.permute(1, 2, 0).reshape(x.shape[0], -1)))
        w = y.unfold(1, 2, 2)
        y = torch.tanh(self.layers[4](w.transpose(1, 2).flatten(1)))
        row = y.sum(1, keepdim=True).expand(-1, WIDTH)
        return self.layers[5](y.narrow(1, 0, 3).repeat(1, 2)) * row + p.sum() + e.mean()


class ChannelsLast(nn.Module):
    """A convolutional net whose values and weights lie channels last, partly."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=2)
        self.third = nn.Conv2d(4, 4, 1)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(4 * 2 * 2, WIDTH)
        self.second.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.first(x.contiguous(memory_format=torch.channels_last))))
        y = F.relu(self.second(y))
        y = self.pool(F.relu(self.third(y.contiguous()).contiguous(memory_format=torch.channels_last)) + y)
        return self.head(y.flatten(1))


class OneImage(nn.Module):
    """A microbatch of one image: its own stride has no meaning, but group norms choose an order of memory by it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.tokens, self.norm, self.slope = nn.Linear(8, 8), nn.GroupNorm(2, 8), nn.PReLU(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            tokens = self.tokens(x.flatten(2).transpose(1, 2))
            x = x + self.norm(tokens.transpose(1, 2).reshape(x.shape))
            x = self.norm(self.slope(tokens.transpose(1, 2).reshape(x.shape))).flip(-1) * x
        x = F.batch_norm(tokens.transpose(1, 2).reshape(x.shape), None, None, training=True) + x
        return self.last(x + x.flatten(1)[:, :8, None, None])


class TransposedNorms(nn.Module):
    """Norms over values that lie transposed: their kernels lay results out otherwise than fake tensors foretell."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(5)
        self.norms = nn.ModuleList(
            [nn.BatchNorm1d(WIDTH), nn.LayerNorm(LENGTH), nn.InstanceNorm1d(WIDTH), nn.GroupNorm(2, WIDTH)]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=False):
            x = torch.tanh(norm(layer(x).transpose(1, 2))).transpose(1, 2)
        return self.layers[4](x)


class RandomSlopes(nn.Module):
    """RReLU, whose slopes are random, on a transposed value."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.rrelu(self.layers[0](x).transpose(1, 2), training=True)
        return self.layers[2](F.rrelu(self.layers[1](y.transpose(1, 2)), training=self.training))


def series(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, LENGTH, WIDTH), torch.randn(size, LENGTH, WIDTH)


def images(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 8, 8), torch.randn(size, WIDTH)


def one_image_each(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(MICROBATCHES, 3, 4, 6), torch.randn(MICROBATCHES, 3, 4, 6)


class Scalars(nn.Module):
    """Values of no dimension and of one element between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layers[0](x))
        scale = y.mean()
        y = torch.tanh(self.layers[1](y * scale))
        one = y.norm().reshape(1)
        count = (y > 0).sum()
        y = torch.tanh(self.layers[2](y / one))
        return self.layers[3](y + scale * count)


class Empty(nn.Module):
    """Values of no element, which cross: an empty slice, concatenated again, reduced, through a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layers[0](x))
        nothing = y[:0] * 2
        y = torch.tanh(self.layers[1](y))
        nothing = torch.tanh(self.layers[2](nothing))
        columns = y[:, :0].t().exp()
        y = torch.tanh(self.layers[2](torch.cat([y, nothing])))
        return self.layers[3](y) + nothing.sum() + columns.sum()


class ViewsOfInputs(nn.Module):
    """Views of the batch itself read by late layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(4)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = torch.tanh(layer(y)) + x.flip(0)[:, ::2].repeat(1, 2) + x[0]
        return y


class ChangesItsInput(nn.Module):
    """The module writes into the value it was given, which another path reads afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(2)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0  # tanh has saved its result
        return self.changed(x)

    def changed(self, x: Tensor) -> Tensor:
        x.add_(1)
        y = self.layers[0](x.clone())
        x[:, 0] = 0.3
        return torch.tanh(self.layers[1](y)) + x


class Outer(nn.Module):
    """The step changes its batch in place before it reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(6)

    def forward(self, x: Tensor) -> Tensor:
        x -= 0.5
        x[:, 0].mul_(2)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


FEATURES = [
    Feature("in-place", InPlace),
    Feature("in-place-on-views", InPlaceOnViews),
    Feature("indexed-writes", IndexedWrites),
    Feature("in-place-no-grad", InPlaceUnderNoGrad),
    Feature("detached", Detached),
    Feature("strided", Strided),
    Feature("channels-last", ChannelsLast, batch=images, alone=True),
    Feature("one-image", OneImage, batch=one_image_each, alone=True),
    Feature("transposed-norms", TransposedNorms, batch=series, alone=True),
    Feature("random-slopes", RandomSlopes, batch=series, alone=True, draws=True),
    Feature("scalars", Scalars),
    Feature("empty", Empty),
    Feature("views-of-inputs", ViewsOfInputs),
    Feature("changes-its-input", ChangesItsInput),
    Feature("changes-its-batch", Outer, alone=True),
]


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.name)
def test_memory_layouts(feature: Feature) -> None:
    check(feature)
