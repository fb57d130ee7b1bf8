"""`--log-staleness` says what the forwards' weights and the updates' weights themselves say, and changes nothing."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from cached import captured, cuts, lowered
from commands import QUICK, fxpipe
from covering import covering
from model_files import write_model
from pipelines import pipeline_of, sgd
from torch import Tensor

from fxpipe.policy import make
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.process.pipeline import Pipeline
from fxpipe.runtime.process.start import open_local
from fxpipe.runtime.worker.staleness import StalenessLog
from fxpipe.runtime.worker.versions import ReadVersions
from fxpipe.runtime.worker.weights import WeightStore
from fxpipe.schedule.action import Action
from fxpipe.task.hooks import Hooks
from fxpipe.task.model_file import Task

LINE = {"forward": (0, 1, 2), "backward": (0, 1, 2)}
MIXED = {"forward": (0, 0, 1, 2, 2), "backward": (0, 1, 1, 1, 2), "tied": True}
STEPS = 12
POLICIES = ["latest", "stash", "vertical", "spectrain", "pipeoptim", "pipeoptim+keep", "lwp"]
Row = dict[str, Any]


def plain(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.01)


@dataclass
class Recorded:
    """The weights of a run.

    Attributes:
        read: what the forward of a minibatch's first microbatch read, by reader, minibatch and parameter.
        met: what an update found, by minibatch and parameter.
    """

    read: dict[tuple[int, int, str], Tensor] = field(default_factory=dict)
    met: dict[tuple[int, str], Tensor] = field(default_factory=dict)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    found = Recorded()
    read, settle = ReadVersions.read, WeightStore.settle

    def reading(self: ReadVersions, action: Action) -> Any:
        weights = read(self, action)
        if action.phase == "F" and action.microbatch == 0:
            for r in self.demand.readings(self.worker, "F"):
                for name, position in zip(r.names, r.positions, strict=True):
                    found.read[self.worker, action.minibatch, name] = weights[position].detach().clone()
        return weights

    def settling(self: WeightStore) -> int:
        found.met |= {(self.version, name): p.detach().clone() for name, p in self.trained.items()}
        return settle(self)

    monkeypatch.setattr(ReadVersions, "read", reading)
    monkeypatch.setattr(WeightStore, "settle", settling)
    return found


def logged(folder: Path, optimizer: Any = sgd) -> Pipeline:
    return open_local(folder, Task(Hooks(optimizer=optimizer)), PipelineOptions(log_staleness=True))


def reader_of(built: Any, name: str) -> int:
    """Whose forward counts: the owner's own if it reads the parameter, else the first."""
    readers = [built.forward[k] for k in range(built.layers) if built.weight(k) == name]
    owner = built.owner(name)
    return owner if owner in readers else min(readers)


def lag_of(built: Any, policy: str, name: str) -> int:
    """How many updates its forward of a first microbatch is behind in steady state."""
    n, count = built.workers, built.microbatches
    first = min(reader_of(built, name), built.owner(name))
    late = n - 1 if policy == "vertical" else n - 1 - first
    return -(-late // count)


def expected_rows(built: Any, recorded: Recorded, policy: str, worker: int, starts: list[int]) -> list[Row]:
    """Straight from the recorded weights: one group, a sample at a time, begun when the last one ended."""
    names = [name for name in built.initial() if built.owner(name) == worker]
    if not names:
        return []
    chosen = make(policy)
    lags = {name: lag_of(built, policy, name) for name in names}
    reach = max(lags.values())
    found: list[Row] = []
    for start, stop in zip(starts, [*starts[1:], STEPS], strict=True):
        for m in range(start + reach, stop, reach + 1):
            parts: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for name in names:
                version = max(start, m - lags[name])
                target = m + (worker // 2) // built.microbatches if policy == "spectrain" else m
                ahead = target - version if chosen.predicts else 0
                pair = recorded.read[reader_of(built, name), m, name], recorded.met[m, name]
                parts[m - version, ahead].append(pair)
            for (stale, ahead), pairs in sorted(parts.items()):
                used, met = (torch.cat([pair[i].flatten() for pair in pairs]) for i in range(2))
                rmse = float(((used - met) ** 2).mean().sqrt())
                rms = float((met**2).mean().sqrt())
                found.append({"worker": worker, "stale": stale, "ahead": ahead, "rmse": rmse, "rms": rms})
    return found


@pytest.mark.parametrize(
    ("shape", "policy", "microbatches", "flush_at"), covering([LINE, MIXED], POLICIES, [1, 2], [None, 5])
)
def test_rows_are_what_the_weights_say(
    toy: Any,
    batches: Any,
    tmp_path: Path,
    shape: dict[str, Any],
    policy: str,
    microbatches: int,
    flush_at: int | None,
    recorded: Recorded,
) -> None:
    built = toy(**shape, policy=policy, microbatches=microbatches)
    pipeline = logged(built.save(tmp_path / "build"))
    for m, batch in enumerate((batches * 2)[:STEPS]):
        if m == flush_at:
            pipeline.flush()
        pipeline.step(batch)
    pipeline.flush()
    means = defaultdict(list)
    for worker in range(built.workers):
        for row in expected_rows(built, recorded, policy, worker, [0, *([flush_at] if flush_at else [])]):
            means[row["worker"], row["stale"], row["ahead"]].append(row)
    found = pipeline.staleness()
    assert found == [
        {"worker": w, "group": 0, "stale": s, "ahead": a, "samples": len(rows)}
        | {
            key: pytest.approx(sum(row[key] for row in rows) / len(rows), rel=1e-9, abs=1e-15)
            for key in ("rmse", "rms")
        }
        for (w, s, a), rows in sorted(means.items())
    ]
    assert any(row["rmse"] > 0 for row in found) == any(row["stale"] or row["ahead"] for row in found)
    if shape is LINE and not flush_at and policy != "vertical":
        assert [row["stale"] for row in found] == [-(-(2 - worker) // microbatches) for worker in range(3)]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_with_a_flush_nothing_is_stale(toy: Any, batches: Any, tmp_path: Path, schedule: str) -> None:
    folder = toy(**MIXED, schedule=schedule, microbatches=2).save(tmp_path / "build")
    pipeline = logged(folder)
    pipeline.run(batches)
    names = ("worker", "samples", "stale", "ahead", "rmse")
    found = [tuple(row[name] for name in names) for row in pipeline.staleness()]
    assert found == [(worker, len(batches), 0, 0, 0.0) for worker in range(2)]  # worker 2 owns nothing


def test_groups_are_apart_and_frozen_parameters_are_not_there(tmp_path: Path, recorded: Recorded) -> None:
    """Case `dict`: a frozen parameter, and one without a gradient."""

    def grouped(named: Any) -> torch.optim.Optimizer:
        halves = [[p for _, p in named if p.dim() > 1], [p for _, p in named if p.dim() <= 1]]
        assert all(halves)
        return torch.optim.SGD(
            [{"params": halves[0], "lr": 0.1}, {"params": halves[1], "lr": 0.0}], lr=0.1, momentum=0.9
        )

    case, _, _ = captured("dict")
    build = lowered("dict", workers=3, schedule="async", policy="latest", **cuts(case, 3, 0))
    build.save(tmp_path / "build")
    pipeline = logged(tmp_path / "build", grouped)
    pipeline.run(case.batches(STEPS))
    for worker, executor in enumerate(pipeline.executors):
        found, stale = [row for row in pipeline.staleness() if row["worker"] == worker], 2 - worker
        sampled = range(stale, STEPS, stale + 1)
        assert [(row["group"], row["stale"], row["samples"]) for row in found] == [
            (group, stale, len(sampled)) for group in (0, 1)
        ]
        trained = executor.store.trained
        assert not {"scale", "unused"} & set(trained)
        for row in found:
            members = [name for name, p in trained.items() if (p.dim() > 1) == (row["group"] == 0)]
            rms = rmse = 0.0
            for m in sampled:
                met = torch.cat([recorded.met[m, name].double().flatten() for name in members])
                used = torch.cat([recorded.read[worker, m, name].double().flatten() for name in members])
                rms += float((met**2).mean().sqrt()) / len(sampled)
                rmse += float(((used - met) ** 2).mean().sqrt()) / len(sampled)
            assert row["rms"] == pytest.approx(rms, rel=1e-6)
            assert row["rmse"] == pytest.approx(rmse, rel=1e-4, abs=1e-12)
            assert (row["rmse"] == 0) == (stale == 0 or row["group"] == 1)


@pytest.mark.parametrize(
    ("policy", "microbatches", "optimizer"),
    [("stash", 1, sgd), ("spectrain", 2, plain), ("pipeoptim+keep", 2, adam), ("lwp", 1, adam)],
)
def test_it_changes_no_bit_of_the_training(
    toy: Any, batches: Any, tmp_path: Path, policy: str, microbatches: int, optimizer: Any
) -> None:
    folder = toy(**MIXED, policy=policy, microbatches=microbatches).save(tmp_path / "build")
    losses, states = [], []
    for log in (False, True):
        pipeline = pipeline_of(folder, optimizer, log_staleness=log)
        losses.append(pipeline.run(batches) + pipeline.run(batches))
        states.append(pipeline.state_dict())
    assert losses[0] == losses[1]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("policy", ["latest", "vertical", "spectrain", "pipeoptim+keep"])
def test_it_costs_one_copy_at_most(
    toy: Any, batches: Any, tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    most: dict[int, int] = defaultdict(int)

    def watch(name: str) -> None:
        inner = getattr(StalenessLog, name)

        def watching(self: StalenessLog, *arguments: Any) -> None:
            inner(self, *arguments)
            held = {} if self._sample is None else self._sample.used
            numbers = sum(used.untyped_storage().nbytes() // used.itemsize for used, _, _ in held.values())
            most[id(self)] = max(most[id(self)], numbers)

        monkeypatch.setattr(StalenessLog, name, watching)

    watch("reached")
    watch("gathered")
    pipeline = pipeline_of(toy(**MIXED, policy=policy).save(tmp_path / "build"), sgd, log_staleness=True)
    for batch in batches * 2:
        pipeline.step(batch)
        for executor in pipeline.executors[:2]:  # worker 2 owns nothing
            store = executor.store
            log = store.part(StalenessLog)
            assert log is not None
            sample = log._sample
            assert sample is not None
            assert set(sample.used) <= set(store.trained)
            assert all(version <= store.version for _, version, _ in sample.used.values())
    owned = [sum(p.numel() for p in executor.store.trained.values()) for executor in pipeline.executors]
    assert [most[id(executor.store.part(StalenessLog))] for executor in pipeline.executors] == [owned[0], owned[1], 0]
    assert owned[2] == 0


def test_the_command_says_the_means(tmp_path: Path) -> None:
    built = fxpipe("compile", write_model(tmp_path), "-o", tmp_path / "build", "--fp-cut", "blocks.2", *QUICK)
    assert built.code == 0, built.err
    arguments = ("run", tmp_path / "build", "--local", "--steps", 9, "--out", tmp_path / "out")
    said = fxpipe(*arguments, "--policy", "latest", "--log-staleness", "--json").json
    for row in said["workers"]:
        (means,) = row["staleness"]
        stale = 1 - row["rank"]
        assert (means["stale"], means["ahead"], means["samples"]) == (stale, 0, len(range(1 + stale, 10, 1 + stale)))
    text = fxpipe(*arguments, "--policy", "pipeoptim", "--log-staleness")
    assert text.code == 0, text.err
    assert "RMSE" in text.out
    said = fxpipe(*arguments, "--json").json
    assert not any("staleness" in row for row in said["workers"])
