"""Metrics of training: equal to eager PyTorch's, whatever the microbatches; nothing else of the step changes."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.errors import BatchError, CaptureError
from fxpipe.lowering.compare_with_eager import compare_with_eager
from fxpipe.observe.progress import LineProgress

Batch = tuple[Tensor, Tensor]
STEPS = 3


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))


def batches(count: int = STEPS, size: int = 8) -> list[Batch]:
    torch.manual_seed(1)
    return [(torch.randn(size, 6), torch.randint(0, 5, (size,))) for _ in range(count)]


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def plain(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def mean(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
    scores, target = model(batch[0]), batch[1]
    right, loss = (scores.argmax(1) == target).float(), F.cross_entropy(scores, target)
    norm = next(model.parameters()).norm()
    return loss, {"accuracy": right.mean(), "right": right.sum(), "ce": loss, "norm": norm, "scale": 2}


def added(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
    _, metrics = mean(model, batch)
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), metrics


def masked(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
    scores, target = model(batch[0]), batch[1]
    mask = (target != 0).float()
    errors = F.cross_entropy(scores, target, reduction="none")
    right = (scores.argmax(1) == target) * mask
    return (errors * mask).sum() / mask.sum(), {"accuracy": right.sum() / mask.sum(), "counted": mask.sum()}


@pytest.mark.parametrize("loss", [mean, added, masked])
def test_metrics_are_the_whole_batchs(loss: Any) -> None:
    data = batches()
    build = fxpipe.compile(net(), loss, data[0], workers=2, microbatches=4, schedule="1f1b", cost="analytic")
    assert not build.warnings
    pipeline = build.local(optimizer=sgd)
    assert pipeline.metrics == {}
    pipeline.step(data[0])
    expected = {name: float(torch.as_tensor(v).detach()) for name, v in loss(net(), data[0])[1].items()}
    assert pipeline.metrics == pytest.approx(expected, rel=1e-6)
    found = compare_with_eager(build, net(), loss, data[1])
    assert found.metrics.keys() == expected.keys()
    assert found.largest < 1e-5


def test_what_cannot_be_derived_is_the_mean_of_the_microbatches() -> None:
    def largest(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        loss, _ = masked(model, batch)
        return loss, {"perplexity": loss.exp(), "largest": model(batch[0]).max()}

    (batch,) = batches(1)
    build = fxpipe.compile(net(), largest, batch, workers=2, microbatches=2, schedule="1f1b", cost="analytic")
    assert any("'largest' is a mean over microbatches" in w for w in build.warnings)
    parts = [largest(net(), (x, y))[1] for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True)]
    pipeline = build.local(optimizer=sgd)
    pipeline.step(batch)
    assert pipeline.metrics == pytest.approx(
        {n: float((parts[0][n] + parts[1][n]).detach() / 2) for n in parts[0]}, rel=1e-5
    )
    assert compare_with_eager(build, net(), largest, batch).largest < 1e-5


@pytest.mark.parametrize(
    ("metrics", "what"),
    [
        ({"each": torch.zeros(3)}, r"the metric 'each' as a tensor of shape \[3\]"),
        ({"loss": 1.0}, "a metric named 'loss'"),
        ({"kind": "good"}, "the metric 'kind' as a str"),
        ({3: 1.0}, "calls a metric 3"),
    ],
)
def test_refusals(metrics: dict[Any, Any], what: str) -> None:
    with pytest.raises(CaptureError, match=what):
        fxpipe.compile(net(), lambda model, batch: (plain(model, batch), metrics), batches(1)[0], workers=2)


def test_all_shapes_have_the_same_metrics() -> None:
    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        return plain(model, batch), {"large" if len(batch[0]) > 4 else "small": 1.0}

    shapes = batches(1, 4)
    with pytest.raises(BatchError, match=r"the metrics \['large'\] for the first batch, and \['small'\]"):
        fxpipe.compile(
            net(), loss, batches(1)[0], shapes=shapes, workers=2, microbatches=1, schedule="1f1b", cost="analytic"
        )


def test_the_progress_line_has_metrics() -> None:
    stream = io.StringIO()
    LineProgress(stream, pause=0.0)(1, 2, 0.5, {"samples_per_second": 100.0}, {"accuracy": 0.25})
    assert "loss 0.5000  accuracy 0.2500  100.0 samples/s" in stream.getvalue()
