"""Replicas as processes that a user starts, kills, or starts too few of: what trains, and what is said."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from commands import QUICK, Result, finish, fxpipe, start_module
from model_files import write_model
from started_runs import started_command

pytestmark = [pytest.mark.slow, pytest.mark.multiproc]
ENDLESS = 10**7


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two workers of two replicas."""
    folder = tmp_path_factory.mktemp("replicas")
    compiled = fxpipe("compile", write_model(folder), "-n", 2, "--dp", 2, "-o", folder / "build", *QUICK)
    assert compiled.code == 0, compiled
    return folder / "build"


def torchrun(count: int, *arguments: object) -> Result:
    """`torchrun … fxpipe ARGUMENTS`."""
    started = ("torch.distributed.run", "--standalone", "--nproc-per-node", count, "--no-python", sys.executable)
    return finish(start_module(*started, "-m", "fxpipe", *arguments), 240)


@pytest.mark.parametrize(("victim", "name"), [(3, "worker 1, replica 1"), (1, "worker 0, replica 1")])
def test_a_killed_replica_is_named_and_the_others_end(build: Path, tmp_path: Path, victim: int, name: str) -> None:
    out = tmp_path / "out"
    command = ["-m", "fxpipe", "run", build, "--steps", ENDLESS, "--threads", 1, "--out", out]
    with started_command([str(part) for part in command], tmp_path / "tmp") as run:
        metrics = out / "metrics.jsonl"
        run.until(lambda: metrics.is_file() and metrics.read_text().count("\n") > 9, 120)
        assert len(run.workers()) == 4
        os.kill(run.workers()[victim], signal.SIGKILL)
        code, err = run.ends(15)
        assert code == 1
        assert f"error: {name} was killed by signal 9 (SIGKILL)\n  at: training step " in err
        assert "Traceback" not in err
        run.is_gone(1)
    assert [path.name for path in out.iterdir()] == ["metrics.jsonl"]


def test_a_number_of_processes_that_does_not_fit_is_refused(build: Path, tmp_path: Path) -> None:
    result = torchrun(3, "run", build, "--steps", 2, "--out", tmp_path / "out")
    assert result.code
    said = "the build has 2 workers, with 2 replicas of each, but 3 processes were started"
    assert said in result.err
    assert "start 4 processes in all, or compile with another -n and --dp, whose product is 3" in result.err
    assert not (tmp_path / "out").exists()
