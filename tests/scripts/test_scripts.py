"""Training scripts in the manner of well-known ones: fxpipe trains them as they train themselves.

`NAME.py` is an ordinary script, whose `main()` returns the loss of every step and what it measures at the end;
`NAME_task.py` is the model file that its user would write. Both begin with the same weights and read the same batches,
since a script seeds before it makes its model, as `compile` does, and again before it reads its data, as `run` does.

Losses are of float32. Microbatches and eager PyTorch add the same gradients in another order, and optimizers that
divide by the size of a gradient carry such differences on: hence a tolerance, for each script. A script whose own
losses jump when its first weights change by 1e-7 compares nothing: where a ReLU did that, it is a GELU.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import QUICK, fxpipe

import fxpipe as library

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Script:
    """How a script is run.

    Attributes:
        length: of the run, as options.
        compiled: more options of the compile.
        run: more options of the run: what the script does in its loop.
        tolerance: relative, of losses and of metrics.
        processes: whether the workers are processes, and not in the one of the test.
    """

    name: str
    length: tuple[str, ...]
    microbatches: int = 2
    compiled: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    tolerance: float = 1e-5
    processes: bool = False


SCRIPTS = [
    Script("mnist", ("--epochs", "4"), processes=True),
    Script("imagenet", ("--epochs", "5"), microbatches=1),
    Script("word_language_model", ("--epochs", "1"), run=("--clip-norm", "0.25")),
    Script("nanogpt", ("--steps", "24"), run=("--clip-norm", "1.0")),
    Script("glue", ("--epochs", "2"), compiled=("--scan", "20"), processes=True),
    Script("lora", ("--epochs", "3")),
    Script("translation", ("--epochs", "2")),
    Script("vae", ("--epochs", "3")),
    Script("recommendation", ("--epochs", "3")),
]
LOOP = Script("early_stopping", (), tolerance=1e-4)


def run_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], dict[str, float]]:
    monkeypatch.syspath_prepend(HERE)
    with torch.random.fork_rng():
        losses, measured = importlib.import_module(name).main()
    assert len(losses) >= 10
    return losses, measured


def trained(script: Script, folder: Path, *options: str) -> tuple[list[float], dict[str, float]]:
    """The losses and the last evaluation of `fxpipe run`, of the build in `folder`."""
    where = () if script.processes else ("--local",)
    options = (*script.length, *where, *script.run, *options, "--threads", "1", "--json")
    summary = fxpipe("run", folder / "build", "--out", folder / "out", *options).json
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line], summary["evaluation"]


def built(script: Script, folder: Path, schedule: str) -> Any:
    task = HERE / f"{script.name}_task.py"
    options = ("-n", 2, "--schedule", schedule, "--microbatches", script.microbatches, *script.compiled)
    return fxpipe("compile", task, "-o", folder / "build", *options, *QUICK, "--json")


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("script", SCRIPTS, ids=[script.name for script in SCRIPTS])
def test_it_trains_as_the_script_does(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses, measured = run_itself(script.name, monkeypatch)
    compiled = built(script, tmp_path, "1f1b")
    assert compiled.code == 0, compiled.err
    ours, evaluation = trained(script, tmp_path)
    assert ours == pytest.approx(losses, rel=script.tolerance)
    assert evaluation == pytest.approx(measured, rel=script.tolerance)
    assert losses[-1] < losses[0]

    ours, evaluation = trained(script, tmp_path, "--schedule", "async")
    assert len(ours) == len(losses)
    assert all(map(math.isfinite, (*ours, *evaluation.values())))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "async"])
def test_its_own_loop_makes_the_decisions_of_the_script(
    schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script stops early, by what it has evaluated, and goes back to its best weights."""
    losses, measured = run_itself("early_stopping", monkeypatch)
    assert len(losses) < 5 * importlib.import_module("early_stopping").EPOCHS
    compiled = built(LOOP, tmp_path, schedule)
    assert compiled.code == 0, compiled.err
    port = importlib.import_module("early_stopping_task")
    build = library.load(tmp_path / "build")
    with torch.random.fork_rng(), build.local(optimizer=port.optimizer) as pipeline:
        ours, evaluation = port.main(pipeline, tmp_path / "best")
    if schedule == "async":
        assert all(map(math.isfinite, (*ours, *evaluation.values())))
        return
    assert ours == pytest.approx(losses, rel=LOOP.tolerance)
    assert evaluation == pytest.approx(measured, rel=LOOP.tolerance)


@pytest.mark.slow
@pytest.mark.multiproc
def test_its_own_loop_over_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses, measured = run_itself("early_stopping", monkeypatch)
    assert built(LOOP, tmp_path, "1f1b").code == 0
    port = HERE / "early_stopping_task.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", port, "build"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        ours, evaluation = json.loads(line)
        assert ours == pytest.approx(losses, rel=LOOP.tolerance)
        assert evaluation == pytest.approx(measured, rel=LOOP.tolerance)
    assert len(done.stdout.splitlines()) == 2  # both processes have seen the same
