"""Workers with different numbers of replicas train as one pipeline does, and in processes as in one."""

from __future__ import annotations

import json
from math import lcm
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxpipe as fxp
from fxpipe.errors import CutError, FxpipeError, PolicyError, ScheduleError
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.launch import launch
from fxpipe.runtime.process.local_run import run_local
from fxpipe.task.model_file import load_task

STEPS = 3
MODEL = Path(__file__).parent / "replica_model.py"
COUNTS = st.lists(st.integers(1, 3), min_size=2, max_size=3).filter(lambda counts: len(set(counts)) > 1)


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(12) % 3
    return [(torch.randn(12, 6, generator=generator), labels) for _ in range(STEPS)]


def build_of(counts: list[int], schedule: str, times: int = 1, **more: Any) -> fxp.Build:
    return fxp.compile(
        net(),
        loss,
        batches()[0],
        replicas=tuple(counts),
        schedule=schedule,
        cost="analytic",
        **{
            "workers": len(counts),
            "microbatches": times * lcm(*counts),
            "forward_at": ["2", "4"][: len(counts) - 1],
            **more,
        },
    )


def by_hand(counts: list[int], microbatches: int, clip_norm: float | None) -> tuple[list[float], dict[str, Tensor]]:
    """The eager model on each microbatch; gradients added by each replica in order, then the replicas' sums."""
    model = net()
    optimizer = sgd(model.named_parameters())
    owners = {name: min(int(name[0]) // 2, len(counts) - 1) for name, _ in model.named_parameters()}
    found = []
    for batch in batches():
        parts = list(zip(*(torch.chunk(leaf, microbatches) for leaf in batch), strict=True))
        losses, gradients = [], []
        for part in parts:
            optimizer.zero_grad()
            each = loss(model, part)
            each.backward()
            losses.append(each.detach())
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        for name, parameter in model.named_parameters():
            shares = [gradients[j :: counts[owners[name]]] for j in range(counts[owners[name]])]
            parameter.grad = _added([_added([g[name] for g in share]) for share in shares]) / microbatches
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm, foreach=True)
        optimizer.step()
        last = [losses[j :: counts[-1]] for j in range(counts[-1])]
        found.append(float(_added([_added(share) for share in last]) / microbatches))
    return found, model.state_dict()


def _added(values: list[Tensor]) -> Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total


@given(COUNTS, st.sampled_from(["1f1b", "gpipe"]), st.integers(1, 2), st.sampled_from([None, 0.1]))
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_it_is_the_eager_model_in_the_order_of_sums(
    counts: list[int], schedule: str, times: int, clip_norm: float | None
) -> None:
    build = build_of(counts, schedule, times)
    if build.plan.microbatches > 12:
        return
    options = {} if clip_norm is None else {"clip_norm": clip_norm}
    pipeline = build.local(optimizer=sgd, **options)
    found = [float(value) for value in pipeline.run(batches())]
    losses, state = by_hand(counts, build.plan.microbatches, clip_norm)
    assert found == pytest.approx(losses, rel=1e-6)
    for name, value in pipeline.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("counts", "schedule"), [([2, 1, 1], "async"), ([1, 2, 1], "1f1b"), ([3, 1], "1f1b")])
def test_replicas_stay_equal(counts: list[int], schedule: str) -> None:
    """Two runs of a build; in each, all replicas of a worker have the same weights, bit for bit."""
    build = build_of(counts, schedule, policy="stash" if schedule == "async" else None)
    first = build.local(optimizer=sgd)
    second = build.local(optimizer=sgd)
    assert first.run(batches()) == second.run(batches())
    assert all(e.store.version == STEPS for e in first.every)
    for executor in first.every:
        twin = first.executors[executor.worker]
        for name, value in executor.store.parameters.items():
            assert torch.equal(value, twin.store.parameters[name])


@pytest.mark.parametrize(
    ("counts", "schedule", "more"),
    [
        ((2, 1, 1), "1f1b", {"clip_norm": 0.5, "eval_every": 2}),
        pytest.param((1, 2, 1), "async", {"clip_norm": 0.5, "eval_every": 3}, marks=pytest.mark.slow),
        pytest.param((1, 3), "gpipe", {}, marks=pytest.mark.slow),
        pytest.param((3, 1), "1f1b", {"ema": 0.9, "eval_every": 3}, marks=pytest.mark.slow),
    ],
)
def test_processes_have_the_bits_of_one(
    tmp_path: Path, counts: tuple[int, ...], schedule: str, more: dict[str, Any]
) -> None:
    """Batch norm, dropout, evaluation, averages, checkpoints, and a run that goes on."""
    _compiled(tmp_path / "build", counts, schedule)
    common = {"build": str(tmp_path / "build"), "steps": 6, "checkpoint_every": "3", "progress": False, **more}
    local = run_local(RunOptions(**common, out=str(tmp_path / "local")))
    found = _launched(RunOptions(**common, out=str(tmp_path / "apart")))
    assert found["losses"] == local["losses"]
    assert found["evaluations"] == local["evaluations"]
    assert len(found["replicas"]) == sum(counts) - len(counts)
    resumed = {**common, "resume": str(tmp_path / "apart" / "checkpoints" / "step-3")}
    again = run_local(RunOptions(**resumed, out=str(tmp_path / "again")))
    assert again["losses"] == local["losses"]
    weights = [(tmp_path / where / "model.safetensors").read_bytes() for where in ("local", "apart", "again")]
    assert weights[0] == weights[1] == weights[2]


def test_what_cannot_be_is_refused_with_what_can() -> None:
    with pytest.raises(CutError, match="all workers have 2 replicas") as refused:
        build_of([2, 2], "1f1b")
    assert "--dp 2" in str(refused.value.hint)
    with pytest.raises(CutError, match="2,1 are the replicas of 2 workers, there are 3"):
        build_of([2, 1], "1f1b", workers=3)
    with pytest.raises(ScheduleError, match="5 microbatches cannot be shared by 2, 1 replicas"):
        build_of([2, 1], "1f1b", microbatches=5)
    with pytest.raises(CutError, match="for workers with equally many replicas, not 2,1"):
        build_of([2, 1], "1f1b", shard="optimizer")
    for schedule in ("zb-h1", "auto"):
        with pytest.raises(ScheduleError, match="equally many replicas"):
            build_of([2, 1], schedule)
    with pytest.raises(PolicyError, match="follows a microbatch through one pipeline"):
        build_of([2, 1], "async", policy="vertical")
    with pytest.raises(FxpipeError, match="reads weights of worker"):
        build_of([2, 1], "async", forward_at=["2"], backward_at=["4"], policy="stash")


def _compiled(folder: Path, counts: tuple[int, ...], schedule: str) -> None:
    path = folder.parent / f"model_{folder.name}.py"
    path.write_text(MODEL.read_text())
    task = load_task(path)
    assert task.metrics is not None
    assert task.eval_data is not None
    torch.manual_seed(0)
    fxp.compile(
        task.model(),
        task.loss,
        task.example(),
        workers=len(counts),
        replicas=counts,
        schedule=schedule,
        policy="stash" if schedule == "async" else None,
        cost="analytic",
        forward_at=["b", "norm"] if len(counts) == 3 else ["norm"],
        evaluation=(task.metrics, task.eval_data()),
    ).save(folder, model_file=path)


def _launched(options: RunOptions) -> dict[str, Any]:
    plan = fxp.load(options.build).plan
    return json.loads(json.dumps(launch(options, plan.processes, plan.mesh)))
