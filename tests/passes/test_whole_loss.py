"""whole_loss: microbatches make the loss and the gradients of the whole batch, or it is said why they do not."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from covering import covering
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

import fxpipe
from fxpipe.ir.aten import is_random
from fxpipe.ir.law import verify
from fxpipe.ir.printer import type_text
from fxpipe.ir.program import ONE_DRAW, Program, value
from fxpipe.ir.transform import run_passes
from fxpipe.passes.analysis.microbatches import microbatches_of
from fxpipe.passes.analysis.share import Lost, Share
from fxpipe.passes.fold import Fold
from fxpipe.passes.next_to import NextTo
from fxpipe.passes.whole_loss import BY_ITSELF, WholeLoss
from fxpipe.stages.minibatch import totals_of

CLASSES = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
KERNEL = torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(5, 3, 1)
TABLE = torch.arange(12 * 25, dtype=torch.float64).reshape(12, 5, 5).sin()
Batch = tuple[Tensor, Tensor]
Step = Callable[[nn.Module, Batch], Tensor]


def logits(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch[0])


def kept(batch: Batch) -> Tensor:
    return batch[1] != -100


def attended(x: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, **options).square().mean()


def masked(divisor: Callable[[Tensor], Tensor]) -> Step:
    return lambda m, b: (logits(m, b).square().mean(-1) * kept(b)).sum() / divisor(kept(b))


def classes(m: nn.Module, b: Batch, **options: Any) -> Tensor:
    return F.cross_entropy(logits(m, b).flatten(0, 1), b[1].flatten(), **options)


def written(mask: Tensor) -> Tensor:
    mask[:, :2] = 0
    mask[:, 4] = 3
    return mask


def sloped(m: nn.Module, b: Batch, value: Callable[[Tensor], Tensor]) -> Tensor:
    """A penalty on the slope of a value at each sample that is kept."""
    x = b[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(value(m(x)), x, create_graph=True)
    return (slope.square().sum(-1) * kept(b)).sum() / kept(b).sum()


def standard(x: Tensor) -> Tensor:
    return (x - x.mean()) / x.std()


def weights(b: Batch) -> Tensor:
    """Of classes: rare ones count more."""
    count = F.one_hot(b[1].clamp(min=0), 5).sum((0, 1))
    return (count.sum() / (5.0 * count.clamp(min=1))).double()


def outliers(b: Batch) -> Tensor:
    """Targets, those of large inputs ignored."""
    return torch.where(b[0][..., 0] > b[0][..., 0].mean(), -100, b[1])


def units(x: Tensor) -> Tensor:
    return (x - x.mean()) / (x - x.mean()).square().mean().sqrt()


def two_views(z: Tensor) -> Tensor:
    one, other = z.chunk(2)
    return (one * other.square()).mean()


EQUAL: dict[str, Step] = {
    "mean": lambda m, b: logits(m, b).square().mean(),
    "sum": lambda m, b: logits(m, b).square().sum(),
    "sum over samples, by their number": lambda m, b: logits(m, b).square().sum() / len(b[0]),
    "sum by a number": lambda m, b: logits(m, b).square().sum() / 7,
    "cross entropy": lambda m, b: F.cross_entropy(logits(m, b)[:, 0], b[1][:, 0].clamp(min=0)),
    "ignored": classes,
    "weighted classes": lambda m, b: classes(m, b, weight=CLASSES),
    "smoothed": lambda m, b: classes(m, b, label_smoothing=0.1),
    "smoothed, weighted, in two dimensions": lambda m, b: F.cross_entropy(
        logits(m, b).transpose(1, 2), b[1], weight=CLASSES, label_smoothing=0.1
    ),
    "probabilities": lambda m, b: F.cross_entropy(logits(m, b)[:, 0], b[0][:, 0, :5].softmax(-1)),
    "masked": masked(torch.sum),
    "masked, at least one": masked(lambda mask: mask.sum().clamp(min=1)),
    "margins": lambda m, b: F.multi_margin_loss(logits(m, b)[:, 0], b[1][:, 0].clamp(min=0)),
    "margins of labels": lambda m, b: F.multilabel_margin_loss(
        logits(m, b)[:, 0], torch.stack([b[1][:, 0].clamp(min=0), *[torch.full_like(b[1][:, 0], -1)] * 4], 1)
    ),
    "a sum and a mean": lambda m, b: logits(m, b).square().sum() + logits(m, b).square().mean(),
    "a sum and two": lambda m, b: logits(m, b).sum() + (logits(m, b).mean() + m[0].bias.norm()) * 3 + 2 + kept(b).sum(),
    "a mean and a mean, and a sum": lambda m, b: (
        classes(m, b) + logits(m, b).mean() + (m[0].bias.sum() - logits(m, b).square().mean()) + logits(m, b).sum()
    ),
    "masked, by samples": lambda m, b: (
        (logits(m, b).square().mean(-1) * kept(b)).sum(1) / kept(b).sum(1).clamp(min=1)
    ).mean(),
    "times a reciprocal": lambda m, b: (logits(m, b).mean(-1) * kept(b)).sum() * kept(b).sum().reciprocal(),
    "two losses": lambda m, b: classes(m, b) + 0.1 * F.mse_loss(logits(m, b), b[0][..., :5]),
    "a penalty": lambda m, b: classes(m, b) + 0.01 * sum(p.square().sum() for p in m.parameters()),
    "binary": lambda m, b: F.binary_cross_entropy_with_logits(logits(m, b), b[0][..., :5].sigmoid()),
    "smooth l1, weighed": lambda m, b: (
        (F.smooth_l1_loss(logits(m, b), b[0][..., :5], reduction="none").mean(-1) * kept(b)).sum()
        / (kept(b).sum() + 1e-6)
    ),
    "centred by the batch": lambda m, b: ((logits(m, b).mean(-1) - b[0].mean()) ** 2).mean(),
    "attention": lambda m, b: attended(logits(m, b), is_causal=True),
    "attention, samples as heads, with masks": lambda m, b: attended(logits(m, b)[None], attn_mask=b[0][None, ..., :3]),
    "divergence": lambda m, b: F.kl_div(logits(m, b).log_softmax(-1), b[0][..., :5].softmax(-1), reduction="batchmean"),
    "one token of each": lambda m, b: logits(m, b)[torch.arange(len(b[0])), kept(b).sum(1) % 3].square().mean(),
    "triplets": lambda m, b: F.triplet_margin_loss(*logits(m, b).unbind(1)),
    "policy": lambda m, b: (
        -(logits(m, b).log_softmax(-1).gather(-1, b[1].clamp(min=0).unsqueeze(-1)).squeeze(-1) * kept(b)).sum()
        / kept(b).sum()
    ),
    "time first": lambda m, b: classes(m, (b[0].transpose(0, 1), b[1].transpose(0, 1))),
    "activations": lambda m, b: (F.hardswish(logits(m, b)) * F.logsigmoid(logits(m, b))).mean(),
    "a slope for each": lambda m, b: F.prelu(logits(m, b), CLASSES[:3] / 10).mean(),
    "gated": lambda m, b: F.glu(logits(m, b)[..., :4], -1).mean(),
    "instance norm of two views, with weights": lambda m, b: two_views(
        F.instance_norm(torch.cat([logits(m, b), b[0][..., :5]]), weight=CLASSES[:3], bias=CLASSES[:3])
    ),
    "first states": lambda m, b: (
        torch.tanh(b[0].new_zeros(2, len(b[0]), 5).unbind(0)[1] @ KERNEL[:, :, 0] + 1).mean()
        + torch.tanh(
            b[0].new_zeros(2, len(b[0]), 3).split(1)[0][0] @ KERNEL[0].new_ones(3, 5) + logits(m, b)[:, 0]
        ).mean()
    ),
    "pooled, channels last": lambda m, b: (
        F.adaptive_avg_pool2d(logits(m, b).unsqueeze(2).contiguous(memory_format=torch.channels_last), 1)
        .square()
        .mean()
    ),
    "a table by index": lambda m, b: (
        logits(m, b).flatten(0, 1) * CLASSES.diag().index_select(0, b[1].clamp(min=0).flatten())
    ).mean(),
    "positions, stacked": lambda m, b: (
        logits(m, b)[..., :2]
        * torch.stack([t(torch.arange(3.0, dtype=b[0].dtype)).expand(len(b[0]), 3) for t in (torch.sin, torch.cos)], -1)
    ).mean(),
    "a learnt query": lambda m, b: (
        F.scaled_dot_product_attention(
            KERNEL.reshape(1, 1, 3, 5).expand(len(b[0]), 1, 3, 5), *[logits(m, b).unsqueeze(1)] * 2
        )
        .square()
        .mean()
    ),
    "two views, sliced": lambda m, b: (
        (m(torch.cat([b[0], b[0] + 1]))[: len(b[0])].mean(-1) * kept(b)).sum() / kept(b).sum()
    ),
    "matrices": lambda m, b: (
        torch.linalg.cholesky(logits(m, b).mT @ logits(m, b) + 5 * torch.eye(5, dtype=torch.float64)).square().mean()
    ),
    "classes that are there": lambda m, b: (
        logits(m, b).mean() * torch.count_nonzero(F.one_hot(b[1][:, 0].clamp(min=0), 5).sum(0))
    ),
    "classes that the model says": lambda m, b: F.cross_entropy(
        logits(m, b).flatten(0, 1), (logits(m, b) - b[0][..., :5]).detach().flatten(0, 1).argmax(1)
    ),
    "classes that the model is sure of": lambda m, b: (
        (F.cross_entropy(logits(m, b)[:, 0], logits(m, b)[:, 1].max(1).indices, reduction="none") * kept(b)[:, 0]).sum()
        / kept(b).sum()
    ),
    "by bucket": lambda m, b: (logits(m, b)[..., 0] * torch.bucketize(b[0][..., 0], CLASSES - 3)).mean(),
    "means and a penalty, stacked": lambda m, b: torch.stack([classes(m, b), m[2].bias.square().sum()]).sum(),
    "matrices for all": lambda m, b: (logits(m, b) @ m[2].weight[:, :5].expand(len(b[0]), 5, 5)).square().mean(),
    "slopes": lambda m, b: sloped(m, b, lambda y: F.elu(y[:, 1]).square().sum()),
    "slopes of a likelihood": lambda m, b: sloped(
        m, b, lambda y: F.cross_entropy(y.flatten(0, 1), b[1].flatten(), reduction="sum")
    ),
    "slopes of a masked mean": lambda m, b: sloped(
        m, b, lambda y: (y.square().mean(-1) * kept(b)).sum() / kept(b).sum()
    ),
    "slopes of a layer": lambda m, b: sloped(
        m, b, lambda y: F.smooth_l1_loss(F.layer_norm(y, [5], m[2].bias), b[0][..., :5], reduction="sum")
    ),
    "a mask that is written in part": lambda m, b: (
        (logits(m, b)[:, 0] * written(b[0].new_ones(len(b[0]), 5)).gather(1, b[0][:, 0, :5].argsort(1))).mean()
        + masked(torch.sum)(m, b)
    ),
    "spectra": lambda m, b: masked(torch.sum)(m, b) + torch.fft.rfft(logits(m, b)).real.abs().mean(),
    "labels in the shape of scores": lambda m, b: (
        (torch.zeros_like(logits(m, b)).scatter(-1, b[1].clamp(min=0)[..., None], 1.0) * logits(m, b)).sum()
        / (torch.full_like(logits(m, b), 2.0) * kept(b)[..., None]).sum().clamp(min=1)
    ),
    "a mask for each position, once for each sample": lambda m, b: (
        logits(m, b).flatten(0, 1) * KERNEL[:, :, 0].t().unsqueeze(0).expand(len(b[0]), 3, 5).reshape(-1, 5)
    ).mean(),
    "learnt queries, samples second": lambda m, b: (
        (
            m[2].weight[:3].unsqueeze(1).expand(3, len(b[0]), -1).flatten(0, 1).view(3, len(b[0]), -1).mean((0, 2))
            * logits(m, b).mean((1, 2))
            * kept(b)[:, 0]
        ).sum()
        / kept(b)[:, 0].sum()
    ),
    "a table at one place": lambda m, b: (
        ((logits(m, b)[:, 0] * m[2].weight.t()[torch.full((len(b[0]),), 3)]).mean(1) * kept(b)[:, 0]).sum()
        / kept(b)[:, 0].sum()
    ),
}
TOTALS: dict[str, Step] = {
    "weights counted in the batch": lambda m, b: classes(m, b, weight=weights(b)),
    "weights counted in the batch, in two dimensions": lambda m, b: F.cross_entropy(
        logits(m, b).transpose(1, 2), b[1], weight=weights(b)
    ),
    "weights counted in the batch, smoothed": lambda m, b: classes(m, b, weight=weights(b), label_smoothing=0.1),
    "weights that a mean decides, of targets that it decides": lambda m, b: F.cross_entropy(
        logits(m, b).flatten(0, 1), outliers(b).flatten(), weight=weights((b[0], outliers(b)))
    ),
    "outliers ignored": lambda m, b: classes(m, (b[0], outliers(b))),
    "outliers ignored, in two dimensions": lambda m, b: F.cross_entropy(logits(m, b).transpose(1, 2), outliers(b)),
    "outliers ignored, smoothed": lambda m, b: classes(m, (b[0], outliers(b)), label_smoothing=0.1),
    "outliers masked": lambda m, b: masked(torch.sum)(m, (b[0], outliers(b))),
    "binary, weighed by the batch": lambda m, b: F.binary_cross_entropy_with_logits(
        logits(m, b),
        (b[0][..., :5] > b[0].mean()).double(),
        weight=b[0].square().mean((0, 1))[:5],
        pos_weight=weights(b),
    ),
    "binary, weighed by distance from the mean": lambda m, b: F.binary_cross_entropy(
        logits(m, b).sigmoid(), b[0][..., :5].sigmoid(), weight=(b[0] - b[0].mean()).abs().mean((0, 1))[:5]
    ),
    "margins, weighed by the batch": lambda m, b: F.multi_margin_loss(
        logits(m, b)[:, 0], b[1][:, 0].clamp(min=0), weight=weights(b)
    ),
    "a likelihood of the batch, with its weights": lambda m, b: (
        logits(m, b).mean()
        * F.cross_entropy(b[0][:, :2, :5].flatten(0, 1), outliers(b)[:, :2].flatten(), weight=weights(b))
    ),
    "targets in standard units": lambda m, b: F.mse_loss(logits(m, b), (units(b[0]) * kept(b)[..., None])[..., :5]),
    "a total of totals": lambda m, b: (b[0] - b[0].mean()).square().sum().sqrt() * logits(m, b).mean(),
    "weights within the third of three totals": lambda m, b: (
        masked(torch.sum)(m, b) * (units(b[0]) > units(b[0]).pow(4).mean().log()).sum().sqrt()
    ),
}
REPEATED: dict[str, Step] = {
    "biases of heads, repeated": lambda m, b: (
        torch.baddbmm(
            CLASSES[:3, None, None].repeat(len(b[0]), 2, 2),
            logits(m, b).flatten(0, 1)[:, :2, None],
            b[0].flatten(0, 1)[:, None, :2],
        )
        .square()
        .mean()
    ),
}
GROUPED: dict[str, Step] = {
    "rewards of groups": lambda m, b: (
        (logits(m, b).mean((1, 2)) * (b[0][:, 0, 0] - b[0][:, 0, 0].view(-1, 2).mean(1).repeat_interleave(2))).sum()
        / kept(b).sum()
    ),
    "best of groups": lambda m, b: logits(m, b).mean((1, 2)).view(-1, 2).amax(1).mean(),
}
DIFFERENT: dict[str, tuple[str, Step]] = {
    "contrastive": (
        "mm .* multiplies samples with other samples",
        lambda m, b: F.cross_entropy(logits(m, b).mean(1) @ logits(m, b).mean(1).t(), torch.arange(len(b[0]))),
    ),
    "root of a mean": (
        "sqrt .* is not linear, and is applied to a mean over the batch",
        lambda m, b: logits(m, b).square().mean().sqrt(),
    ),
    "largest": ("max .* is not a sum or a mean", lambda m, b: logits(m, b).max()),
    "in standard units": (
        "combines samples with a mean over the batch",
        lambda m, b: standard(logits(m, b)).square().mean(),
    ),
    "by a count of the model": (
        "divides by a sum over the batch that depends on the weights",
        lambda m, b: logits(m, b).square().sum() / logits(m, b).sigmoid().sum(),
    ),
    "neighbours": ("flip .* works along the batch", lambda m, b: (logits(m, b) * logits(m, b).flip(0)).mean()),
    "half of two views": ("divides the batch", lambda m, b: logits(m, b).split(len(b[0]) // 2)[0].mean()),
    "the first sample": ("takes one sample", lambda m, b: logits(m, b)[0].square().mean()),
    "some of two views": (
        "slice .* takes some samples",
        lambda m, b: m(torch.cat([b[0], b[0]]))[: len(b[0]) // 2].sum(),
    ),
    "filters of samples": (
        "convolves samples with samples",
        lambda m, b: F.conv1d(logits(m, b), logits(m, b)[..., :2]).square().mean(),
    ),
    "matrices of some": (
        "depends on how many samples there are",
        lambda m, b: torch.bmm(logits(m, b), TABLE[: len(b[0])]).square().mean(),
    ),
    "the last sample first": (
        "depends on how many samples there are",
        lambda m, b: (
            logits(m, b)[torch.arange(len(b[0]) - 1, -1, -1), b[1][:, 0].clamp(min=0) % 3] * b[0][:, 0, :5]
        ).mean(),
    ),
    "samples by samples": (
        "reads samples by an index",
        lambda m, b: logits(m, b)[:, 0, :1].expand(-1, 99).index_select(1, b[1][:, 0].clamp(min=0)).sum(),
    ),
    "numbers drawn once, laid out by samples": (
        "depends on how many samples there are",
        lambda m, b: (logits(m, b).mean((1, 2)) * torch.rand(24).view(-1, len(b[0]))[0]).mean(),
    ),
    "frequent words": (
        "scales gradients by how often",
        lambda m, b: (
            logits(m, b)[..., :1] * F.embedding(b[1].clamp(min=0), m[2].weight, scale_grad_by_freq=True)
        ).mean(),
    ),
    "classes that the model says and ignores": (
        "depend on the weights, and may ignore",
        lambda m, b: F.cross_entropy(
            logits(m, b)[:, 0], torch.where(kept(b)[:, 0], logits(m, b)[:, 1].argmax(1), -100)
        ),
    ),
    "slopes of a mean": (
        "divides by the size of one microbatch",
        lambda m, b: sloped(m, b, lambda y: F.mse_loss(y, b[0][..., :5])),
    ),
    "distances between samples": (
        "compares samples with each other",
        lambda m, b: (-torch.cdist(logits(m, b)[:, 0], b[0][:, 0, :5])).exp().mean(),
    ),
    "a sum, and what is read twice": (
        "adds a sum over the batch to something else",
        lambda m, b: (lambda s: logits(m, b).square().sum() + s + s.square())(m[2].bias.sum()),
    ),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5)).double()


def batch(size: int = 12) -> Batch:
    """Some samples have no valid target in some microbatches, others all."""
    torch.manual_seed(1)
    targets = torch.randint(0, 5, (size, 3))
    targets[: size // 3, 1] = -100
    targets[0] = -100
    return torch.randn(size, 3, 6, dtype=torch.float64), targets


def parts(whole: Batch, count: int) -> list[Batch]:
    return list(zip(*(t.chunk(count) for t in whole), strict=True))


def minibatch(program: Program, whole: Batch, count: int) -> tuple[Tensor, ...]:
    """Loss and gradients of the microbatches together."""
    names = [b.node for b in program.batch if b.leaf.name.startswith("batch")]
    each = [dict(zip(names, part, strict=True)) for part in parts(whole, count)]
    made: dict[Any, Tensor] = {}
    if program.totals is not None:
        verify(program.totals)
        nodes = [o.target.replace(".", "_") for o in program.totals.outputs]
        taken = {b.node: program.totals.example[b.node] for b in program.totals.batch if b.node in nodes}
        made = totals_of(lambda part, totals: program.totals.run(batch={**part, **totals}), each, nodes, taken)
    results = [program.run(batch={**part, **made}) for part in each]
    divisor = count if program.loss_of_microbatches == "mean" else 1
    return tuple(torch.stack(column).sum(0) / divisor for column in zip(*results, strict=True))


def whole_batch(made: nn.Module, step: Step, whole: Batch) -> tuple[Tensor, ...]:
    loss = step(made, whole)
    return loss.detach(), *torch.autograd.grad(loss, list(made.parameters()))


def distance(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The largest difference, relative to each tensor's norm; a gradient that is 0 but for rounding counts as such."""
    floor = 1e-3 * max(b.norm() for b in expected)
    return max(float((a - b).norm() / b.norm().clamp(min=floor)) for a, b in zip(found, expected, strict=True))


def captured(made: nn.Module, step: Step, whole: Batch, count: int) -> Program:
    """On one microbatch, next to the step on the whole batch."""
    program = fxpipe.capture(made, step, parts(whole, count)[0])
    return run_passes(replace(program, whole=fxpipe.capture(made, step, whole)), [NextTo()])


def lowered(made: nn.Module, step: Step, whole: Batch, count: int, **options: Any) -> Program:
    return run_passes(captured(made, step, whole, count), [Fold(), WholeLoss(count, **options)])


@pytest.mark.parametrize(("name", "count"), covering({**EQUAL, **TOTALS}, [2, 3, 12], strength=1))
def test_microbatches_make_the_whole_batch(name: str, count: int) -> None:
    step, made, whole = {**EQUAL, **TOTALS}[name], model(), batch()
    program = lowered(made, step, whole, count)
    assert not program.warnings
    assert distance(minibatch(program, whole, count), whole_batch(made, step, whole)) < 1e-6


@pytest.mark.parametrize("name", REPEATED)
def test_what_is_repeated_for_each_sample_goes_with_samples(name: str) -> None:
    """A microbatch of one sample does not show that anything is repeated."""
    step, made, whole = REPEATED[name], model(), batch()
    program = lowered(made, step, whole, 3)
    assert not program.warnings
    assert distance(minibatch(program, whole, 3), whole_batch(made, step, whole)) < 1e-6
    assert lowered(made, step, whole, 12).warnings


@pytest.mark.parametrize(("name", "count"), covering(GROUPED, [2, 3, 6], strength=1))
def test_whole_groups_of_samples(name: str, count: int) -> None:
    step, made, whole = GROUPED[name], model(), batch()
    program = lowered(made, step, whole, count)
    assert not program.warnings
    assert distance(minibatch(program, whole, count), whole_batch(made, step, whole)) < 1e-6


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_cannot_be_derived_is_said(name: str) -> None:
    why, step = DIFFERENT[name]
    made, whole = model(), batch()
    program = lowered(made, step, whole, 2)
    (warning,) = program.warnings
    assert re.search(why, warning), warning
    assert program.totals is None
    assert distance(minibatch(program, whole, 2), whole_batch(made, step, whole)) > 1e-4


def test_a_microbatch_without_targets() -> None:
    """By itself it is 0 / 0; of the minibatch it is nothing."""
    made, whole = model(), batch()
    assert classes(made, parts(whole, 12)[0]).isnan()
    program = lowered(made, classes, whole, 12)
    assert distance(minibatch(program, whole, 12), whole_batch(made, classes, whole)) < 1e-5


@pytest.mark.parametrize(
    ("step", "share"),
    [
        (lambda m, b: m(b[0]).mean(), Share.MEAN),
        (lambda m, b: m(b[0]).sum(), Share.SUM),
        (lambda m, b: m(b[0]).sum() / 2, Share.MEAN),  # of two samples: it counts them
    ],
)
def test_what_the_loss_is(step: Step, share: Share) -> None:
    program = run_passes(fxpipe.capture(model(), step, batch(2)), [Fold()])
    assert microbatches_of(program).loss is share


def test_a_number_that_counts_no_samples() -> None:
    program = captured(model(), lambda m, b: m(b[0]).sum() / 2, batch(4), 2)
    assert microbatches_of(run_passes(program, [Fold()])).loss is Share.SUM


def test_samples_in_another_dimension() -> None:
    step = lambda m, b: (m(b[0]).cumsum(0) * kept(b).unsqueeze(-1)).sum() / kept(b).sum()  # noqa: E731 (along time)
    program = run_passes(fxpipe.capture(model(), step, batch(4)), [Fold()])
    assert isinstance(microbatches_of(program).loss, Lost)
    assert microbatches_of(program, {"batch[0]": 1, "batch[1]": 1}).loss is Share.MEAN
    assert isinstance(microbatches_of(program, {"batch[0]": 1, "batch[1]": 0}).loss, Lost)


def test_what_is_not_of_samples_is_drawn_once() -> None:
    """Whether it happens to be as long as a microbatch or not."""

    def step(m: nn.Module, b: Batch) -> Tensor:
        weight = F.dropout(m[2].weight, 0.5)
        scores = F.linear(F.dropout(m[1](m[0](b[0])), 0.1), weight) * torch.rand(len(b[0]), 1, 1)
        return scores.mean() * torch.rand(()) + (torch.randn(4) * m[2].bias[:4]).sum()

    program = lowered(model(), step, batch(), 3)
    assert not program.warnings
    drawn = [(type_text(value(n)).split("]")[0] + "]", ONE_DRAW in n.meta) for n in program if is_random(n)]
    assert sorted(drawn) == [
        ("(f64[4, 3, 7]", False),
        ("(f64[5, 7]", True),
        ("f32[4, 1, 1]", False),
        ("f32[4]", True),
        ("f32[]", True),
    ]


class Doubled(Function):
    """Its backward is no derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return 2 * gradient


def hooked(m: nn.Module, b: Batch) -> Tensor:
    made = logits(m, b)
    made.register_hook(lambda gradient: gradient * 2)
    return masked(torch.sum)(lambda x: made, b)


def through(m: nn.Module, b: Batch) -> Tensor:
    return masked(torch.sum)(lambda x: Doubled.apply(m(x)), b)


@pytest.mark.parametrize(
    ("step", "why"), [(through, "the backward of Doubled"), (hooked, r"a gradient hook \(.*: made.register_hook.*\)")]
)
def test_own_code_that_makes_gradients_is_said(step: Step, why: str) -> None:
    """What the loss takes of the whole batch is right all the same."""
    made, whole = model(), batch()
    program = lowered(made, step, whole, 3)
    (warning,) = program.warnings
    assert re.search(f"neither proved nor checked: {why} may treat a microbatch's gradients", warning), warning
    assert distance(minibatch(program, whole, 3), whole_batch(made, step, whole)) < 1e-6
    assert lowered(made, step, whole, 3, accepted=True).differs_from_whole


def test_weighted_microbatches() -> None:
    """The loss and the gradient that backward begins with are multiplied by a leaf of the batch."""
    made, whole = model(), batch()
    step = lambda m, b: (logits(m, b).mean(-1) * kept(b)).sum() / kept(b).flatten().double().norm(p=1)  # noqa: E731
    program = lowered(made, step, whole, 3, weighted=True)
    assert program.batch[-1].leaf.name == "loss_weight"
    assert program.warnings[-1].endswith("loss_weight(batch) was not tried on microbatches of different weights")
    assert not lowered(made, step, whole, 3, weighted=True, checked=True).warnings
    found = program.run(batch={"loss_weight": torch.tensor(0.5)})
    plain = fxpipe.capture(made, step, parts(whole, 3)[0]).run()
    assert distance(found, tuple(0.5 * t for t in plain)) < 1e-6
    assert [b.leaf.name for b in lowered(made, classes, whole, 3, weighted=True).batch][-1] == "total.0"


def test_batch_norm_is_named() -> None:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)).double()
    step = lambda m, b: m(b[0][:, 0]).square().mean()  # noqa: E731
    program = lowered(made, step, batch(), 2)
    assert (program.batch_norm, program.differs_from_whole, program.warnings) == ("1", "", (BY_ITSELF.format("1"),))
    weighted = lowered(made, step, batch(), 2, weighted=True)
    assert weighted.batch_norm == "1"
    made[1].eval()
    assert not lowered(made, step, batch(), 2).batch_norm
