"""examples/soap.py: the optimizer's own promises, and its training in a pipeline."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from commands import QUICK, fxpipe, fxpipe_process
from torch import Tensor

from fxpipe.task.model_file import imported

EXAMPLE = Path(__file__).parents[1] / "examples" / "soap.py"
STEPS = 12


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return imported(EXAMPLE)


def trained(optimizer: torch.optim.Optimizer, weight: Tensor, gradients: list[Tensor]) -> Tensor:
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("shape", "longest"), [((6, 4), 3), ((5,), 512), ((2, 3, 4), 512)])
def test_what_is_not_turned_is_adamw(example: ModuleType, shape: tuple[int, ...], longest: int) -> None:
    gradients = [drawn(*shape, seed=i) for i in range(STEPS)]
    options = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.2}
    weights = [drawn(*shape, seed=99).requires_grad_() for _ in range(2)]
    own = trained(example.SOAP(weights[:1], longest=longest, **options), weights[0], gradients)
    torch.testing.assert_close(own, trained(torch.optim.AdamW(weights[1:], **options), weights[1], gradients))


@pytest.mark.slow
@pytest.mark.multiproc
def test_it_trains_in_a_pipeline(tmp_path: Path) -> None:
    build = tmp_path / "build"
    asked = ("compile", EXAMPLE, "-n", 2, "--microbatches", 2, *QUICK)
    assert "SOAP may train differently" in " ".join(fxpipe(*asked, "-o", tmp_path / "doubted").err.split())
    made = fxpipe(*asked, "--accept-optimizer-per-worker", "-o", build)
    assert made.code == 0
    assert "optimizer" not in made.err
    arguments = ("run", build, "--policy", "spectrain+ef", "--steps", 40, "--threads", 1, "--json")
    arguments = (*arguments, "--out", tmp_path / "out")
    losses = fxpipe(*arguments, "--local").json["losses"]
    assert sum(losses[-5:]) / 5 < losses[0] - 1
    assert fxpipe_process(*arguments).json["losses"] == losses
