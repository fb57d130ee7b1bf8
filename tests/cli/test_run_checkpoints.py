"""`fxpipe run --checkpoint-every`, `--resume`, signals and restarts, as a user gives them."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import QUICK, finish, fxpipe, start_module
from model_files import write_model

from fxpipe.observe.rates import RATES

HOOKS = """

def train_data():
    for number in range(24):
        if os.environ.get("SLOW"):
            time.sleep(float(os.environ["SLOW"]))
        yield {"x": torch.randn(4, 6), "y": torch.randint(0, 3, (4,))}


def optimizer(named_parameters):
    return torch.optim.AdamW([p for _, p in named_parameters], lr=0.01)


def lr_scheduler(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)


def eval_data():
    return [{"x": torch.ones(4, 6), "y": torch.zeros(4, dtype=torch.int64)}]


def metrics(model, batch):
    return {"loss": loss(model, batch)}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build, and the output of a run that nobody interrupted."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model = write_model(folder, ("import torch\n", "import os\nimport time\nimport torch\n"))
    model.write_text(model.read_text() + HOOKS)
    for arguments in (("compile", model, "-o", folder / "build", *QUICK), run(folder, folder / "whole", "--local")):
        result = fxpipe(*arguments)
        assert result.code == 0, result.err
    return folder


def run(folder: Path, out: Path, *more: Any) -> tuple[Any, ...]:
    return ("run", folder / "build", "--steps", 24, "--eval-every", 8, "--out", out, *more)


def logged(out: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in ("seconds", *RATES)} for row in rows]


def same(folder: Path, out: Path) -> bool:
    files = [(place / "model.safetensors").read_bytes() for place in (folder / "whole", out)]
    return files[0] == files[1] and logged(folder / "whole") == logged(out)


def wait_for(found: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not found():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("local", [("--local",), ()])
def test_goes_on_from_the_newest(folder: Path, tmp_path: Path, local: tuple[str, ...]) -> None:
    out = tmp_path / "out"
    result = fxpipe(*run(folder, out, "--checkpoint-every", 5, *local))
    assert result.code == 0, result.err
    assert same(folder, out)
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-10", "step-15", "step-20"]
    (out / "model.safetensors").unlink()
    (out / "checkpoints" / "step-20" / "checkpoint.json").unlink()
    result = fxpipe(*run(folder, out, "--checkpoint-every", 5, "--resume", *local))
    assert result.code == 0, result.err
    assert "going on after step 15" in result.err or not local  # else it is a worker that says so
    assert result.out.startswith("steps 16 to 24 in ")
    assert same(folder, out)


def test_a_finished_run_has_no_step_left(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert fxpipe(*run(folder, out, "--checkpoint-every", 8, "--local")).code == 0
    again = fxpipe(*run(folder, out, "--checkpoint-every", 8, "--local", "--resume"))
    assert "no step was left to do: the checkpoint is of step 24, the last one\nheld out" in again.out
    assert same(folder, out)


def test_goes_on_in_another_folder_as_if_it_were_the_same(folder: Path, tmp_path: Path) -> None:
    """Metrics and the summary have the steps before, too, and the first folder stays as it is."""
    first, other = tmp_path / "first", tmp_path / "other"
    logged_too = ("--log-staleness", "--json")
    whole = fxpipe(*run(folder, tmp_path / "whole", *logged_too, "--local"))
    assert fxpipe("run", folder / "build", "--steps", 16, "--eval-every", 8, "--checkpoint-every", 16, "--out", first,
                  *logged_too).code == 0  # fmt: skip
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    result = fxpipe(*run(folder, other, "--resume", first / "checkpoints" / "step-16", *logged_too, "--local"))
    assert result.code == 0, result.err
    assert "no lines" not in result.err
    assert same(folder, other)
    found, wanted = result.json, whole.json
    for name in ("steps", "losses", "evaluations"):
        assert found[name] == wanted[name], name
    for row, all_of_it in zip(found["workers"], wanted["workers"], strict=True):
        (since,), (means,) = row["staleness"], all_of_it["staleness"]
        assert 0 < since["samples"] < means["samples"]
    assert {path: path.read_bytes() for path in before} == before


def test_a_damaged_one_is_said_and_the_one_before_taken(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert fxpipe(*run(folder, out, "--checkpoint-every", 5, "--local")).code == 0
    file = out / "checkpoints" / "step-20" / "optimizer-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    result = fxpipe(*run(folder, out, "--resume", "--local"))
    assert result.code == 0, result.err
    assert "optimizer-00002-of-00002.safetensors was changed" in result.err
    assert "going on from step-15 instead" in result.err
    assert same(folder, out)
    given = out / "checkpoints" / "step-20"
    result = fxpipe(*run(folder, tmp_path / "other", "--resume", given, "--local"))
    assert result.code == 1
    assert "the checkpoint is damaged" in result.err


@pytest.mark.slow
@pytest.mark.multiproc
def test_under_torchrun_all_go_on_from_the_newest_that_all_find_whole(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert fxpipe(*run(folder, out, "--checkpoint-every", 5, "--local")).code == 0
    file = out / "checkpoints" / "step-20" / "optimizer-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--no-python", sys.executable)
    result = finish(start_module(*torchrun, "-m", "fxpipe", *run(folder, out, "--resume")), 120)
    assert result.code == 0, result.err
    assert f"step-20: worker 1: the checkpoint is damaged: {file.name} was changed" in result.err
    assert "going on after step 15" in result.err
    assert same(folder, out)


def test_runs_are_not_mixed(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert fxpipe(*run(folder, out, "--checkpoint-every", 5, "--local")).code == 0
    for more, what in (
        ((), "has the checkpoints of an earlier run"),
        (("--resume", out / "checkpoints" / "step-10"), "has checkpoints of later steps than 10: step-15, step-20"),
        (("--resume", "--weights", folder / "whole" / "model.safetensors"), "leave out --weights"),
        (("--resume", tmp_path), "is not a whole checkpoint"),
    ):
        result = fxpipe(*run(folder, out, "--local", *more))
        assert result.code == 1
        assert what in result.err
    result = fxpipe("run", folder / "build", "--steps", 12, "--out", out, "--resume", "--local")
    assert result.code == 1
    assert "the checkpoint is of step 20, but the run should have 12 steps in all" in result.err
    result = fxpipe(*run(folder, tmp_path / "none", "--resume", "--local"))
    assert result.code == 1
    assert "there is no checkpoint in" in result.err


def test_another_policy_begins_with_an_empty_pipeline(folder: Path, tmp_path: Path) -> None:
    assert fxpipe(*run(folder, tmp_path / "first", "--checkpoint-every", 10, "--local")).code == 0
    path = tmp_path / "first" / "checkpoints" / "step-10"
    result = fxpipe(*run(folder, tmp_path / "second", "--resume", path, "--policy", "stash", "--local"))
    assert result.code == 0, result.err
    assert "so the pipeline begins empty" in result.err


@pytest.mark.parametrize("text", ["0", "soon", "5 weeks"])
def test_an_interval_that_is_none(folder: Path, tmp_path: Path, text: str) -> None:
    result = fxpipe(*run(folder, tmp_path / "out", "--checkpoint-every", text))
    assert result.code == 1
    assert "is not an interval" in result.err


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code", "local"), [(signal.SIGTERM, 143, ()), (signal.SIGINT, 130, ("--local",))])
def test_a_signal_saves_first(
    folder: Path, tmp_path: Path, local: tuple[str, ...], number: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setenv("SLOW", "0.2")
    process = start_module("fxpipe", *run(folder, out, "--checkpoint-every", "1h", *local))
    wait_for(lambda: (out / "metrics.jsonl").is_file() and len((out / "metrics.jsonl").read_text().splitlines()) > 3)
    process.send_signal(number)
    result = finish(process, 120)
    assert result.code == code, result.err
    assert "go on with --resume" in result.err
    assert not (out / "model.safetensors").exists()
    monkeypatch.delenv("SLOW")
    result = fxpipe(*run(folder, out, "--checkpoint-every", "1h", "--resume", *local))
    assert result.code == 0, result.err
    assert same(folder, out)
