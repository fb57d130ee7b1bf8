"""examples/soap.py: the optimizer's own promises, and its training in a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from commands import QUICK, fxpipe, fxpipe_process
from torch import Tensor

from fxpipe.task.model_file import load_task

EXAMPLE = Path(__file__).parents[1] / "examples" / "soap.py"
STEPS = 12


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_task(EXAMPLE).module


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


@pytest.mark.parametrize(("rows", "longest"), [(4, 512), (6, 5)])
def test_it_goes_the_same_way_in_any_basis(example: ModuleType, rows: int, longest: int) -> None:
    """Which Adam does not; with `longest` 5, in any basis of the dimension that is no longer."""
    left = torch.linalg.qr(drawn(rows, rows, seed=50)).Q if rows <= longest else torch.eye(rows, dtype=torch.float64)
    right = torch.linalg.qr(drawn(4, 4, seed=51)).Q
    gradients = [drawn(rows, 4, seed=i) for i in range(STEPS)]

    def both(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> tuple[Tensor, Tensor]:
        weight = drawn(rows, 4, seed=99)
        plain, turned = weight.clone().requires_grad_(), (left @ weight @ right).requires_grad_()
        there = trained(make([turned]), turned, [left @ g @ right for g in gradients])
        return left @ trained(make([plain]), plain, gradients) @ right, there

    torch.testing.assert_close(*both(lambda p: example.SOAP(p, lr=0.1, frequency=3, longest=longest)))
    one, other = both(lambda p: torch.optim.AdamW(p, lr=0.1))
    assert (one - other).abs().max() > 0.1


def test_its_bases_come_to_the_eigenvectors(example: ModuleType) -> None:
    weight = drawn(6, 4).requires_grad_()
    optimizer = example.SOAP([weight], frequency=1)
    trained(optimizer, weight, [drawn(6, 4, seed=7) @ torch.diag(torch.tensor([8.0, 4, 2, 1]).double())] * 40)
    [state] = optimizer.state.values()
    turned = state["bases"][1].mT @ state["moments"][1] @ state["bases"][1]
    assert (turned - turned.diag().diag()).abs().max() < 1e-6 * turned.abs().max()
    assert (turned.diag().diff() < 0).all()


@pytest.mark.slow
@pytest.mark.multiproc
def test_it_trains_in_a_pipeline(tmp_path: Path) -> None:
    build = tmp_path / "build"
    asked = ("compile", EXAMPLE, "-n", 2, "--microbatches", 2, *QUICK)
    assert "SOAP may train otherwise" in " ".join(fxpipe(*asked, "-o", tmp_path / "doubted").err.split())
    made = fxpipe(*asked, "--accept-optimizer-per-worker", "-o", build)
    assert made.code == 0
    assert "optimizer" not in made.err
    arguments = ("run", build, "--policy", "spectrain+ef", "--steps", 40, "--threads", 1, "--json")
    arguments = (*arguments, "--out", tmp_path / "out")
    losses = fxpipe(*arguments, "--local").json["losses"]
    assert sum(losses[-5:]) / 5 < losses[0] - 1
    assert fxpipe_process(*arguments).json["losses"] == losses
