"""Replicas as processes that a user starts, kills, or starts too few of: what trains, and what is said."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from commands import QUICK, Result, finish, fxpipe, start_module
from model_files import write_model
from started_runs import started_command

pytestmark = [pytest.mark.slow, pytest.mark.multiproc]
EXAMPLES = Path(__file__).parents[2] / "examples"
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


@pytest.mark.parametrize("victim", [1, 3])
def test_a_killed_replica_under_torchrun_ends_the_others(build: Path, tmp_path: Path, victim: int) -> None:
    """torchrun names the process; what the others say names theirs."""
    out = tmp_path / "out"
    started = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 4, "--no-python", sys.executable]
    command = [*started, "-m", "fxpipe", "run", build, "--steps", ENDLESS, "--threads", 1, "--out", out]
    with started_command([str(part) for part in command], tmp_path / "tmp") as run:
        metrics = out / "metrics.jsonl"
        run.until(lambda: metrics.is_file() and metrics.read_text(), 120)
        ranks = {}
        for process in run.all():
            entries = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            ranks.update({int(entry[5:]): process for entry in entries if entry.startswith(b"RANK=")})
        assert set(ranks) == {0, 1, 2, 3}
        os.kill(ranks[victim], signal.SIGKILL)
        begin = time.monotonic()
        code, err = run.ends(60)
        assert code
        assert time.monotonic() - begin < 45
        assert re.search(rf"(?i)rank\s*:\s*{victim} .*|local_rank: {victim}", err)
        run.is_gone(5)


def test_a_number_of_processes_that_does_not_fit_is_refused(build: Path, tmp_path: Path) -> None:
    result = torchrun(3, "run", build, "--steps", 2, "--out", tmp_path / "out")
    assert result.code
    said = "the build has 2 workers, with 2 replicas of each, but 3 processes were started"
    assert said in result.err
    assert "start 4 processes in all, or compile with another -n and --dp, whose product is 3" in result.err
    assert not (tmp_path / "out").exists()


def test_the_gpt_trains_under_torchrun_as_in_one_process(tmp_path: Path) -> None:
    build = tmp_path / "build"
    assert fxpipe("compile", EXAMPLES / "gpt.py", "-n", 2, "--dp", 2, "-o", build, *QUICK).code == 0
    common = ("run", build, "--steps", 6, "--threads", 1, "--json", "--out")
    traces = [tmp_path / "apart.json", tmp_path / "local.json"]
    found = torchrun(4, *common, tmp_path / "apart", "--trace", traces[0]).json
    local = fxpipe(*common, tmp_path / "local", "--local", "--trace", traces[1]).json
    assert found["losses"] == local["losses"]
    assert len(found["losses"]) == 6
    weights = [(tmp_path / where / "model.safetensors").read_bytes() for where in ("apart", "local")]
    assert weights[0] == weights[1]
    for trace in traces:
        events = json.loads(trace.read_text())["traceEvents"]
        named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
        assert sorted(named.values()) == [f"worker {k}, replica {j}" for k in (0, 1) for j in (0, 1)]
        for process in named:
            spans = [event for event in events if event["pid"] == process and event["ph"] == "X"]
            assert {event["args"]["minibatch"] for event in spans if event["cat"] == "F"} == set(range(6))
            if trace is traces[0]:  # in one process nothing waits
                assert [event["name"] for event in spans].count("wait for the sum of bucket_0") == 6
