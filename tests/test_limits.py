"""A limit of the system: whatever meets it, the error says which it is and what to do, without a traceback."""

from __future__ import annotations

import errno
import os
import resource
import socket
from pathlib import Path
from typing import Any

import pytest
from commands import fxpipe

from fxpipe.cli import doctor
from fxpipe.errors import BuildError, FxpipeError, RunError, WorkerLost
from fxpipe.limits import FILES, limit_hint, open_more_files
from fxpipe.observe.pulse import Pulse, Signs
from fxpipe.runtime.process.ends import first_cause, leave_error
from fxpipe.runtime.wires.board import DictBoard
from fxpipe.runtime.wires.meeting import prepare_meeting

MET: list[tuple[Exception, str]] = [
    (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "ulimit -n"),
    (BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), "ulimit -u"),
    (RuntimeError("can't start new thread"), "ulimit -u"),
    (MemoryError(), "ulimit -v"),
    (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "ulimit -v"),
]


@pytest.mark.parametrize(("error", "said"), MET)
def test_an_error_says_how_to_raise_the_limit(
    error: Exception, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the command, in a worker, and as the cause of another error, whose own hint is wrong then."""

    def fails() -> None:
        raise error

    monkeypatch.setattr(doctor, "_report", fails)
    found = fxpipe("doctor")
    assert found.code == 1
    assert said in found.err
    assert "Traceback" not in found.err
    board = DictBoard()
    for number, met in enumerate((error, BuildError("it cannot be read", where="here", hint="compile again"))):
        met.__cause__ = error if met is not error else None
        leave_error(board, number, met)
        left = first_cause(board, {number: 1}, [Signs.of(Pulse().numbers)] * 2)
        board.forget([f"error/{number}"])
        assert said in (left.hint or "")
        assert type(left) is (BuildError if number else WorkerLost)


@pytest.mark.parametrize("error", [ValueError("odd"), FxpipeError("mistake"), RuntimeError("OutOfMemoryError: CUDA")])
def test_other_errors_are_as_they_were(error: Exception) -> None:
    assert limit_hint(error) is None


def test_few_open_files_become_more(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, asked = [(24, 4096)], list[Any]()
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[0])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: asked.append(pair))
    open_more_files()
    assert asked == [(FILES, 4096)]
    limits[0] = (24, 24)
    with pytest.raises(RunError, match="only 24 files open"):
        open_more_files()


def test_a_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    found = fxpipe("inspect", "build")
    assert found.code == 1
    assert "the working directory is gone" in found.err


def test_no_loopback_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object) -> None:
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    monkeypatch.setattr(socket.socket, "connect", connect)
    with pytest.raises(RunError, match="meet over its loopback interface, which is down: Network is unreachable"):
        prepare_meeting(DictBoard())
