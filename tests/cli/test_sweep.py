"""`fxpipe sweep`: runs with several values, each played once, and their table."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from commands import QUICK, fxpipe, start_module

MODEL = """
import torch
from torch import nn
import fxpipe


def model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def loss(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def train_data():
    x = torch.randn(10, 8, 8)
    return list(zip(x, (x.sum(-1) > 0).long()))


def optimizer(named_parameters):
    rate = fxpipe.setting("lr", 0.1)
    if rate > 5:
        raise ValueError("too fast")
    return torch.optim.SGD([p for _, p in named_parameters], lr=rate, momentum=0.9)
"""


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "model.py").write_text(MODEL)
    result = fxpipe("compile", folder / "model.py", *QUICK, "-o", folder / "build")
    assert result.code == 0, result.err
    return folder / "build"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["pytest"])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--stepz", 3), "No such option '--stepz'; arguments of the model file come after --"),
        (("--set", "rate=1,2"), "the model file reads no setting 'rate'"),
        (("--set", "lr=1,fast"), "--set lr=fast: this is not a number"),
        (("--policy", "stash+no"), "policy 'stash' has no option 'no'"),
        (("--schedule", "asink"), "there is no schedule 'asink', did you mean 'async'?"),
        (("--seed", 3), "leave out --seed"),
        (("--resume",), "leave out --resume"),
    ],
)
def test_nothing_begins_where_one_run_would_be_refused(given: tuple[object, ...], says: str, build: Path) -> None:
    refused = fxpipe("sweep", build, "--steps", 2, *given)
    assert refused.code in (1, 2)
    assert says in refused.err
    assert not Path("sweep").exists()


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_sweep(build: Path) -> None:
    arguments = ("sweep", build, "--steps", 4, "--policy", "latest,stash", "--seeds", 2, "--jobs", 2)
    found = fxpipe(*arguments, "--json").json
    assert found["settings"] == ["policy"]
    assert [(row["settings"]["policy"], row["seeds"]) for row in found["rows"]] == [
        ("latest", [0, 1]),
        ("stash", [0, 1]),
    ]
    alone = fxpipe("run", build, "--steps", 4, "--local", "--policy", "stash", "--seed", 1, "--out", "alone", "--json")
    lines = Path("sweep/stash,seed=1/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == alone.json["losses"]
    written = {path: path.stat().st_mtime_ns for path in Path("sweep").rglob("run.json")}
    assert len(written) == 4
    again = fxpipe(*arguments, "--set", "lr=0.1,9")  # other runs
    assert again.code == 1
    assert again.err.count("too fast") >= 4
    columns = again.out.splitlines()[0].split()
    assert columns[:2] == ["policy", "seeds"], "what all have is no column"
    assert "lr" not in columns
    assert fxpipe(*arguments).err == "4 of 4 runs have ended already\n"
    assert {path: path.stat().st_mtime_ns for path in written} == written


@pytest.mark.slow
@pytest.mark.multiproc
def test_an_interrupted_sweep_leaves_what_had_ended(build: Path) -> None:
    started = start_module("fxpipe", "sweep", build, "--epochs", 100000, "--policy", "latest,stash", "--jobs", 2)
    deadline = time.monotonic() + 120
    while len(list(Path("sweep").glob("*/*.jsonl*"))) + len(list(Path("sweep").glob("*/.*"))) < 2:
        assert time.monotonic() < deadline
        assert started.poll() is None, started.communicate()
        time.sleep(0.1)
    children = _children(started.pid)
    assert children
    os.kill(started.pid, signal.SIGINT)
    _, err = started.communicate(timeout=60)
    assert started.returncode == 130, err
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
    assert list(Path("sweep").iterdir()) == []


def _children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
