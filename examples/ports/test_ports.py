"""fxpipe trains ports of training scripts as these train themselves."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compared import HERE, Script, built, run_itself, trained

import fxpipe

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


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.name for script in SCRIPTS])
def test_it_trains_as_the_script_does(script: Script, tmp_path: Path) -> None:
    losses, measured = run_itself(script.name)
    compiled = built(script, tmp_path, "1f1b")
    assert compiled.code == 0, compiled.err
    ours, evaluation = trained(script, tmp_path)
    assert ours == pytest.approx(losses, rel=script.tolerance)
    assert evaluation == pytest.approx(measured, rel=script.tolerance)
    assert losses[-1] < losses[0]

    ours, evaluation = trained(script, tmp_path, "--schedule", "async")
    assert len(ours) == len(losses)
    assert all(map(math.isfinite, (*ours, *evaluation.values())))


@pytest.mark.parametrize("schedule", ["1f1b", "async"])
def test_its_own_loop_makes_the_decisions_of_the_script(schedule: str, tmp_path: Path) -> None:
    """The script stops early, by what it has evaluated, and goes back to its best weights."""
    losses, measured = run_itself("early_stopping")
    assert len(losses) < 5 * importlib.import_module("early_stopping").EPOCHS
    compiled = built(LOOP, tmp_path, schedule)
    assert compiled.code == 0, compiled.err
    port = importlib.import_module("early_stopping_task")
    build = fxpipe.load(tmp_path / "build")
    with torch.random.fork_rng(), build.local(optimizer=port.optimizer) as pipeline:
        ours, evaluation = port.main(pipeline, tmp_path / "best")
    if schedule == "async":
        assert all(map(math.isfinite, (*ours, *evaluation.values())))
        return
    assert ours == pytest.approx(losses, rel=LOOP.tolerance)
    assert evaluation == pytest.approx(measured, rel=LOOP.tolerance)


def test_its_own_loop_over_processes(tmp_path: Path) -> None:
    losses, measured = run_itself("early_stopping")
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
