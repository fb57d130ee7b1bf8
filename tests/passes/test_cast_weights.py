"""Weights that stages read in 16 bits: which they are, and how often they are cast."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines import pipeline_of, sgd
from torch import Tensor, nn

import fxpipe
from fxpipe.torch_private import TorchDispatchMode

CAST = torch.ops.aten._to_copy.default
MICROBATCHES, STEPS = 3, 4


class Net(nn.Module):
    """Each weight has a shape of its own. `shared` is also read in float32; `frozen` is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen = nn.Linear(8, 11), nn.Linear(11, 12, bias=False).requires_grad_(False)
        self.shared, self.last = nn.Linear(12, 13, bias=False), nn.Linear(13, 14, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.shared(torch.tanh(self.frozen(torch.tanh(self.first(x)))))))


def loss(model: Any, x: Tensor) -> Tensor:
    penalty = sum(weight.square().sum() for name, weight in model.named_parameters() if name == "shared.weight")
    return model(x).float().square().mean() + 1e-3 * penalty


class Casts(TorchDispatchMode):
    """Counts casts of float32 to bfloat16, by shape."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is CAST and (args[0].dtype, result.dtype) == (torch.float32, torch.bfloat16):
            self.counts[tuple(args[0].shape)] += 1
        return result


def build_of(**options: Any) -> fxpipe.Build:
    torch.manual_seed(0)
    return fxpipe.compile(
        Net(), loss, batch(0), workers=2, forward_at=["shared"], autocast="bf16", cost="analytic", **options
    )


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize(
    ("schedule", "policy"), [("1f1b", None), ("async", "latest"), ("async", "stash"), ("async", "spectrain")]
)
def test_a_weight_is_cast_once_a_version(schedule: str, policy: str | None, tmp_path: Path) -> None:
    """Or once for each distance of a prediction; a frozen one at the start; in every call what stages read as it is."""
    build = build_of(schedule=schedule, policy=policy, microbatches=MICROBATCHES)
    read = {row.name: row.cast for row in build.plan.parameters}
    assert read == {
        "first.weight": "bfloat16", "first.bias": "bfloat16", "frozen.weight": "bfloat16", "shared.weight": None,
        "last.weight": "bfloat16",
    }  # fmt: skip
    build.save(tmp_path / "build")
    pipeline = pipeline_of(tmp_path / "build", sgd)
    with Casts() as casts:
        for step in range(STEPS):
            pipeline.step(batch(step))
        pipeline.flush()
    distances = 2 if policy == "spectrain" else 1
    for shape, most in (((11, 8), STEPS * distances), ((11,), STEPS * distances), ((14, 13), STEPS)):
        assert 0 < casts.counts[shape] <= most, (shape, casts.counts)
    assert casts.counts[12, 11] == 0
    assert casts.counts[13, 12] == 2 * MICROBATCHES * STEPS


@pytest.mark.parametrize("schedule", ["1f1b", "async"])
def test_bits_are_those_of_casts_in_the_stages(schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name in ("before", "inside"):
        if name == "inside":
            monkeypatch.setattr("fxpipe.passes.cast_weights._only_type", lambda weight: None)
        build_of(schedule=schedule, microbatches=2).save(tmp_path / name)
        pipeline = pipeline_of(tmp_path / name, sgd)
        losses = [float(pipeline.step(batch(step))) for step in range(STEPS)]
        pipeline.flush()
        found.append((losses, pipeline.state_dict()))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])
