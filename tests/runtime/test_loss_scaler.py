"""Loss scaling over all workers: the updates, the skipped ones and the scales of `torch.amp.GradScaler`."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import overflowing
import pytest
import torch
from commands import fxpipe
from overflowing import LAYERS, batches, loss, made

import fxpipe as fxp
from fxpipe.builds.build import Build
from fxpipe.errors import NotFiniteError, ScheduleError, TaskError
from fxpipe.observe.run_folder import read_run
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.start import run_local
from fxpipe.runtime.worker.loss_scaler import Scale, unscale

WHERE = {"forward_at": ["layers.1", "layers.2"], "backward_at": ["layers.1", "layers.2"]}
MIXED = {"forward_at": ["layers.1", "layers.2"], "backward_at": ["layers.2", "head"]}


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-2)


def compiled(microbatches: int = 2, schedule: str = "1f1b", **options: Any) -> Build:
    where = {"workers": LAYERS, **WHERE} | options
    return fxp.compile(
        made(),
        loss,
        batches(1, 0)[0],
        schedule=schedule,
        microbatches=microbatches,
        autocast="fp16",
        cost="analytic",
        **where,
    )


def test_gradients_too_small_for_float16_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the scale is for: without it, gradients below 1e-8 are zero."""

    def small(model: Any, batch: Any) -> Any:
        return loss(model, batch) * 1e-7

    build = fxp.compile(
        made(), small, batches(1, 0)[0], schedule="gpipe", autocast="fp16", microbatches=2, cost="analytic",
        workers=3, **WHERE,
    )  # fmt: skip
    moved = []
    for scale in (1.0, 2.0**20):
        pipeline = build.local(optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1e5), loss_scale=scale)
        before = {n: v.clone() for n, v in pipeline.state_dict().items()}
        pipeline.run(batches(2, 1))
        moved.append({n for n, v in pipeline.state_dict().items() if not torch.equal(v, before[n])})
    assert len(moved[0]) < len(moved[1]) == len(before)


def test_a_run_that_only_overflows_ends() -> None:
    """A gradient that is too large for float16 whatever the scale, while the loss is finite."""
    pipeline = compiled(2).local(optimizer=adam, loss_scale=8.0)
    ((x, y, spikes),) = batches(1, 0)
    batch = x, y * 1e15, spikes
    assert all(torch.isfinite(pipeline.step(batch)) for _ in range(3))
    with pytest.raises(NotFiniteError, match=r"step 4 overflow float16 even at a loss scale of 1: 4 steps in a row"):
        pipeline.step(batch)


def test_schedules_without_a_flush_are_refused() -> None:
    with pytest.raises(ScheduleError, match="a worker updates before the earlier workers' gradients"):
        compiled(schedule="async", policy="latest")
    with pytest.raises(ScheduleError, match="schedule 'async'"):
        compiled().local(optimizer=adam, schedule="async", policy="latest")


def test_parameters_in_float16_are_refused() -> None:
    model = made()
    model.head.half()
    with pytest.raises(TaskError, match=r"these are float16: head\.weight, head\.bias"):
        fxp.compile(model, loss, batches(1, 0)[0], schedule="1f1b", autocast="fp16", microbatches=1, cost="analytic")


def test_scale_and_unscale_against_grad_scaler() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        initial, interval = 2.0 ** draw.randrange(-3, 100), draw.randrange(1, 4)
        scaler = torch.amp.GradScaler("cpu", init_scale=initial, growth_interval=interval)
        scale = Scale(initial)
        for _ in range(30):
            value = draw.choice([1.0, 1.0, 1.0, float("inf"), float("nan")])
            weight = torch.nn.Parameter(torch.ones(3))
            weight.grad = torch.full((3,), 3.7 * scale.value) * value
            mine = weight.grad.clone()
            scaler.scale(torch.ones(()))
            optimizer = torch.optim.SGD([weight], lr=0.1)
            scaler.unscale_(optimizer)
            found = unscale([mine], scale.value)
            assert torch.equal(mine, weight.grad) or value != 1.0
            scaler.step(optimizer)
            assert bool(found) == bool((weight == 1).all())
            scaler.update()
            scale.update(bool(found), interval)
            assert scale.value == scaler.get_scale()
            assert scale.good == scaler._get_growth_tracker()


# ── Whole runs ──────────────────────────────────────────────────────────────────────────────────────────────────────

HOOKS = """

def model():
    return made()


def train_data():
    return batches(14, 0, {1: [2], 2: [0], 8: [1], 9: [0, 2]})


def optimizer(named_parameters):
    return torch.optim.AdamW([p for _, p in named_parameters], lr=1e-2)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build of a model file, for three workers, whose cuts of forward and backward differ."""
    where = tmp_path_factory.mktemp("scaled")
    (where / "model.py").write_text(Path(overflowing.__file__).read_text() + HOOKS)
    compiled(2, **MIXED).save(where / "build", model_file=where / "model.py")
    return where / "build"


def scaled(folder: Path, out: Path, **changes: Any) -> RunOptions:
    """A run that starts with a scale of 4096 and doubles it after every five good steps."""
    options = RunOptions(str(folder), loss_scale=4096.0, loss_scale_interval=5, out=str(out), threads=1, clip_norm=0.5)
    return dataclasses.replace(options, **changes)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").open()]


def test_metrics_and_summary(folder: Path, tmp_path: Path) -> None:
    summary = run_local(scaled(folder, tmp_path))
    found = [(line["loss_scale"], line.get("skipped", False)) for line in lines(tmp_path)]
    assert found[:4] == [(4096.0, False), (4096.0, True), (2048.0, True), (1024.0, False)]
    assert found[7:11] == [(1024.0, False), (2048.0, True), (1024.0, True), (512.0, False)]
    assert summary["loss_scaling"] == {"scale": 512.0, "skipped_steps": 4}
    assert summary["not_finite"] == {"losses": 0, "weights": 0}
    assert [line["grad_norm"] is None for line in lines(tmp_path)] == [skipped for _, skipped in found]
    assert read_run(tmp_path)["metrics"]["loss_scale"] == [scale for scale, _ in found]
    said = fxpipe("inspect", folder, "--run", tmp_path)
    assert "loss scale 512, 4 steps skipped" in said.out
