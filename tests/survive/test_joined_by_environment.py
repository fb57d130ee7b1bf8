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
@pytest.mark.parametrize("options", [("-n", 2), ("-n", 1, "--dp", 2)], ids=["workers", "replicas"])
def test_who_is_left_says_that_a_connection_is_lost(tmp_path: Path, options: tuple[object, ...]) -> None:
    model = write_model(tmp_path)
    assert fxpipe("compile", model, "-o", tmp_path / "build", *options, *QUICK).code == 0
    place = free_port()
    left, lost = (started(tmp_path, rank, place, "--epochs", 100000) for rank in range(2))
    try:
        wait_for(tmp_path / "out" / "metrics.jsonl")
        os.kill(lost.pid, signal.SIGKILL)
        result = finish(left, 60)
    finally:
        finish(lost, 60)
    assert result.code == 1
    assert "error: worker 0" in result.err
    assert "lost a connection" in result.err


def test_who_waits_for_others_to_begin_says_so(tmp_path: Path) -> None:
    assert fxpipe("compile", write_model(tmp_path), "-o", tmp_path / "build", "-n", 2, *QUICK).code == 0
    alone = started(tmp_path, 0, free_port(), "--stall-timeout", 0.5)
    assert alone.stderr is not None
    line = alone.stderr.readline()
    os.kill(alone.pid, signal.SIGKILL)
    finish(alone, 60)
    assert "the process of rank 0 has waited" in line
    assert "for all 2 to meet at 127.0.0.1:" in line
