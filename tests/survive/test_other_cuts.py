"""A checkpoint goes on under other cuts, another number of workers, another schedule or policy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_net import Net, batches, loss
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxpipe
from fxpipe import Build
from fxpipe.checkpoint.manifest import MANIFEST
from fxpipe.errors import CheckpointError, RunError, ScheduleError, listed
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


FIRST = ("enter.", "norm.", "layers.0.", "layers.1.")
"""What another build of the same model does not train: with three workers, all that the first one has."""


def trains(frozen: bool) -> Net:
    torch.manual_seed(0)
    model = Net(dropout=0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and name.startswith(FIRST)))
    return model


@pytest.fixture(scope="module")
def others() -> dict[tuple[bool, int], Build]:
    return {
        (frozen, n): fxpipe.compile(trains(frozen), loss, batches(STEPS)[0], workers=n, microbatches=1, cost="analytic")
        for frozen, n in ((True, 3), (False, 3), (False, 2), (True, 2))
    }


def eagerly(before: Any, after: Any) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """An ordinary loop: from step SAVED on, `after` gives the parameters that train, and new ones have no state.

    Returns:
        The losses, the weights and their moving averages.
    """
    model, losses = trains(frozen=False), []
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    known: Any = None
    at: Any = None
    for choose, steps in ((before, slice(SAVED)), (after, slice(SAVED, None))):
        named = [(n, p.requires_grad_(choose(n))) for n, p in model.named_parameters() if choose(n)]
        optimizer = groups(named)
        scheduler = cosine(optimizer)
        if known is not None:
            for group, old in zip(optimizer.param_groups, known.param_groups, strict=True):
                group.update({key: value for key, value in old.items() if key != "params"})
                optimizer.state.update({p: known.state[p] for p in group["params"] if p in known.state})
            scheduler.load_state_dict(at)
        for batch in batches(STEPS)[steps]:
            model.zero_grad()
            value = loss(model, batch)
            value.backward()
            optimizer.step()
            scheduler.step()
            averaged.update_parameters(model)
            losses.append(float(value.detach()))
        known, at = optimizer, scheduler.state_dict()
    return losses, model.state_dict(), averaged.module.state_dict()


@pytest.mark.parametrize("before", [2, 3])
@pytest.mark.parametrize("thaws", [True, False], ids=["thaws", "freezes"])
def test_a_run_goes_on_with_other_parameters(
    thaws: bool, before: int, others: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """New ones begin as in a new optimizer, at the rates that the scheduler has come to."""
    options: dict[str, Any] = {"optimizer": groups, "schedule": "1f1b"}
    path = saved(others[thaws, before], tmp_path, ema=0.9, **options)
    capsys.readouterr()
    again = others[not thaws, 5 - before].local(lr_scheduler=cosine, resume=path, **options)
    names = listed([n for n, _ in Net(0).named_parameters() if n.startswith(FIRST)], 6)
    said = "trained from here on, with a fresh state" if thaws else "no longer trained, and their state"
    assert [line for line in capsys.readouterr().err.splitlines() if said in line and names in line]
    few, every = lambda name: not name.startswith(FIRST), lambda name: True
    losses, weights, averages = eagerly(few, every) if thaws else eagerly(every, few)
    assert again.run(batches(STEPS)[SAVED:]) == losses[SAVED:]
    assert_same(again.state_dict(), weights)
    now_frozen = {} if thaws else {name: value for name, value in weights.items() if not few(name)}
    assert_same(again.averaged_state_dict(), {**parameters_of(averages), **parameters_of(now_frozen)})


def parameters_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name in dict(Net(0).named_parameters())}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []


def test_an_optimizer_that_takes_more_parameters_goes_on(
    others: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The build is the same, and what the hook had left out was not trained."""
    few = lambda name: not name.startswith(FIRST)  # noqa: E731
    path = saved(others[False, 2], tmp_path, optimizer=lambda n: groups([r for r in n if few(r[0])]), schedule="1f1b")
    again = others[False, 2].local(optimizer=groups, lr_scheduler=cosine, resume=path)
    assert again.resumed.exact
    assert "trained from here on, with a fresh state of the optimizer: enter.weight" in capsys.readouterr().err
    losses, weights, _ = eagerly(few, lambda name: True)
    assert again.run(batches(STEPS)[SAVED:]) == losses[SAVED:]
    assert_same(again.state_dict(), weights)


@pytest.mark.parametrize(("policy", "thaws"), [("latest+ef", True), ("lwp", True), ("lwp", False)])
def test_what_a_policy_remembers_goes_on_with_other_parameters(
    policy: str, thaws: bool, others: Any, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"optimizer": groups, "policy": policy, "schedule": "async"}
    path = saved(others[thaws, 3], tmp_path, **options)
    again = others[not thaws, 3].local(lr_scheduler=cosine, resume=path, **options)
    again.save(tmp_path / "at-once")  # what is remembered of some alone
    assert all(math.isfinite(value) for value in again.run(batches(STEPS)[SAVED:]))


class Plain(SGD):
    """Writes its state in a form of its own."""

    def state_dict(self) -> Any:
        return super().state_dict()


def test_a_state_in_a_form_of_its_own_is_of_its_parameters_alone(others: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": lambda named: Plain([p for _, p in named], lr=0.1), "schedule": "1f1b"}
    torch.manual_seed(0)
    one = {f: fxpipe.compile(trains(f), loss, batches(1)[0], workers=1, cost="analytic") for f in (True, False)}
    path = saved(one[True], tmp_path, **options)
    with pytest.raises(RunError, match="Plain has its own form of state, which does not fit other cuts or"):
        one[False].local(lr_scheduler=cosine, resume=path, **options)
