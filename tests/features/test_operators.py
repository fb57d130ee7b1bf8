"""Operators: masks, indexing, sorting, pooling, sampling, distances, losses, linear algebra."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from features import WIDTH, Feature, check, layers, squared
from torch import Tensor, nn
from torch.nn import functional as F


class Masks(nn.Module):
    """torch.where with infinities, masked_fill, causal masks, additive biases, rows that are masked out wholly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layers[0](x))
        scores = y @ self.layers[1](y).t()
        causal = torch.ones_like(scores, dtype=torch.bool).triu(1)
        attention = torch.where(causal, float("-inf"), scores).softmax(-1)
        y = torch.tanh(self.layers[2](attention @ y))
        nowhere = torch.zeros_like(scores, dtype=torch.bool)
        nowhere[0] = True
        safe = scores.masked_fill(nowhere, float("-inf")).softmax(-1).nan_to_num(0.0)
        bias = torch.zeros_like(scores).masked_fill_(causal, torch.finfo(scores.dtype).min)
        y = y + safe.detach() @ y + (scores + bias).softmax(-1) @ y
        return self.layers[3](torch.where(y > 0, y, y * torch.tensor(0.1)))


class Products(nn.Module):
    """einsum in many forms, bmm, tensordot, outer, kron, baddbmm, chained products."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(2)
        self.heads = nn.Parameter(torch.randn(2, 3, 3) * 0.5)
        self.core = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layers[0](x)).unflatten(1, (2, 3))
        y = torch.einsum("bhi,hij->bhj", y, self.heads)
        scores = torch.einsum("bhi,chi->hbc", y, y)
        y = torch.einsum("hbc,chj->bhj", scores.softmax(-1), y).flatten(1)
        diagonal = torch.einsum("bi,bi->b", y, y)
        y = y + torch.tensordot(y, torch.kron(self.heads[0], torch.eye(2)), dims=1) * diagonal[:, None]
        y = torch.linalg.multi_dot([y, self.layers[1].weight, self.layers[1].weight.t()])
        y = torch.baddbmm(y[:, None], y[:, None], torch.eye(WIDTH).expand(len(y), -1, -1)).squeeze(1)
        return torch.tanh(self.core(y, torch.tanh(y)) + torch.outer(y[:, 0], y[0]))


class Indexing(nn.Module):
    """gather, scatter_add, index_add, index_select, take_along_dim, roll, searchsorted, bucketize."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(4)
        self.register_buffer("sources", torch.tensor([0, 1, 2, 3, 3, 1]))
        self.register_buffer("targets", torch.tensor([1, 1, 0, 2, 0, 3]))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layers[0](x))
        messages = y.index_select(0, self.sources) * 0.5
        y = torch.zeros_like(y).index_add(0, self.targets, messages) + y
        y = torch.tanh(self.layers[1](y))
        degree = torch.zeros(len(y)).scatter_add(0, self.targets, torch.ones(6)).clamp(min=1)
        y = (
            torch.zeros_like(y).scatter_add_(0, self.targets[:, None].expand(-1, WIDTH), y[self.sources])
            / degree[:, None]
        )
        y = torch.tanh(self.layers[2](y.roll(1, 0)))
        y = torch.take_along_dim(y, y.argsort(0).flip(0), 0).gather(1, y.argmax(1, keepdim=True)) + y
        edges = torch.linspace(-1, 1, 5)
        y = y * torch.bucketize(y.detach(), edges) + torch.searchsorted(edges, y.detach())
        y = y.scatter_reduce(0, self.targets[:4, None].expand(-1, WIDTH), y, "amax")
        return self.layers[3](y[[0, 2, 1, 3]][:, torch.tensor([5, 4, 3, 2, 1, 0])])


class Routing(nn.Module):
    """A mixture of experts by top-k, dense and by sorting, with a balance loss kept in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = layers(3)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.gate(x).softmax(-1)
        weights, chosen = probabilities.topk(2, dim=-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            share = (weights * (chosen == i)).sum(-1, keepdim=True)
            out = out + torch.tanh(expert(x)) * share
        order = weights[:, 0].argsort(descending=True)
        out = out[order][order.argsort()]
        ranked, place = out.sort(dim=1)
        self.balance = probabilities.mean(0).square().sum() * 3
        values, _ = torch.cummax(ranked, 1)
        return self.last(
            out + values.median(1, keepdim=True).values + place.float().mean() + out.kthvalue(2).values[:, None]
        )


def balanced(model: nn.Module, batch: Any) -> Tensor:
    return squared(model, batch) + 0.1 * model.middle.balance  # type: ignore[union-attr,operator]


class SparseConstant(nn.Module):
    """A sparse matrix of constants multiplies every layer's values; made once, it is made again on every worker."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(5)
        self.register_buffer("places", torch.tensor([[0, 1, 2, 3], [2, 0, 1, 3]]))

    def forward(self, x: Tensor) -> Tensor:
        edges = torch.sparse_coo_tensor(self.places, torch.ones(4), (4, 4))
        for layer in self.layers:
            x = torch.sparse.mm(edges, torch.tanh(layer(x)))
        return x


class Draws(nn.Module):
    """Random numbers of many kinds: dropouts, noise, gumbel, multinomial, permutations, rrelu, bernoulli."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(torch.tanh(self.layers[0](x)), 0.3) + 0.1 * torch.randn_like(x)
        y = F.alpha_dropout(torch.tanh(self.layers[1](y)), 0.2) * torch.bernoulli(torch.full_like(y, 0.8))
        y = y + F.gumbel_softmax(y, tau=0.7, hard=True) + torch.empty_like(y).uniform_(-0.1, 0.1)
        y = torch.tanh(self.layers[2](y[torch.randperm(len(y))]))
        ids = torch.randint(0, WIDTH, (len(y), 2))
        y = y + F.rrelu(y, training=True) + y.gather(1, ids).sum(1, keepdim=True) + torch.rand(WIDTH).normal_() * 0.1
        y = F.dropout1d(y.unflatten(1, (2, 3)), 0.4).flatten(1) + torch.normal(y.detach(), 0.1)
        return self.layers[3](y + y.softmax(-1).multinomial(1) * 0.1 + torch.poisson(y.abs()) * 0.1)


class NumbersOfShapes(nn.Module):
    """Python numbers of tensors that the step makes of shapes and numbers; what is drawn or computed stays traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(2)

    def forward(self, x: Tensor) -> Tensor:
        parts, width = torch.tensor([2, x.shape[1]]).tolist()
        y = self.layers[0](x.view(-1, parts, width // parts).flatten(1) * torch.tensor(x.shape[1:]).prod().item())
        for rate in torch.linspace(0.5, 1, 3):
            y = torch.tanh(y) * float(rate)
        ends = torch.cumsum(torch.tensor([1, 2, 3]), 0)
        y = torch.cat([y[:, int(end) - 1 : int(end) + 1] for end in ends if end < WIDTH], 1).repeat(1, 2)[:, :WIDTH]
        table = torch.zeros(WIDTH)
        table[1::2] = torch.arange(3.0)
        table[0] = y.mean(1, keepdim=True).detach().sum() * 0 + 1
        kept = torch.bernoulli(torch.ones(WIDTH)) * table
        where = torch.eye(3).triu().nonzero()
        y = y + kept + where.sum().item() + len(f"{torch.tensor([2, 3])}")
        return self.layers[1](y if torch.ones(2).all() else x)


FEATURES = [
    Feature("masks", Masks),
    Feature("products", Products),
    Feature("indexing", Indexing),
    Feature("routing", Routing, balanced),
    Feature("numbers-of-shapes", NumbersOfShapes, draws=True),
    Feature("sparse-constant", SparseConstant, alone=True),
    Feature("random-numbers", Draws, draws=True),
]


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.name)
def test_operators(feature: Feature) -> None:
    check(feature)
