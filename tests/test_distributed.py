"""The distributed run equals the local run bit for bit: every schedule and policy, dropout on, distinct cuts."""

from __future__ import annotations

from pathlib import Path

import pytest
from cached import cuts, lowered
from random_cuts import numbered
from small_models import CASES

from fxpipe.build import Build
from fxpipe.program import Cuts
from fxpipe.runtime.launch import launch
from fxpipe.runtime.local_run import run_local
from fxpipe.runtime.options import RunOptions

SUPPORT = Path(__file__).parent / "support"
MODEL = f"""
import sys
sys.path.insert(0, {str(SUPPORT)!r})
import torch
from small_models import CASES

case = CASES["gpt-dropout"]
model, loss = case.make, case.loss

def train_data():
    return case.batches(4)

def optimizer(named_parameters):
    return torch.optim.AdamW([p for _, p in named_parameters], lr=1e-2)

def lr_scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
"""
STEPS = 7  # more than an epoch, and enough for prediction to set in on every worker


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.py"
    path.write_text(MODEL)
    return path


@pytest.mark.multiproc
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize(
    ("schedule", "policy", "microbatches"),
    [
        ("gpipe", "latest", 4),
        ("1f1b", "latest", 4),
        ("async", "latest", 1),
        ("async", "stash", 1),
        ("async", "spectrain", 1),
    ],
)
def test_distributed_equals_local(
    model_file: Path, tmp_path: Path, schedule: str, policy: str, microbatches: int, workers: int
) -> None:
    where = cuts(CASES["gpt-dropout"], workers, 1)
    build = lowered("gpt-dropout", microbatches, workers=workers, schedule=schedule, policy=policy, **where)
    check(build, model_file, tmp_path)


@pytest.mark.multiproc
def test_three_kinds_of_cuts_and_empty_parts_too(model_file: Path, tmp_path: Path) -> None:
    """Worker 0 reads the batch and has no forward; worker 2 has no backward, so a token keeps worker 1 behind it."""
    count = len(numbered("gpt-dropout").units)
    third, half = count // 3, count // 2
    where = Cuts((0, 0, half, count), (0, third, count, count), (0, half, count, count), recompute=((1, half, count),))
    build = lowered("gpt-dropout", workers=3, cuts=where)
    assert {e.name for e in build.plan.edges if e.kind == "token"} == {"pace_B_1"}
    check(build, model_file, tmp_path)


def check(build: Build, model_file: Path, tmp_path: Path) -> None:
    workers = build.plan.workers
    build.save(tmp_path / "build", model_file=model_file)

    def options(out: str) -> RunOptions:
        return RunOptions(str(tmp_path / "build"), steps=STEPS, seed=3, out=str(tmp_path / out), threads=1)

    local = run_local(options("local"))
    real = launch(options("real"), workers)
    assert local["losses"] == real["losses"]
    assert len(set(local["losses"])) == STEPS
    weights = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("local", "real")]
    assert weights[0] == weights[1]
    assert weights[0] != (tmp_path / "build" / "weights.safetensors").read_bytes()
