"""Training with codecs: it converges, near to training without, and no loss that is not told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cached import captured, cuts, lowered
from commands import QUICK, fxpipe
from model_files import write_model
from small_models import CASES
from torch import Tensor, nn

import fxpipe as api
from fxpipe.builds.build import Build
from fxpipe.codecs.encoding import Encoding
from fxpipe.errors import RunError
from fxpipe.lowering.codec_effect import codec_effect


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of small models are packed, too."""
    monkeypatch.setattr(Encoding, "LEAST_BYTES", 1)


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9)


def built(name: str, codec: str, workers: int = 3, shift: int = 1, microbatches: int = 2, **options: Any) -> Build:
    where = cuts(captured(name)[0], workers, shift)
    return lowered(name, microbatches, workers=workers, codec=codec, **where, **options)


def packs(build: Build) -> int:
    return sum(bool(edge.codec) for edge in build.plan.all_edges)


def test_the_seed_of_a_run_draws_the_roundings() -> None:
    build, data = built("gpt", "gradient=int4"), CASES["gpt"].batches(4)
    one, same, other = (build.local(optimizer=sgd, seed=seed).run(data) for seed in (0, 0, 1))
    assert one == same != other


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def separable(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("codec", ["int4", "gradient=topk:0.05", "gradient=lowrank:2"])
def test_training_converges(codec: str) -> None:
    generator = torch.Generator().manual_seed(0)
    centres = 2 * torch.randn(3, 32, generator=generator)
    labels = [torch.randint(0, 3, (32,), generator=generator) for _ in range(60)]
    data = [(centres[y] + torch.randn(32, 32, generator=generator), y) for y in labels]
    torch.manual_seed(0)
    build = api.compile(
        Images(), separable, data[0], workers=3, microbatches=2, codec=codec, cost="analytic",
        forward_at=["layers.1", "layers.3"], backward_at=["layers.1", "layers.3"],
    )  # fmt: skip
    assert packs(build)
    losses = build.local(optimizer=sgd).run(data)
    assert losses[0] > 0.9
    assert sum(losses[-10:]) / 10 < 0.05


def test_a_lossless_codec_says_what_does_not_fit() -> None:
    class Picking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, number: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x))) * (number % 7)

    batch = torch.randn(8, 4), torch.arange(32).view(8, 4) + 2**40
    build = api.compile(
        Picking(), lambda m, b: m(*b).square().mean(), batch,
        workers=2, forward_at=["second"], microbatches=1, cost="analytic", codec="int8",
    )  # fmt: skip
    assert any(edge.codec == "int32" for edge in build.plan.edges)
    with pytest.raises(RunError, match=f"whole numbers from {2**40} to {2**40 + 31} are sent as int32") as caught:
        build.local(optimizer=sgd).step(batch)
    assert "input=none" in str(caught.value)


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A model file whose values are large enough for codecs."""
    return write_model(tmp_path, ("randn(4, 6)", "randn(64, 6)"), ("(4,)", "(64,)"))


def test_what_compile_says_of_codecs(wide: Path, tmp_path: Path) -> None:
    compiled = fxpipe("compile", wide, *QUICK, "--codec", "int8", "--verify", "-o", tmp_path / "build")
    assert compiled.code == 0, compiled
    assert "codecs: " in compiled.out
    assert "int8 on 4, bits on 1 of 6 edges; values take " in compiled.out
    assert "against eager PyTorch, without codecs: loss " in compiled.out
    assert "codecs change the loss of this batch by " in compiled.out
    plain = fxpipe("compile", wide, *QUICK, "--verify", "-o", tmp_path / "plain")
    assert "codec" not in plain.out
    told = fxpipe("diff", tmp_path / "plain", tmp_path / "build").out
    assert "codec: none → int8" in told
    assert "codec int8" in fxpipe("inspect", tmp_path / "build").out
    refused = fxpipe("compile", wide, *QUICK, "--codec", "int9", "-o", tmp_path / "build")
    assert refused.code == 1
    assert "there is no codec 'int9', did you mean 'int8'" in refused.err


class Masked(nn.Module):
    """An infinite number in an activation, which only the second worker takes out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.softmax = nn.Linear(4, 4), nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.first(x).masked_fill(torch.arange(4) == 1, -torch.inf)
        return self.softmax(scores)


def test_infinite_numbers_are_seen_by_verify() -> None:
    torch.manual_seed(0)
    batch = torch.randn(16, 4)
    build = api.compile(
        Masked(), lambda m, b: m(b).square().mean(), batch,
        workers=2, forward_at=["softmax"], microbatches=1, cost="analytic", codec="int8",
    )  # fmt: skip
    assert any(edge.codec == "int8" for edge in build.plan.edges)
    assert not codec_effect(build, batch).finite
