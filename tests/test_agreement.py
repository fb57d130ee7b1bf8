"""Every emitted stage computes what eager PyTorch computes."""

from __future__ import annotations

import pytest
from small_models import CASES, Case

import fxpipe
from fxpipe.agreement import compare_with_eager


def cuts(case: Case, workers: int, shift: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Evenly spread cuts; backward's lie `shift` modules later than forward's."""
    at = [1 + (k * (len(case.paths) - 2)) // workers for k in range(1, workers)]
    at = [min(a, len(case.paths) - workers + k) for k, a in enumerate(at)]
    forward = tuple(case.paths[a] for a in at)
    backward = tuple(
        case.paths[min(max(a + shift, 1 + k), len(case.paths) - workers + k + 1)] for k, a in enumerate(at)
    )
    return forward, backward


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("shift", [-1, 0, 1])
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_stages_agree_with_eager(name: str, workers: int, shift: int, microbatches: int) -> None:
    case = CASES[name]
    model, batch = case.make(), case.batches(1)[0]
    forward, backward = cuts(case, workers, shift)
    assert (forward != backward) == (shift != 0)
    build = fxpipe.compile(
        model,
        case.loss,
        batch,
        workers=workers,
        microbatches=microbatches,
        schedule="1f1b",
        forward_at=forward,
        backward_at=backward,
        cost="analytic",
    )
    agreement = compare_with_eager(build, model, case.loss, batch)
    trained = {n for n, p in model.named_parameters() if p.requires_grad and n != "unused"}
    assert set(agreement.gradients) == trained
    assert agreement.largest < 1e-5, agreement


def test_a_wrong_stage_is_found() -> None:
    case = CASES["function"]
    model, batch = case.make(), case.batches(1)[0]
    build = fxpipe.compile(model, case.loss, batch, workers=2, cost="analytic")
    name = "stage_0.py"
    broken = build.files[name].replace("aten.mul.Tensor(", "aten.add.Tensor(", 1)
    assert broken != build.files[name]
    object.__setattr__(build, "files", {**build.files, name: broken})
    assert compare_with_eager(build, model, case.loss, batch).largest > 1e-2
