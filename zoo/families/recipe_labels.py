"""Recipes on labels, numbers, sounds, ranks and years: what a loss divides by differs from batch to batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from families.recipe import Recipe
from families.recipe_parts import (
    CLASSES,
    FEATURES,
    OF_THE_BATCH,
    SIZE,
    WIDTH,
    kept,
    labelled,
    layers,
    masked,
    number,
    pooled,
    valued,
)


def mixed(model: nn.Module, batch: Any) -> Tensor:
    """Mixup (Zhang et al., 2018), mixed by the data loader."""
    x, one, other, share = batch
    found = model(x)
    return share * F.cross_entropy(found, one) + (1 - share) * F.cross_entropy(found, other)


def mixup(step: int) -> Any:
    x, one = labelled(step)
    share, order = torch.rand(()), torch.randperm(SIZE)
    return share * x + (1 - share) * x[order], one, one[order], share


def pasted(model: nn.Module, batch: Any) -> Tensor:
    """CutMix (Yun et al., 2019), whose share is another one for each image."""
    x, one, other, share = batch
    found = model(x)
    told = [F.cross_entropy(found, y, reduction="none") for y in (one, other)]
    return (share * told[0] + (1 - share) * told[1]).mean()


def cutmix(step: int) -> Any:
    x, one = labelled(step)
    order, width = torch.randperm(SIZE), torch.randint(1, 8, (SIZE, 1, 1, 1))
    x = torch.where(torch.arange(8) < width, x, x[order])
    return x, one, one[order], width.flatten() / 8


def many_labels(model: nn.Module, batch: Any) -> Tensor:
    x, y, known, rarity = batch
    lost = F.binary_cross_entropy_with_logits(model(x), y, pos_weight=rarity, reduction="none")
    return (lost * known).sum() / known.sum()


def labels(step: int) -> Any:
    """Truths of a number of kinds, some unknown, and a weight for each kind: there are as many kinds as samples."""
    known = number(kept(step, SIZE))
    return torch.randn(SIZE, FEATURES), number(torch.rand(SIZE, SIZE) < 0.3), known, torch.rand(SIZE) + 0.5


def as_many_classes(model: nn.Module, batch: Any) -> Tensor:
    x, y, weights = batch
    return F.cross_entropy(model(x), y, weight=weights)


def uncertain(model: nn.Module, batch: Any) -> Tensor:
    x, y, known = batch
    mean, spread = model(x).chunk(2, 1)
    spread = F.softplus(spread) + 1e-3
    return (0.5 * (spread.log() + (mean - y).square() / spread) * known).sum() / known.sum()


def mixture(model: nn.Module, batch: Any) -> Tensor:
    """A mixture of three densities (Bishop, 1994)."""
    x, y, _ = batch
    share, mean, spread = model(x).chunk(3, 1)
    each = (
        share.log_softmax(1)
        - 0.5 * ((y[:, :1] - mean) / F.softplus(spread).add(0.1)) ** 2
        - F.softplus(spread).add(0.1).log()
    )
    return -each.logsumexp(1).mean()


def quantiles(found: Tensor, y: Tensor) -> Tensor:
    ways = y - found
    share = torch.tensor([0.1, 0.5, 0.9])
    return torch.maximum(share * ways, (share - 1) * ways)


def counted(model: nn.Module, batch: Any) -> Tensor:
    x, y, _ = batch
    return F.poisson_nll_loss(model(x), y.abs().round(), full=True)


def relative(model: nn.Module, batch: Any) -> Tensor:
    """The weighted absolute percentage error: the sum of errors over the sum of what was."""
    return (model(batch[0]) - batch[1]).abs().sum() / batch[1].abs().sum()


def correlated(model: nn.Module, batch: Any) -> Tensor:
    found, y = model(batch[0])[:, 0], batch[1][:, 0]
    return 1 - F.cosine_similarity(found - found.mean(), y - y.mean(), 0)


def two_tasks(model: nn.Module, batch: Any) -> Tensor:
    """Each task has its own gaps, and a weight that is learned (Kendall et al., 2018)."""
    x, y, known = batch
    found = model[0](x)
    own = [((found[:, k] - y[:, k]).square() * known[:, k]).sum() / known[:, k].sum().clamp(min=1) for k in range(3)]
    return (torch.stack(own) * (-model[1].weight[0]).exp() + model[1].weight[0]).sum()


def spoken(step: int) -> Any:
    """Sounds [samples, time, features] with their lengths, and texts with theirs."""
    many, few = 6 + (torch.arange(SIZE) + step) % 4, 1 + (torch.arange(SIZE) * 2 + step) % 3
    return torch.randn(SIZE, 9, FEATURES), many, torch.randint(1, CLASSES, (SIZE, 3)), few


def aligned(model: nn.Module, batch: Any) -> Tensor:
    sound, many, text, few = batch
    scores = model(sound).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, text, many, few, zero_infinity=True)


class Transducer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sound, self.text, self.head = layers(WIDTH), nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, sound: Tensor, text: Tensor) -> Tensor:
        before = F.pad(self.text(text), (0, 0, 1, 0))
        return self.head((self.sound(sound)[:, :, None] + before[:, None]).tanh()).log_softmax(-1)


def transduced(model: nn.Module, batch: Any) -> Tensor:
    """Graves, 2012: all ways through the lattice of time and text, for each letter of the batch."""
    sound, many, text, few = batch
    scores = model(sound, text)
    blank, letter = scores[..., 0], scores[:, :, :-1].gather(3, text[:, None, :, None].expand(-1, 9, -1, 1))[..., 0]
    rows: list[Tensor] = []
    for t in range(9):
        row: list[Tensor] = []
        for u in range(4):
            ways = [rows[t - 1][:, u] + blank[:, t - 1, u]] if t else []
            ways += [row[u - 1] + letter[:, t, u - 1]] if u else []
            row.append(torch.logsumexp(torch.stack(ways), 0) if ways else torch.zeros_like(blank[:, 0, 0]))
        rows.append(torch.stack(row, 1))
    every = torch.stack(rows, 1) + blank
    last = every.gather(1, (many - 1)[:, None, None].expand(-1, 1, 4))[:, 0].gather(1, few[:, None])[:, 0]
    return -last.sum() / few.sum()


def listed(step: int) -> Any:
    """Queries with up to 6 documents each, what they are worth, and which there are."""
    there = kept(step, 6)
    there[:, :2] = True
    return torch.randn(SIZE, 6, FEATURES), torch.randint(0, 3, (SIZE, 6)), there


def ranked_pairs(model: nn.Module, batch: Any) -> Tensor:
    """RankNet (Burges et al., 2005): over all pairs of a query's documents of which one is better."""
    x, worth, there = batch
    scores = model(x)[..., 0]
    better = (worth[:, :, None] > worth[:, None]) & there[:, :, None] & there[:, None]
    return (F.softplus(scores[:, None] - scores[:, :, None]) * better).sum() / better.sum().clamp(min=1)


def ranked_lists(model: nn.Module, batch: Any) -> Tensor:
    """ListNet (Cao et al., 2007)."""
    x, worth, there = batch
    scores = model(x)[..., 0].masked_fill(~there, -1e9).log_softmax(1)
    return -(number(worth).masked_fill(~there, -1e9).softmax(1) * scores).sum(1).mean()


def survived(model: nn.Module, batch: Any) -> Tensor:
    """Cox (1972): each death against all who lived longer, the batch in the order of its times."""
    x, time, died = batch
    order = time.argsort(descending=True)
    risk, died = model(x)[order, 0], died[order]
    return -((risk - risk.logcumsumexp(0)) * died).sum() / died.sum().clamp(min=1)


def hazards(model: nn.Module, batch: Any) -> Tensor:
    """Years survived, each with its own hazard; some are still alive (Gensheimer and Narasimhan, 2019)."""
    x, time, died = batch
    year = (time * CLASSES).long()
    found = model(x)
    alive = (F.logsigmoid(-found) * (torch.arange(CLASSES) < year[:, None])).sum(1)
    last = found.gather(1, year[:, None])[:, 0]
    return -(alive + torch.where(died > 0, F.logsigmoid(last), F.logsigmoid(-last))).mean()


def lived(step: int) -> Any:
    return torch.randn(SIZE, FEATURES), torch.rand(SIZE) * 0.99, number(kept(step))


def _of(name: str, loss: Any, batch: Any, model: Callable[[], nn.Module], **more: Any) -> Recipe:
    return Recipe(f"recipe_{name}", model, loss, batch, **more)


_values = functools.partial(_of, batch=valued, model=lambda: layers(3))

RECIPES = (
    _of("mixup", mixed, mixup, lambda: pooled(CLASSES)),
    _of("cutmix", pasted, cutmix, lambda: pooled(CLASSES)),
    _of("missing_labels", many_labels, labels, lambda: layers(SIZE)),
    _of("as_many_classes", as_many_classes, lambda step: (torch.randn(SIZE, FEATURES), torch.randint(0, SIZE, (SIZE,)),
        torch.rand(SIZE) + 0.1), lambda: layers(SIZE)),
    _values("huber", masked(functools.partial(F.huber_loss, reduction="none"))),
    _values("quantiles", masked(quantiles)),
    _values("poisson", counted),
    _of("gaussian", uncertain, valued, lambda: layers(6)),
    _of("mixture_density", mixture, valued, lambda: layers(9)),
    _values("relative_error", relative),
    _values("root_mean_square", lambda m, b: F.mse_loss(m(b[0]), b[1]).sqrt(), differs=("sqrt", OF_THE_BATCH)),
    _values("correlation", correlated, differs=("(?s).", OF_THE_BATCH)),
    _of("two_tasks", two_tasks, valued, lambda: nn.Sequential(layers(3), nn.Linear(3, 1))),
    _of("gaussian_of_torch", lambda m, b: F.gaussian_nll_loss(m(b[0]), b[1], b[2] + 1), valued, lambda: layers(3),
        refused=("variance is negative", "torch looks whether any variance is negative; `gaussian` is the same loss")),
    _of("ctc", aligned, spoken, lambda: layers(CLASSES),
        refused=("shape depends on values", "torch's tensor is as long as the longest text; see `transducer`")),
    _of("transducer", transduced, spoken, Transducer),
    _of("ranked_pairs", ranked_pairs, listed, lambda: layers(1)),
    _of("ranked_lists", ranked_lists, listed, lambda: layers(1)),
    _of("cox_survival", survived, lived, lambda: layers(1), differs=("sort", OF_THE_BATCH)),
    _of("hazards", hazards, lived, lambda: layers(CLASSES)),
)  # fmt: skip
