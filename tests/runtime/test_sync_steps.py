"""`sync_steps`: the first steps of an asynchronous run are those of 1f1b, to the bit; nothing in them is late."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import QUICK, fxpipe
from covering import covering
from evaluated import build_of, write_evaluated
from model_files import write_model
from pipelines import pipeline_of
from several_runs import one_after_the_other
from strict_wires import run_in_threads
from torch import Tensor

from fxpipe.errors import ScheduleError
from fxpipe.runtime.options import PipelineOptions, RunOptions
from fxpipe.runtime.process.local import LocalPipeline
from fxpipe.runtime.process.local_run import run_local
from fxpipe.runtime.worker.weights import WeightStore
from fxpipe.schedule.action import Action

LINE = {"forward": (0, 1, 2, 3), "backward": (0, 1, 2, 3), "dropout": True}
MIXED = {"forward": (0, 0, 1, 2, 2), "backward": (0, 1, 1, 1, 2), "tied": True, "dropout": True}
TEXTS = (
    "latest", "latest+ef", "stash", "stash+sc", "vertical", "spectrain", "spectrain+ef", "spectrain+decay", "pipeoptim",
    "pipeoptim+keep+ef", "xpipe", "xpipe+sc", "lwp", "lwp+ef",
)  # fmt: skip


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9, weight_decay=0.01)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)


def bits(pipeline: LocalPipeline) -> dict[str, Tensor]:
    """Everything that training has changed, optimizers' states and clipping norms included."""
    found = pipeline.state_dict()
    for executor in pipeline.executors:
        updater = executor.store.updater
        for name, parameter in executor.store.trained.items():
            if updater.optimizer is not None and updater.optimizer.state[parameter]:
                found[f"momentum of {name}"] = updater.optimizer.state[parameter]["momentum_buffer"].clone()
        found[f"norm on {executor.worker}"] = torch.tensor(updater.norm or 0.0)
    return found


@pytest.mark.parametrize(
    ("text", "setting"),
    covering(
        TEXTS,
        [(LINE, 1, 1, None), (MIXED, 1, 5, 0.05), (LINE, 2, 4, 0.05), (MIXED, 4, 2, None), (LINE, 4, 3, 0.05)],
        strength=1,
    ),
)
def test_the_first_steps_are_those_of_1f1b_to_the_bit(
    toy: Any, batches: Any, tmp_path: Path, text: str, setting: Any
) -> None:
    cuts, microbatches, sync_steps, limit = setting
    folder = toy(**cuts, microbatches=microbatches).save(tmp_path / "build")
    flushed = pipeline_of(folder, sgd, halving, schedule="1f1b", clip_norm=limit)
    begun = pipeline_of(folder, sgd, halving, policy=text, clip_norm=limit, sync_steps=sync_steps)
    flowing = pipeline_of(folder, sgd, halving, policy=text, clip_norm=limit)
    data = (batches * 2)[:12]
    for batch in data[:sync_steps]:
        assert torch.equal(flushed.step(batch), begun.step(batch))
        a, b = bits(flushed), bits(begun)
        assert all(torch.equal(a[name], b[name]) for name in a)
    losses = begun.run(data[sync_steps:])
    assert not begun._mailboxes[0].letters
    assert not any(executor.store._copies for executor in begun.executors)
    assert losses != flushed.run(data[sync_steps:])
    assert losses != flowing.run(data)[sync_steps:]


@pytest.mark.parametrize("text", ["spectrain+ef", "stash", "vertical", "pipeoptim+keep"])
def test_in_the_synchronous_steps_nothing_is_late_or_predicted(
    toy: Any, batches: Any, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[int, int, int]] = []
    key = WeightStore._key

    def reading(self: WeightStore, reads: Any, action: Action) -> Any:
        found = key(self, reads, action)
        read.append((action.minibatch, found[1], found[2]))
        return found

    monkeypatch.setattr(WeightStore, "_key", reading)
    pipeline_of(toy(**MIXED).save(tmp_path / "build"), sgd, policy=text, sync_steps=3).run(batches)
    first = [found for found in read if found[0] < 3]
    assert {minibatch for minibatch, _, _ in first} == {0, 1, 2}
    assert all(version == minibatch and not ahead for minibatch, version, ahead in first)
    assert all(version >= 3 for minibatch, version, _ in read if minibatch >= 3)
    assert any(version < minibatch for minibatch, version, _ in read)


def test_flushes_and_evaluations_by_the_caller_change_nothing_before_the_pipeline_fills(
    toy: Any, batches: Any, tmp_path: Path
) -> None:
    folder = toy(**MIXED).save(tmp_path / "build")
    plain, flushed = (pipeline_of(folder, sgd, policy="spectrain+ef", sync_steps=3, clip_norm=0.05) for _ in range(2))
    losses = [float(plain.step(batch)) for batch in batches]
    found = []
    for number, batch in enumerate(batches):
        found.append(float(flushed.step(batch)))
        if number < 3:
            flushed.flush()
            flushed.state_dict()
    assert found == losses


def test_a_run_of_synchronous_steps_only(toy: Any, batches: Any, tmp_path: Path) -> None:
    folder = toy(**MIXED).save(tmp_path / "build")
    flushed, begun = pipeline_of(folder, sgd, schedule="1f1b"), pipeline_of(folder, sgd, policy="stash", sync_steps=99)
    assert flushed.run(batches) == begun.run(batches)
    assert all(torch.equal(value, begun.state_dict()[name]) for name, value in flushed.state_dict().items())


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize(
    ("toy_options", "options"),
    [
        ({**MIXED, "policy": "spectrain"}, {"sync_steps": 3, "clip_norm": 0.05}),
        ({**MIXED, "policy": "spectrain+ef"}, {"sync_steps": 2, "rate_discount": 5}),
        ({**MIXED, "microbatches": 2, "policy": "pipeoptim"}, {"policy": "stash+sc", "sync_steps": 1}),
        ({**LINE, "microbatches": 4}, {"policy": "2bw+predict+ef", "sync_steps": 4, "clip_norm": 0.05}),
        ({**LINE}, {"policy": "vertical", "sync_steps": 20}),
    ],
)
def test_over_the_strictest_wires_it_is_the_local_run(
    toy: Any, batches: Any, tmp_path: Path, toy_options: Any, options: Any, by_channel: bool
) -> None:
    still = {**toy_options, "dropout": False}  # threads of one process share their random numbers
    folder = toy(**still).save(tmp_path / "build")
    local = pipeline_of(folder, sgd, **options)
    losses = local.run(batches)
    threaded = run_in_threads(folder, batches, sgd, by_channel, options=PipelineOptions(**options))
    threaded.check(losses, local.state_dict())


def test_the_log_says_that_nothing_was_late(toy: Any, batches: Any, tmp_path: Path) -> None:
    folder = toy(**LINE).save(tmp_path / "build")
    options = RunOptions(
        str(folder),
        policy="spectrain",
        sync_steps=4,
        steps=12,
        log_staleness=True,
        out=str(tmp_path / "out"),
        threads=1,
    )
    summary = run_local(options)
    assert summary["sync_steps"] == json.loads((tmp_path / "out" / "run.json").read_text())["sync_steps"] == 4
    for worker in range(4):
        rows = [json.loads(line) for line in (tmp_path / "out" / f"staleness_{worker}.jsonl").open()]
        first = [row for row in rows if row["step"] <= 4]
        assert [row["step"] for row in first] == [1, 2, 3, 4]
        assert all(row["stale"] == row["ahead"] == row["rmse"] == 0 for row in first)
        late = [row["stale"] for row in rows if row["step"] > 4]
        assert late == [3 - worker] * len(late) != []


def test_with_a_flush_it_is_refused(toy: Any, tmp_path: Path) -> None:
    folder = toy(schedule="1f1b").save(tmp_path / "build")
    with pytest.raises(ScheduleError, match="all steps are synchronous with schedule '1f1b'") as caught:
        pipeline_of(folder, sgd, sync_steps=2)
    assert "async" in str(caught.value.hint)
    pipeline_of(folder, sgd, sync_steps=0)
    with pytest.raises(ScheduleError, match="cannot begin with -1"):
        pipeline_of(folder, sgd, schedule="async", sync_steps=-1)


# ── In processes, and on the command line ───────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.multiproc
def test_processes_train_as_one_process_does(tmp_path: Path) -> None:
    """With evaluations, averages, the staleness log, clipping, a scheduler; and without evaluations as well."""
    path = write_evaluated(tmp_path)
    build_of(path, microbatches=2)[1].save(tmp_path / "build", model_file=path)
    common: dict[str, Any] = {"steps": 9, "threads": 1, "clip_norm": 1.0, "ema": 0.9, "log_staleness": True}
    wanted = [
        {"schedule": "async", "policy": "spectrain", "sync_steps": 4, "eval_every": 2},
        {"schedule": "async", "policy": "latest", "sync_steps": 3, "eval_every": 1, "rate_discount": 8},
        {"schedule": "async", "policy": "spectrain", "sync_steps": 4},
        {"schedule": "1f1b"},
    ]
    runs = [
        RunOptions(str(tmp_path / "build"), out=str(tmp_path / f"{n}"), **common, **w) for n, w in enumerate(wanted)
    ]
    real = one_after_the_other(runs, 3, tmp_path)
    for number, (options, found) in enumerate(zip(runs, real, strict=True)):
        out = tmp_path / f"local_{number}"
        local = run_local(dataclasses.replace(options, out=str(out)))
        assert found["losses"] == local["losses"]
        assert found["evaluations"] == local["evaluations"]
        for name in ("model.safetensors", "ema.safetensors", *(f"staleness_{k}.jsonl" for k in range(3))):
            assert (tmp_path / str(number) / name).read_bytes() == (out / name).read_bytes(), name
    assert real[0]["losses"][:4] == real[3]["losses"][:4]
    assert real[0]["losses"] == real[2]["losses"]  # evaluations change nothing
    norms = [[json.loads(s).get("grad_norm") for s in (tmp_path / d / "metrics.jsonl").open()] for d in ("2", "3")]
    assert norms[0][:4] == norms[1][:4]


@pytest.mark.slow
def test_on_the_command_line(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    fxpipe("compile", str(path), "-n", "2", *QUICK, "--schedule", "async", "-o", str(tmp_path / "build"))
    run = ("run", str(tmp_path / "build"), "--local", "--steps", "6", "--out", str(tmp_path / "out"))
    found = fxpipe(*run, "--sync-steps", "3", "--json")
    assert found.json["sync_steps"] == 3
    refused = fxpipe(*run, "--sync-steps", "3", "--schedule", "1f1b")
    assert refused.code
    assert "all steps are synchronous" in refused.err
