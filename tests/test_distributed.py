"""The distributed run equals the local run bit for bit: every schedule and policy, dropout on, distinct cuts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cached import cuts, lowered
from random_cuts import numbered
from several_runs import one_after_the_other
from small_models import CASES

from fxpipe import compile as compile_model
from fxpipe.build.build import Build
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.links import Links
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.launch import launch
from fxpipe.runtime.process.local_run import run_local

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
    return {{optimizer}}

def lr_scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
"""
OPTIMIZERS = {
    "adamw": "torch.optim.AdamW([p for _, p in named_parameters], lr=1e-2)",
    "momentum": "torch.optim.SGD([p for _, p in named_parameters], lr=0.05, momentum=0.9)",
    "plain": "torch.optim.SGD([p for _, p in named_parameters], lr=0.05)",
    "nadam": "torch.optim.NAdam([p for _, p in named_parameters], lr=1e-2, betas=(0.99, 0.999))",
    "muon": """[kind(own, lr=1e-2) for kind, own in (
        (torch.optim.Muon, [p for _, p in named_parameters if p.dim() == 2]),
        (torch.optim.AdamW, [p for _, p in named_parameters if p.dim() != 2]),
    ) if own]""",
}
STEPS = 7  # more than an epoch, and enough for prediction to set in on every worker


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By optimizer."""
    folder = tmp_path_factory.mktemp("model")
    for name, text in OPTIMIZERS.items():
        (folder / f"{name}.py").write_text(MODEL.format(optimizer=text))
    return {name: folder / f"{name}.py" for name in OPTIMIZERS}


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("schedule", "policy", "microbatches", "workers"),
    [("gpipe", "latest", 4, 4), ("1f1b", "latest", 4, 2), ("1f1b", "latest", 4, 4), ("async", "spectrain", 1, 4)],
)
def test_distributed_equals_local(
    model_files: dict[str, Path], tmp_path: Path, schedule: str, policy: str, microbatches: int, workers: int
) -> None:
    where = cuts(CASES["gpt-dropout"], workers, 1)
    build = lowered("gpt-dropout", microbatches, workers=workers, schedule=schedule, policy=policy, **where)
    check(build, model_files["adamw"], tmp_path)


TWO = [
    (1, 1, "latest", "adamw", {}),
    (1, 1, "stash", "adamw", {}),
    (1, 1, "vertical", "adamw", {}),
    (1, 1, "2bw", "adamw", {}),
    (1, 1, "spectrain+decay", "adamw", {}),
    (1, 1, "pipeoptim", "plain", {}),
    (1, 1, "pipeoptim+keep", "adamw", {}),
    (1, 2, "xpipe", "momentum", {}),
    (1, 1, "lwp", "adamw", {}),
    (1, 1, "2bw+predict", "plain", {"log_staleness": True}),
    (1, 2, "spectrain+ef", "adamw", {"clip_norm": 0.5}),
    (1, 2, "spectrain", "plain", {"clip_norm": 0.5, "log_staleness": True}),
    (1, 1, "spectrain", "nadam", {"clip_norm": 0.5}),
    (1, 1, "lwp", "muon", {"clip_norm": 0.5, "log_staleness": True}),
]
FOUR = [
    (1, 1, "latest", "adamw", {}),
    (1, 1, "stash", "adamw", {}),
    (1, 1, "pipeoptim+keep", "momentum", {"clip_norm": 0.5, "log_staleness": True}),
    (1, 4, "2bw", "adamw", {}),
    (1, 4, "xpipe+decay", "momentum", {}),
    (0, 1, "vertical", "adamw", {}),
    (0, 4, "pipeoptim", "momentum", {"clip_norm": 0.5}),
    (1, 4, "lwp+ef", "adamw", {}),
    (0, 4, "2bw+predict+ef", "momentum", {"clip_norm": 0.5}),
    (1, 4, "spectrain+ef", "muon", {"clip_norm": 0.5}),
    (1, 4, "2bw+predict", "nadam", {}),
]


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(("workers", "runs"), [(2, TWO), pytest.param(4, FOUR, marks=pytest.mark.slow)])
def test_every_policy_distributed_equals_local(
    model_files: dict[str, Path], tmp_path: Path, workers: int, runs: list[tuple[int, int, str, str, dict[str, Any]]]
) -> None:
    """One start of the processes, in which they train one run after the other: shift of backward's cuts,
    microbatches, policy, optimizer, options."""
    for shift, microbatches in {run[:2] for run in runs}:
        where = cuts(CASES["gpt-dropout"], workers, shift)
        build = lowered("gpt-dropout", microbatches, workers=workers, schedule="async", policy="latest", **where)
        build.save(tmp_path / f"build_{shift}_{microbatches}", model_file=model_files["adamw"])
    wanted = [
        RunOptions(
            str(tmp_path / f"build_{shift}_{microbatches}"),
            model_file=str(model_files[optimizer]),
            policy=policy,
            steps=STEPS + 2 * workers,
            seed=3,
            threads=1,
            out=str(tmp_path / f"local_{number}"),
            **more,
        )
        for number, (shift, microbatches, policy, optimizer, more) in enumerate(runs)
    ]
    local = [run_local(options) for options in wanted]
    wanted = [dataclasses.replace(options, out=str(tmp_path / f"real_{i}")) for i, options in enumerate(wanted)]
    real = one_after_the_other(wanted, workers, tmp_path)
    for number, options in enumerate(wanted):
        assert real[number]["losses"] == local[number]["losses"], options.policy
        assert real[number].keys() == local[number].keys()
        folders = tmp_path / f"local_{number}", tmp_path / f"real_{number}"
        names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
        assert names[0] == names[1]
        assert any(name.startswith("staleness") for name in names[0]) == options.log_staleness
        for name in names[0]:
            if name not in ("metrics.jsonl", "run.json"):
                one, other = ((folder / name).read_bytes() for folder in folders)
                assert one == other, (options.policy, name)
        lines = [[json.loads(line) for line in (folder / "metrics.jsonl").open()] for folder in folders]
        assert [line.get("grad_norm") for line in lines[0]] == [line.get("grad_norm") for line in lines[1]]
        assert ("grad_norm" in lines[0][0]) == (options.clip_norm is not None)
        assert [row.get("staleness") for row in local[number]["workers"]] == [
            row.get("staleness") for row in real[number]["workers"]
        ]
    assert len({tuple(run["losses"]) for run in local}) == len(runs) - same(runs, workers)


def same(runs: Sequence[tuple[Any, ...]], workers: int) -> int:
    """How many runs say what another says: two buffers are vertical sync where a delay is one update."""
    both = {policy for _, microbatches, policy, optimizer, _ in runs if (microbatches, optimizer) == (1, "adamw")}
    return int(workers == 2 and {"vertical", "2bw"} <= both)


@pytest.mark.slow
@pytest.mark.multiproc
def test_three_kinds_of_cuts_and_empty_parts_too(model_files: dict[str, Path], tmp_path: Path) -> None:
    """Worker 0 reads the batch and has no forward; worker 2 has no backward, so a token keeps worker 1 behind it."""
    count = len(numbered("gpt-dropout").units)
    third, half = count // 3, count // 2
    where = Cuts((0, 0, half, count), (0, third, count, count), (0, half, count, count), recompute=((1, half, count),))
    build = lowered("gpt-dropout", workers=3, cuts=where)
    assert {e.name for e in build.plan.edges if e.kind == "token"} == {"pace_B_1"}
    check(build, model_files["adamw"], tmp_path)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(("schedule", "workers"), [("zb-h1", 2), ("zb-h2", 3)])
def test_weight_gradients_apart(model_files: dict[str, Path], tmp_path: Path, schedule: str, workers: int) -> None:
    where = cuts(CASES["gpt-dropout"], workers, 1)
    check(lowered("gpt-dropout", 4, workers=workers, schedule=schedule, **where), model_files["adamw"], tmp_path)


@pytest.mark.multiproc
def test_an_order_of_each_workers_own(model_files: dict[str, Path], tmp_path: Path) -> None:
    """That `--schedule auto` takes where times are uneven and messages slow."""
    case = CASES["gpt-dropout"]
    asked: dict[str, Any] = {"cost": "analytic", "links": Links(latency=2e-3), "cuts": "same", "microbatches": 4}
    build = compile_model(case.make(), case.loss, case.batches(1)[0], workers=2, synchronous=True, **asked)
    assert build.plan.schedule == "csv"
    assert build.costs.schedules[0].schedule == "csv"
    check(build, model_files["adamw"], tmp_path)


@pytest.mark.slow
@pytest.mark.multiproc
def test_weight_gradients_on_another_worker(model_files: dict[str, Path], tmp_path: Path) -> None:
    count = len(numbered("gpt-dropout").units)
    third, half = count // 3, count // 2
    where = Cuts((0, third, half, count), (0, third, half, count), (0, half, half + 2, count))
    build = lowered("gpt-dropout", 4, workers=3, schedule="zb-h2", cuts=where)
    assert any(edge.dst_phase == "W" for edge in build.plan.edges)
    check(build, model_files["momentum"], tmp_path)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("schedule", ["async", "zb-h1"])
def test_what_is_computed_again(model_files: dict[str, Path], tmp_path: Path, schedule: str) -> None:
    where = cuts(CASES["gpt-dropout"], 2, 1)
    build = lowered("gpt-dropout", 4, workers=2, schedule=schedule, recompute="full", **where)
    assert all(stage.again for stage in build.plan.stages)
    check(build, model_files["adamw"], tmp_path)


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
