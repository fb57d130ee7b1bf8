"""A checkpoint goes on under other cuts, another number of workers, another schedule or policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_net import Net, batches, loss
from safetensors.torch import load_file
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

import fxpipe
from fxpipe import Build
from fxpipe.checkpoint.manifest import MANIFEST
from fxpipe.errors import CheckpointError, ScheduleError
from fxpipe.plan.signed import signed

STEPS, SAVED = 14, 6


@pytest.fixture(scope="module")
def builds() -> dict[int, Build]:
    torch.manual_seed(0)
    model = Net(dropout=0)
    return {
        n: fxpipe.compile(model, loss, batches(STEPS)[0], workers=n, microbatches=2, cost="analytic") for n in (2, 3, 4)
    }


def groups(named: Any) -> Any:
    matrices, vectors = [p for _, p in named if p.ndim > 1], [p for _, p in named if p.ndim == 1]
    return AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.02}], lr=0.01)


def several(named: Any) -> Any:
    matrices, vectors = [p for _, p in named if p.ndim > 1], [p for _, p in named if p.ndim == 1]
    return [SGD(matrices, lr=0.05, momentum=0.9), AdamW(vectors, lr=0.01)]


def cosine(optimizer: Any) -> Any:
    return CosineAnnealingLR(optimizer, STEPS)


def saved(build: Build, out: Path, **options: Any) -> Path:
    """The checkpoint at step SAVED of a run that went on for some steps."""
    pipeline = build.local(lr_scheduler=cosine, checkpoint_every=str(SAVED), out=out, **options)
    pipeline.run(batches(STEPS)[: SAVED + 3])
    pipeline.checkpoints.finish()
    return out / "checkpoints" / f"step-{SAVED}"


@pytest.mark.parametrize(("optimizer", "before", "after"), [(groups, 4, 2), (several, 2, 4), (several, 3, 2)])
def test_a_synchronous_run_goes_on_as_if_it_had_never_changed(
    optimizer: Any, before: int, after: int, builds: dict[int, Build], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"optimizer": optimizer, "schedule": "1f1b", "clip_norm": 0.5, "ema": 0.9}
    path = saved(builds[before], tmp_path, **options)
    whole = builds[before].local(lr_scheduler=cosine, **options)
    losses = whole.run(batches(STEPS))
    again = builds[after].local(optimizer=optimizer, lr_scheduler=cosine, resume=path)
    assert again.recipe.schedule.name == "1f1b"
    assert again.run(batches(STEPS)[SAVED:]) == losses[SAVED:]
    pairs = [(p.state_dict(), p.averaged_state_dict()) for p in (again, whole)]
    for found, wanted in zip(*pairs, strict=True):
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("policy", ["spectrain", "latest+ef", "stash"])
def test_an_asynchronous_run_goes_on_from_the_weights_of_its_step(
    policy: str, builds: dict[int, Build], tmp_path: Path
) -> None:
    """The pipeline begins empty, with what it would have held if it had been flushed there."""
    options: dict[str, Any] = {"optimizer": groups, "policy": policy}
    path = saved(builds[4], tmp_path, **options)
    flushed = builds[4].local(lr_scheduler=cosine, **options)
    flushed.run(batches(STEPS)[:SAVED])
    weights = {name: t for file in path.glob("model-*.safetensors") for name, t in load_file(file).items()}
    for name, value in flushed.state_dict().items():
        assert torch.equal(weights[name], value), name
    other = builds[4].local(optimizer=groups, lr_scheduler=cosine, schedule="gpipe", resume=path)
    assert not other.resumed.exact
    assert str(other.recipe.policy) == "latest"
    again = builds[2].local(optimizer=groups, lr_scheduler=cosine, resume=path)
    assert str(again.recipe.policy) == policy
    for name, value in again.state_dict().items():
        if policy != "latest+ef":
            assert torch.equal(value, weights[name]), name
    losses = again.run(batches(STEPS)[SAVED:])
    assert all(loss == loss for loss in losses)  # not nan


def test_a_synchronous_run_goes_on_without_a_flush(builds: dict[int, Build], tmp_path: Path) -> None:
    """As one that was flushed after each step so far, to the bit."""
    path = saved(builds[4], tmp_path, optimizer=groups, schedule="1f1b")
    again = builds[4].local(optimizer=groups, lr_scheduler=cosine, schedule="async", policy="stash", resume=path)
    flushed = builds[4].local(optimizer=groups, lr_scheduler=cosine, schedule="async", policy="stash")
    for batch in batches(STEPS)[:SAVED]:
        flushed.step(batch)
        flushed.flush()
    assert again.run(batches(STEPS)[SAVED:]) == flushed.run(batches(STEPS)[SAVED:])
    for name, value in flushed.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


@pytest.mark.parametrize(("name", "value"), [("sync_steps", 3), ("rate_discount", 5)])
def test_a_run_with_an_option_that_is_gone_is_refused(
    name: str, value: int, builds: dict[int, Build], tmp_path: Path
) -> None:
    path = saved(builds[2], tmp_path, optimizer=groups)
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["digest"]
    manifest["run"][name] = value
    (path / MANIFEST).write_text(signed(manifest))
    with pytest.raises(CheckpointError, match=f"made with --{name.replace('_', '-')}"):
        builds[2].local(optimizer=groups, lr_scheduler=cosine, resume=path)


@pytest.mark.parametrize(
    ("schedule", "ranks", "other"),
    [
        ("zb-v", 2, "fxpipe compile MODEL -n 4 --schedule zb-v"),
        ("zb-h1", 3, "fxpipe compile MODEL -n 4 --schedule zb-h1"),
    ],
)
def test_the_schedule_of_the_checkpoint_is_not_for_these_ranks(
    schedule: str, ranks: int, other: str, builds: dict[int, Build], tmp_path: Path
) -> None:
    """The error has the option that helps, and it does."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"workers": ranks, "microbatches": 2, "cost": "analytic", "schedule": schedule}
    build = fxpipe.compile(Net(dropout=0), loss, batches(STEPS)[0], **options)
    path = saved(build, tmp_path, optimizer=groups)
    with pytest.raises(ScheduleError, match="a run keeps the schedule of its checkpoint") as caught:
        builds[4].local(optimizer=groups, lr_scheduler=cosine, resume=path)
    own = builds[4].plan.schedule
    assert caught.value.where == str(path)
    assert caught.value.hint is not None
    assert f"add --schedule {own} to the command; or " in caught.value.hint
    assert caught.value.hint.endswith(other)
    again = builds[4].local(optimizer=groups, lr_scheduler=cosine, resume=path, schedule=own)
    assert not again.resumed.exact
    assert len(again.run(batches(STEPS)[SAVED:])) == STEPS - SAVED
    with pytest.raises(ScheduleError) as named:
        builds[4].local(optimizer=groups, schedule=schedule)
    assert "checkpoint" not in named.value.what


def test_the_rates_go_on(builds: dict[int, Build], tmp_path: Path) -> None:
    path = saved(builds[4], tmp_path, optimizer=groups, policy="spectrain")
    again = builds[2].local(optimizer=groups, lr_scheduler=cosine, resume=path)
    whole = builds[2].local(optimizer=groups, lr_scheduler=cosine)
    whole.run(batches(STEPS)[:SAVED])
    for one, other in zip(again.executors, whole.executors, strict=True):
        rates = [[group["lr"] for group in e.store.updater.optimizer.param_groups] for e in (one, other)]
        assert rates[0] == rates[1]


def test_a_checkpoint_is_a_model_that_others_read(builds: dict[int, Build], tmp_path: Path) -> None:
    path = saved(builds[3], tmp_path, optimizer=groups)
    pipeline = builds[2].local(optimizer=groups, weights=path)
    model = Net(dropout=0)
    model.load_state_dict(pipeline.state_dict())
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    found = {name: torch.empty_like(value) for name, value in model.state_dict().items()}
    load(found, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], value), name
