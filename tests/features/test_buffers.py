"""Buffers: updated in place and by replacement, counted, not persistent, read before and after their update."""

from __future__ import annotations

import pytest
import torch
from features import WIDTH, Feature, check
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe


class Counters(nn.Module):
    """Counters of three dtypes, each counted in its own way; what they say enters the values."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int32), persistent=False)
        self.register_buffer("odd", torch.zeros((), dtype=torch.bool))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.calls = self.calls + 2
        self.odd.logical_not_()
        x = torch.tanh(self.layer(x)) * torch.where(self.odd, 1.0, 0.5)
        return x / (self.steps + self.calls)


class Averages(nn.Module):
    """Moving averages by replacement, mul_ and add_, lerp_, copy_, and through a slice; read before and after."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("replaced", "in_place", "lerped", "copied", "sliced"):
            self.register_buffer(name, torch.zeros(2, WIDTH) if name == "sliced" else torch.zeros(WIDTH))
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x - self.replaced))
        mean = x.detach().mean(0)
        self.replaced = 0.9 * self.replaced + 0.1 * mean
        x = torch.tanh(self.layers[1](x + self.replaced))
        with torch.no_grad():
            self.in_place.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.lerped.lerp_(x.mean(0), 0.2)
        x = torch.tanh(self.layers[2](x + self.in_place * self.lerped))
        self.copied.copy_(torch.maximum(self.copied, x.detach().amax(0)))
        self.sliced[1] = x.detach().mean(0)
        self.sliced[0, 1:3] += 1
        x = torch.tanh(self.layers[3](x + self.copied))
        return x + self.sliced.sum(0) * 0.1


class Norms(nn.Module):
    """Norms with buffers: batch norm without statistics, without weights, sync-free instance norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(
            [
                nn.BatchNorm1d(WIDTH, track_running_stats=False),
                nn.BatchNorm1d(WIDTH, affine=False, momentum=0.3),
            ]
        )
        self.instance = nn.InstanceNorm1d(2, track_running_stats=True)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = torch.tanh(norm(self.layer(x)))
        return self.instance(x.unflatten(1, (2, 3))).flatten(1) + x


class FrozenNorm(nn.Module):
    """Batch norms that the user has put into eval mode, and that a train() of the whole must not wake."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.norm.running_mean.uniform_(-1, 1)
        self.norm.running_var.uniform_(0.5, 2)
        self.norm.eval()
        self.live = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.live(torch.tanh(self.norm(x))))


class SharedBuffer(nn.Module):
    """One buffer under two names in two modules, updated in both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.BatchNorm1d(WIDTH, affine=False), nn.BatchNorm1d(WIDTH)
        self.b.running_mean = self.a.running_mean
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.tanh(self.layer(self.a(x)))))


class Queue(nn.Module):
    """A ring of seen values with a pointer, as contrastive learning has it: index_copy_ at a moving place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(8, WIDTH))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        keys = F.normalize(self.layer(x), dim=1)
        attention = (keys @ self.queue.clone().detach().t()).softmax(-1)
        value = attention @ self.queue.clone().detach()
        with torch.no_grad():
            at = (self.pointer + torch.arange(x.shape[0])) % self.queue.shape[0]
            self.queue.index_copy_(0, at, keys)
            self.pointer[0] = (self.pointer[0] + x.shape[0]) % self.queue.shape[0]
        return x + value


class Codebook(nn.Module):
    """Vector quantisation with an exponential moving average, a straight-through gradient and a commitment loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, WIDTH))
        self.register_buffer("counts", torch.ones(5))
        self.register_buffer("sums", torch.randn(5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(-1)
        chosen = F.one_hot(nearest, 5).type_as(x)
        quantised = F.embedding(nearest, self.codes)
        with torch.no_grad():
            self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(chosen.t() @ x, alpha=0.1)
            self.codes.copy_(self.sums / (self.counts[:, None] + 1e-5))
        return x + (quantised - x).detach() + 0.1 * (x - quantised.detach()).square()


class NotPersistent(nn.Module):
    """Buffers in no state dict: a table that is read, one that changes; and a plain tensor that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, WIDTH), persistent=False)
        self.register_buffer("seen", torch.zeros(WIDTH), persistent=False)
        self.plain = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.table + self.seen + self.plain
        self.seen += x.detach().mean(0)
        self.plain = 0.5 * self.plain + 0.5 * x.detach().amax(0)
        return y


class Teacher(nn.Module):
    """A teacher without gradients that follows the student by an exponential moving average of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(WIDTH, WIDTH)
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("followed", self.student.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
            self.followed.mul_(0.9).add_(self.student.weight, alpha=0.1)
        return torch.tanh(self.student(x)) + 0.1 * target + F.linear(x, self.followed)


class OnlyWritten(nn.Module):
    """Buffers that the step writes and never reads, in the first and in the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last_seen", torch.zeros(4, WIDTH))
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.last_seen.copy_(x.detach())
        y = torch.tanh(x * 2)
        self.largest.fill_(0.0)
        self.largest += y.detach().abs().max()
        return y


FEATURES = [
    Feature("counters", Counters),
    Feature("averages", Averages),
    Feature("norms", Norms),
    Feature("frozen-norm", FrozenNorm),
    Feature("shared-buffer", SharedBuffer),
    Feature("queue", Queue),
    Feature("codebook", Codebook),
    Feature("not-persistent", NotPersistent),
    Feature("teacher", Teacher),
    Feature("only-written", OnlyWritten),
]


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.name)
def test_buffers(feature: Feature) -> None:
    check(feature)


def test_a_counter_that_nothing_reads_is_on_its_layers_worker() -> None:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(4)]
    build = fxpipe.compile(
        nn.Sequential(*layers), lambda m, x: m(x).square().mean(), torch.randn(8, WIDTH), workers=2, cost="analytic"
    )
    homes = {buffer.name: buffer.home for buffer in build.plan.buffers}
    assert set(homes.values()) == {0, 1}
    for layer in range(4):
        assert homes[f"{layer}.1.num_batches_tracked"] == homes[f"{layer}.1.running_mean"]
