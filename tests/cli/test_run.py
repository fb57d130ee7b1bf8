"""What `fxpipe run` prints and leaves, in processes and in one process: the same."""

from __future__ import annotations

import json
import math
import re
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import QUICK, Result, finish, free_port, fxpipe, fxpipe_process, start_module
from model_files import PARAMETERS, STEPS, write_model
from safetensors.torch import load_file

from fxpipe.plan.build_folder import read_plan

BUFFERS = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
TRAINED = 7  # steps: more than one epoch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model.py and its build for two workers."""
    made = tmp_path_factory.mktemp("run")
    result = fxpipe("compile", write_model(made), "-o", made / "build", "--fp-cut", "blocks.2", *QUICK)
    assert result.code == 0, result.err
    return made


@pytest.fixture(scope="module")
def real(folder: Path) -> Result:
    """A run in two processes."""
    arguments = ("--steps", TRAINED, "--seed", 3, "--threads", 1)
    return fxpipe_process("run", folder / "build", *arguments, "--out", folder / "real", "--json")


@pytest.fixture(scope="module")
def local(folder: Path) -> Result:
    """The same run in this process."""
    arguments = ("--steps", TRAINED, "--seed", 3, "--threads", 1)
    return fxpipe("run", folder / "build", *arguments, "--out", folder / "local", "--json", "--local")


@pytest.mark.multiproc
def test_json(real: Result, folder: Path) -> None:
    assert real.err == ""
    said = real.json
    assert json.loads((folder / "real" / "run.json").read_text()) == {k: v for k, v in said.items() if k != "losses"}
    assert said["build"] == {"folder": str(folder / "build"), "digest": read_plan(folder / "build").digest}
    assert (said["schedule"], said["policy"], said["seed"]) == ("async", "spectrain+ef", 3)
    assert said["transport"] == "shared memory"
    assert said["steps"] == len(said["losses"]) == TRAINED
    assert all(math.isfinite(loss) for loss in said["losses"])
    assert said["samples_per_second"] == pytest.approx(TRAINED * 4 / said["seconds"])
    for row in said["workers"]:
        assert sum(row["spent"].values()) == pytest.approx(row["seconds"])
        assert sum(wait["seconds"] for wait in row["waits"]) == pytest.approx(row["spent"]["wait"])
        assert 0 <= row["fill"] <= row["spent"]["wait"]
    assert said["bubble"] == pytest.approx(1 - sum(w["busy"] for w in said["workers"]) / 2)
    assert said["forecast"]["samples_per_second"] > 0
    assert len(said["forecast"]["workers"]) == 2
    assert said["efficiency"] is None, "too few steps lie between filling and emptying"
    assert len(said["time_losses"]) <= 3
    assert [w["rank"] for w in said["workers"]] == [0, 1]
    assert all(0 < w["busy"] <= 1 and w["forward_ms"] > 0 and w["backward_ms"] > 0 for w in said["workers"])
    assert said["out"] == str(folder / "real")


@pytest.mark.slow
@pytest.mark.multiproc
def test_each_machine_says_that_it_works(local: Result, folder: Path, tmp_path: Path) -> None:
    meeting = ("--nnodes", 2, "--nproc-per-node", 1, "--master-addr", "127.0.0.1", "--master-port")
    meeting = (*meeting, free_port(), "--no-python", sys.executable, "-m", "fxpipe")
    run = (
        "run",
        folder / "build",
        "--steps",
        TRAINED,
        "--seed",
        3,
        "--threads",
        1,
        "--out",
        tmp_path / "out",
        "--json",
    )
    nodes = [start_module("torch.distributed.run", "--node-rank", node, *meeting, *run) for node in range(2)]
    first, other = (finish(node, 120) for node in nodes)
    assert first.json["losses"] == local.json["losses"]
    assert "is running here" not in first.err
    assert other.out == ""
    said = [line for line in other.err.splitlines() if line.startswith("worker 1 is ")]
    assert said == [
        "worker 1 is running here; the node of worker 0 shows progress and results",
        "worker 1 is done: training has ended",
    ]


def test_metrics(local: Result, folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "local" / "metrics.jsonl").open()]
    assert [list(line) for line in lines] == [
        ["step", "loss", "lr", "seconds", "samples_per_second", "tflops_per_device"]
    ] * TRAINED
    assert [line["step"] for line in lines] == list(range(1, TRAINED + 1))
    assert [line["loss"] for line in lines] == local.json["losses"]
    assert {line["lr"] for line in lines} == {0.05}
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)
    assert {p.name for p in (folder / "local").iterdir()} == {"metrics.jsonl", "model.safetensors", "run.json"}


def test_the_model_takes_the_weights(local: Result, folder: Path) -> None:
    assert local.code == 0
    weights = load_file(folder / "local" / "model.safetensors")
    assert set(weights) == PARAMETERS | BUFFERS
    model = runpy.run_path(str(folder / "model.py"))["model"]()
    model.load_state_dict(weights, strict=True)
    assert int(model.norm.num_batches_tracked) == TRAINED
    before = load_file(folder / "build" / "weights.safetensors")
    assert [n for n in PARAMETERS if torch.equal(weights[n], before[n])] == []


def test_the_summary_for_people(folder: Path, tmp_path: Path) -> None:
    result = fxpipe("run", folder / "build", "--local", "--out", tmp_path / "out")
    assert result.code == 0
    lines = [line.strip() for line in result.out.splitlines() if line.strip()]
    assert lines[0].startswith(f"{STEPS} steps in "), "one epoch, unless something else is asked for"
    assert re.search(r" samples/s · [^ ]+ TFLOP/s/device · loss ", lines[0])
    assert lines[1].split()[::2] == ["worker", "F", "B", "wait"]
    assert [line.split()[0] for line in lines[3:5]] == ["0", "1"]
    assert lines[5] == f"metrics  {tmp_path / 'out' / 'metrics.jsonl'}"
    assert lines[6] == f"weights  {tmp_path / 'out' / 'model.safetensors'}"
    assert f"step {STEPS}/{STEPS}" in result.err
    assert "step" not in result.out.replace("steps", "")


def test_its_loss_is_the_one_that_comparisons_show(folder: Path, tmp_path: Path) -> None:
    shown = {}
    for steps in (6, 22):
        out = tmp_path / str(steps)
        text = fxpipe("run", folder / "build", "--local", "--out", out, "--steps", steps).out
        ((loss, count),) = re.findall(r"loss \S+ → (\S+) \(mean of the last (\d+)\)", text)
        shown[steps] = float(loss)
        assert int(count) == min(steps, 20)
    compared = fxpipe("compare", tmp_path / "6", tmp_path / "22", "--json").json["loss"]["smoothed"]
    assert [*shown.values()] == pytest.approx(compared, abs=1e-4)


def test_how_long_to_train(folder: Path, tmp_path: Path) -> None:
    def steps(*arguments: object) -> int:
        said = fxpipe("run", folder / "build", "--local", "--json", "--out", tmp_path, *arguments).json
        return int(said["steps"])

    assert steps() == STEPS
    assert steps("--epochs", 2) == 2 * STEPS
    assert steps("--steps", 3) == 3


def test_seed_schedule_and_policy(folder: Path, tmp_path: Path) -> None:
    def losses(*arguments: object) -> Any:
        return fxpipe("run", folder / "build", "--local", "--json", "--out", tmp_path, *arguments).json["losses"]

    default = losses("--epochs", 2)
    assert losses("--epochs", 2) == default
    assert losses("--epochs", 2, "--seed", 1) != default
    assert losses("--epochs", 2, "--policy", "stash") != default
    assert losses("--epochs", 2, "--schedule", "gpipe") != default


def test_another_schedule_than_the_builds(folder: Path, tmp_path: Path) -> None:
    result = fxpipe("run", folder / "build", "--local", "--schedule", "1f1b", "--json", "--out", tmp_path)
    assert result.json["steps"] == STEPS
    assert result.err.startswith("warning: the build has one microbatch, so 1f1b runs its workers one after the other")
    assert "compile with --schedule 1f1b --microbatches 4" in result.err
    late = fxpipe("run", folder / "build", "--local", "--schedule", "async-late", "--json", "--out", tmp_path)
    assert "one microbatch" not in late.err, "it has no flush, so workers overlap"
    own = fxpipe("run", folder / "build", "--local", "--schedule", "lazy", "--out", tmp_path)
    assert "one that the model file registers: a run knows only fxpipe's and its build's" in " ".join(own.err.split())


def test_the_display_ends_before_an_error(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before training begins: a bar would be drawn over the error."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    with (tmp_path / "model.py").open("a") as file:
        file.write("\n\ndef optimizer(named_parameters):\n    raise ValueError('no')\n")
    shown = []
    progress = SimpleNamespace(starting=lambda text: shown.append("starting"), close=lambda: shown.append("closed"))
    monkeypatch.setattr("fxpipe.runtime.process.start.default_progress", lambda: progress)
    result = fxpipe("run", tmp_path / "build", "--local", "--out", tmp_path / "out")
    assert "optimizer() raised ValueError: no" in result.err
    assert shown == ["starting", "closed"]


@pytest.fixture
def stage(folder: Path, tmp_path: Path) -> Path:
    """The last stage of a build of one's own, to be edited."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return tmp_path / "build" / "stage_1.py"


@pytest.mark.parametrize("factor", [1, 2])
def test_an_edited_stage_runs_with_a_warning(stage: Path, tmp_path: Path, local: Result, factor: int) -> None:
    text, edits = re.subn(r"^    return (\w+), ", rf"    return {factor} * \1, ", stage.read_text(), flags=re.M)
    assert edits == 1
    stage.write_text(text)
    arguments = ("--steps", TRAINED, "--seed", 3, "--threads", 1, "--local", "--json")
    result = fxpipe("run", tmp_path / "build", *arguments, "--out", tmp_path / "out")
    assert result.err == f"warning: {stage} was edited since it was compiled; running it as it is\n"
    assert result.json["losses"] == [factor * loss for loss in local.json["losses"]]


def test_an_edited_stage_that_no_longer_fits_is_refused(stage: Path, tmp_path: Path) -> None:
    text = stage.read_text()
    assert text.count('comm.recv("batch_y")') == 1
    stage.write_text(text.replace('comm.recv("batch_y")', "None"))
    result = fxpipe("run", tmp_path / "build", "--local", "--out", tmp_path / "out")
    assert result.code == 1
    assert "stage_1.py does not match its plan: forward no longer receives batch_y" in result.err
    assert "hint: undo the edit" in result.err
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_model_file_is_no_build(tmp_path: Path) -> None:
    refused = fxpipe("run", write_model(tmp_path))
    assert refused.code == 1
    assert "model.py is not an fxpipe build" in refused.err
    assert "hint: make the build: fxpipe compile " in refused.err


HOOKS = """

def eval_data():
    return train_data()[:2]

def metrics(model, batch):
    return {"loss": loss(model, batch), "doubled": 2 * loss(model, batch)ITEM}
"""


def with_hooks(folder: Path, item: str) -> Path:
    """A build of the model with validation hooks; the model file stands beside it."""
    path = write_model(folder)
    path.write_text(path.read_text() + HOOKS.replace("ITEM", item))
    result = fxpipe("compile", path, "-o", folder / "build", *QUICK)
    assert result.code == 0, result.err
    return folder / "build"


def test_evaluation(tmp_path: Path) -> None:
    build = with_hooks(tmp_path, "")
    arguments = ("run", build, "--local", "--steps", TRAINED, "--eval-every", 3, "--out", tmp_path / "out")
    result = fxpipe(*arguments)
    assert result.code == 0, result.err
    shown = re.findall(r"^step (\d+)  held out loss (\S+), doubled (\S+)$", result.err, re.M)
    assert [int(step) for step, *_ in shown] == [3, 6, 7]
    assert f"held out loss {shown[-1][1]}, doubled {shown[-1][2]}\n" in result.out
    said = fxpipe(*arguments, "--json").json
    assert [evaluation["step"] for evaluation in said["evaluations"]] == [3, 6, 7]
    for (_, loss, _), evaluation in zip(shown, said["evaluations"], strict=True):
        assert f"{evaluation['metrics']['loss']:.4f}" == loss
        assert evaluation["metrics"]["doubled"] == pytest.approx(2 * evaluation["metrics"]["loss"])
    assert said["evaluation"] == said["evaluations"][-1]["metrics"]
    assert json.loads((tmp_path / "out" / "run.json").read_text())["evaluations"] == said["evaluations"]


def test_metrics_that_cannot_be_captured_are_evaluated_in_the_end(tmp_path: Path) -> None:
    build = with_hooks(tmp_path, ".item()")
    result = fxpipe("run", build, "--local", "--eval-every", 3, "--out", tmp_path / "out")
    assert result.code == 1
    assert "--eval-every needs a build with evaluation, and this one has none: " in result.err
    assert "return tensors from metrics()" in result.err
    assert not (tmp_path / "out").exists()
    said = fxpipe("run", build, "--local", "--steps", 3, "--out", tmp_path / "out", "--json").json
    assert said["evaluations"] == [{"step": 3, "metrics": said["evaluation"]}]
    assert set(said["evaluation"]) == {"loss", "doubled"}


def test_a_build_without_validation_hooks_cannot_be_evaluated(folder: Path, tmp_path: Path) -> None:
    result = fxpipe("run", folder / "build", "--local", "--eval-every", 3, "--out", tmp_path / "out")
    assert result.code == 1
    assert "--eval-every needs a build with evaluation, and this one has none" in result.err
    assert "define eval_data() and metrics(model, batch)" in result.err
