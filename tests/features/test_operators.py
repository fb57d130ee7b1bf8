"""Operators: masks, indexing, sorting, pooling, sampling, distances, losses, linear algebra."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from features import WIDTH, Chain, Feature, check, check_any_cuts, layers, quick, squared
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


class Statistics(nn.Module):
    """Sums of many kinds: cumsum, cumprod, logsumexp, logcumsumexp, var, std, norms, amax with ties, quantile."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layers[0](x))
        y = y.cumsum(1) * 0.3 + y.abs().add(0.5).cumprod(0).clamp(max=2)
        y = torch.tanh(self.layers[1](y)) + y.logsumexp(1, keepdim=True) + y.logcumsumexp(0)
        y = (y - y.mean(0)) / (y.var(0, unbiased=False) + 1e-3).sqrt() + y.std(1, keepdim=True)
        y = torch.tanh(self.layers[2](y)) * y.norm(dim=1, keepdim=True) + F.normalize(y, p=1, dim=0)
        y = y + y.clamp(-0.5, 0.5).amax(1, keepdim=True) + y.prod(1, keepdim=True) + y.aminmax().max
        y = y + torch.std_mean(y, 1, keepdim=True)[0] + y.diff(dim=1, prepend=y[:, :1]) + y.median()
        return self.layers[3](torch.linalg.vector_norm(y, 3, -1, keepdim=True) + y.relu().sum(dim=(0, 1)) * 0.01 + y)


class Images(nn.Module):
    """interpolate, pixel (un)shuffle, unfold and fold, grid_sample, pooling with indices, padding modes, dilation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular")
        self.second = nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=4)
        self.up = nn.ConvTranspose2d(1, 2, 3, stride=2, padding=1, output_padding=1)
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
        self.corner = nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList([nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.LocalResponseNorm(2)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](torch.tanh(self.first(x)))
        y = F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=False)
        y = F.pixel_unshuffle(F.pixel_shuffle(y, 2), 2)
        y, places = self.pool(self.norms[1](self.second(F.pad(y, (1, 1, 1, 1), mode="reflect"))))
        y = self.unpool(torch.tanh(y), places)
        y = F.fold(F.unfold(y, 2, stride=2) * 0.5, y.shape[-2:], 2, stride=2)
        angle = y.mean((1, 2, 3))
        theta = torch.stack(
            [torch.stack([angle.cos(), -angle.sin(), angle * 0]), torch.stack([angle.sin(), angle.cos(), angle])]
        )
        grid = F.affine_grid(theta.permute(2, 0, 1), list(y.shape), align_corners=False)
        y = self.norms[2](F.grid_sample(y, grid, align_corners=False)) + F.interpolate(y[:, :, ::2, ::2], y.shape[-2:])
        y = torch.tanh(self.up(F.adaptive_max_pool2d(y.mean(1, keepdim=True), 3)))
        y = F.avg_pool2d(F.interpolate(y, (6, 6), mode="bicubic", align_corners=True), (3, 2), ceil_mode=True)
        return self.corner(y.flatten(1)[:, :WIDTH]) + F.lp_pool1d(y.flatten(2), 2, 3).mean((1, 2))[:, None]


def images(size: int) -> Any:
    return torch.randn(size, 2, 6, 6), torch.randn(size, WIDTH)


class Algebra(nn.Module):
    """Distances and linear algebra: cdist, solve, inverse, determinant, QR, eigh, SVD values, matrix exponential."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layers[0](x))
        distances = torch.cdist(y, self.layers[1].weight)
        gram = y.t() @ y + torch.eye(WIDTH) * torch.arange(1.0, WIDTH + 1)
        y = torch.linalg.solve(gram, distances.t()).t() + torch.linalg.inv(gram)[0]
        y = torch.tanh(self.layers[2](y)) + torch.logdet(gram) * 0.1 + torch.linalg.slogdet(gram).logabsdet * 0.1
        skew = (gram - gram.roll(1, 0)) * 0.01
        rotation = torch.matrix_exp(skew - skew.t())
        q, r = torch.linalg.qr(gram)
        values = torch.linalg.eigvalsh(gram) * 0.1 + torch.linalg.svdvals(gram) * 0.01
        lower = torch.linalg.cholesky(gram)
        y = y @ rotation @ q + r.diagonal() * 0.1 + values
        return y + torch.linalg.solve_triangular(lower, y.t(), upper=False).t() + torch.trace(gram) * 0.01


def many_losses(model: nn.Module, batch: Any) -> Tensor:
    """Every loss of torch.nn.functional that fits."""
    x, y = batch
    out = model(x)
    probable, target = out.log_softmax(-1), y.softmax(-1)
    signs = torch.where(y[:, 0] > 0, 1, -1)
    classes = y.argmax(-1)
    loss = F.kl_div(probable, target, reduction="batchmean") + F.nll_loss(probable, classes, ignore_index=2)
    loss = loss + F.cosine_embedding_loss(out, y, signs) + F.triplet_margin_loss(out, y, y.roll(1, 0))
    loss = loss + F.smooth_l1_loss(out, y) + F.huber_loss(out, y, delta=0.5)
    loss = loss + F.binary_cross_entropy_with_logits(out, target, pos_weight=torch.full((WIDTH,), 2.0))
    loss = loss + F.binary_cross_entropy(out.sigmoid(), target) + F.poisson_nll_loss(out, y.abs())
    loss = loss + F.margin_ranking_loss(out[:, 0], out[:, 1], signs) + F.hinge_embedding_loss(out[:, 2], signs)
    loss = loss + F.multilabel_soft_margin_loss(out, (y > 0).float()) + F.multi_margin_loss(out, classes)
    loss = loss + F.soft_margin_loss(out, signs[:, None].expand_as(out).float()) + F.cross_entropy(out, target)
    return loss + F.cross_entropy(out, classes, weight=torch.linspace(0.5, 1, WIDTH), label_smoothing=0.1)


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


class Activations(nn.Module):
    """Every activation; those with weights; gumbel_softmax is among what draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(3)
        self.prelu = nn.PReLU(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x)
        for f in (F.gelu, F.silu, F.elu, F.selu, F.celu, F.mish, F.softplus, F.softsign, F.hardswish, F.hardtanh):
            y = f(y) + 0.3 * x
        y = self.prelu(self.layers[1](y)) + F.glu(y.repeat(1, 2), 1) + F.logsigmoid(y) + F.relu6(y) + F.tanhshrink(y)
        y = (
            F.hardsigmoid(y)
            + F.gelu(y, approximate="tanh")
            + F.hardshrink(y)
            + F.softshrink(y)
            + F.threshold(y, 0.1, 0.2)
        )
        return self.layers[2](y.erf() + y.sinc() + torch.lerp(y, x, 0.3) + torch.addcmul(y, y, x) + y.hypot(x))


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


FEATURES = [
    Feature("masks", Masks),
    Feature("products", Products),
    Feature("indexing", Indexing),
    Feature("routing", Routing, balanced),
    Feature("statistics", Statistics, slow=True),
    Feature("images", Images, squared, images, alone=True, slow=True),
    Feature("algebra", Algebra, slow=True),
    Feature("losses", Chain, many_losses, alone=True, slow=True),
    Feature("sparse-constant", SparseConstant, alone=True),
    Feature("activations", Activations, slow=True),
    Feature("random-numbers", Draws, draws=True),
]


@pytest.mark.parametrize("feature", quick(FEATURES), ids=lambda f: f.name)
def test_operators(feature: Feature) -> None:
    check(feature)


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.name)
def test_operators_under_any_cuts(feature: Feature) -> None:
    check_any_cuts(feature, range(4))
