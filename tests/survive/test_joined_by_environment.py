"""Processes started one by one, with RANK and WORLD_SIZE: each has a log of its own, which says what it meets."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from commands import QUICK, finish, free_port, fxpipe, start_module
from model_files import write_model

pytestmark = pytest.mark.multiproc


def started(folder: Path, rank: int, port: int, *more: object) -> subprocess.Popen[str]:
    environment = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    run = ("run", folder / "build", "--threads", 1, "--out", folder / "out")
    return start_module("fxpipe", *run, *more, **environment)


def wait_for(path: Path) -> None:
    for _ in range(600):
        if path.exists() and path.stat().st_size:
            return
        signal.sigtimedwait([], 0.1)
    raise AssertionError(f"{path} was not written")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "killed", "said"),
    [
        (("-n", 2), 1, "error: worker 1 ended without an error\n  at: "),
        (("-n", 1, "--dp", 2), 1, "error: worker 0, replica 1 ended without an error\n  at: "),
        (("-n", 2), 0, "error: worker 1 lost a connection: "),
    ],
    ids=["a worker", "a replica", "the one with the store"],
)
def test_who_is_left_says_who_is_lost(tmp_path: Path, options: tuple[object, ...], killed: int, said: str) -> None:
    model = write_model(tmp_path)
    assert fxpipe("compile", model, "-o", tmp_path / "build", *options, *QUICK).code == 0
    place, more = free_port(), ("--epochs", 100000, "--checkpoint-every", 20)
    processes = [started(tmp_path, rank, place, *more) for rank in range(2)]
    lost, left = processes.pop(killed), processes[0]
    try:
        wait_for(tmp_path / "out" / "checkpoints" / "step-20" / "checkpoint.json")
        os.kill(lost.pid, signal.SIGKILL)
        result = finish(left, 60)
    finally:
        finish(lost, 60)
    assert result.code == 1
    assert said in result.err
    assert result.err.count("error: ") == 1
    assert "the last good checkpoint is " in result.err
    assert ": go on from there with --resume" in result.err


def test_who_waits_for_others_to_begin_says_so(tmp_path: Path) -> None:
    assert fxpipe("compile", write_model(tmp_path), "-o", tmp_path / "build", "-n", 2, *QUICK).code == 0
    alone = started(tmp_path, 0, free_port(), "--stall-timeout", 0.5)
    assert alone.stderr is not None
    line = alone.stderr.readline()
    os.kill(alone.pid, signal.SIGKILL)
    finish(alone, 60)
    assert "the process of rank 0 has waited" in line
    assert "for all 2 to meet at 127.0.0.1:" in line
