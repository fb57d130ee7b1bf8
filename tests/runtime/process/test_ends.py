"""Which of several errors a run reports."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fxpipe.errors import BatchError, PeerLost, WorkerLost
from fxpipe.observe.pulse import STEP, Pulse, Signs
from fxpipe.plan.mesh import Mesh
from fxpipe.runtime.process.ends import first_cause, forget_memory, is_explained, leave_error
from fxpipe.runtime.wires.board import Board, DictBoard


def signs(phase: Any, step: int = 0) -> Signs:
    pulse = Pulse()
    pulse.phase = phase
    pulse.numbers[STEP] = step
    return Signs.of(pulse.numbers)


SIGNS = [signs("training", 12), signs("training", 12), signs("importing")]


@pytest.fixture
def board() -> Board:
    return DictBoard()


def leave(board: Board, rank: int, time: float, kind: str | None, what: str, **more: Any) -> None:
    entry = {"rank": rank, "time": time, "kind": kind, "what": what, "where": None, "hint": None, "page": None, **more}
    board.set(f"error/{rank}", json.dumps(entry))


def test_the_earliest_error_of_ones_own(board: Board) -> None:
    leave(board, 0, 1.0, "PeerLost", "echo")
    leave(board, 1, 3.0, "RunError", "later")
    leave(board, 2, 2.0, "BatchError", "first", where="here", hint="do this")
    error = first_cause(board, {0: 1, 1: 1, 2: 1}, SIGNS)
    assert type(error) is BatchError
    assert str(error) == "first\n  at: here\n  hint: do this"


def test_a_process_of_several_workers_is_called_by_its_rank(board: Board) -> None:
    mesh = Mesh((0, 1, 1, 0, 2))
    assert first_cause(board, {1: -9}, SIGNS, mesh).what.startswith("rank 1 (workers 1, 2) was killed")
    assert first_cause(board, {2: -9}, SIGNS, mesh).what.startswith("worker 4 was killed")
    leave(board, 0, 1.0, None, "what", trace="lines")
    assert first_cause(board, {0: 1}, SIGNS, mesh).what.startswith("rank 0 (workers 0, 3) stopped on an")


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ({1: -9, 0: 1}, "worker 1 was killed by signal 9 (SIGKILL)\n  at: training step 12\n  hint: usually the"),
        ({2: -15}, "worker 2 was killed by signal 15 (SIGTERM)\n  at: importing"),
        ({1: -15, 2: -11}, "worker 1 was killed by signal 15 (SIGTERM)\n  at: training step 12"),
        ({2: 3}, "worker 2 exited with code 3 before its work was done\n  at: importing"),
        (
            {1: 0},
            "worker 1 exited with code 0 before its work was done\n  at: training step 12\n  hint: what it wrote to",
        ),
    ],
)
def test_without_words_the_exit_code_speaks(board: Board, ends: dict[int, int], message: str) -> None:
    """The first end counts; worker 0 only lost its peer."""
    leave(board, 0, 1.0, "PeerLost", "echo")
    error = first_cause(board, ends, SIGNS)
    assert type(error) is WorkerLost
    assert str(error).startswith(message)


def test_lost_connections_explain_nothing(board: Board) -> None:
    leave(board, 0, 1.0, "PeerLost", "echo")
    assert not is_explained(board, {0: 1})
    assert is_explained(board, {0: 1, 1: -9})
    leave(board, 0, 1.0, "BatchError", "its own")
    assert is_explained(board, {0: 1})


def test_an_unexpected_error_comes_with_its_traceback(board: Board) -> None:
    leave(board, 1, 1.0, None, "ZeroDivisionError: 1/0", trace="Traceback …\nZeroDivisionError: 1/0\n")
    text = str(first_cause(board, {1: 1}, SIGNS))
    assert "worker 1 stopped on an unexpected error\nTraceback" in text
    assert "report" in text


def test_only_echoes(board: Board) -> None:
    leave(board, 0, 1.0, "PeerLost", "worker 0 lost a connection")
    assert type(first_cause(board, {0: 1}, SIGNS)) is PeerLost


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("import sys; sys.exit(3)", "sys.exit(3)"),
        ("raise type('Skipped', (BaseException,), {})('later')", "Skipped: later"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
def test_what_is_no_exception_is_said_as_what_it_is(board: Board, tmp_path: Path, line: str, cause: str) -> None:
    (tmp_path / "model.py").write_text(f"# not fxpipe's\n{line}\n")
    code = compile((tmp_path / "model.py").read_text(), str(tmp_path / "model.py"), "exec")
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        exec(code)
    leave_error(board, 1, caught.value)
    text = str(first_cause(board, {1: 1}, SIGNS))
    assert text.startswith(f"worker 1 was ended by {cause}\n  at: model.py:2: {line}\n  hint:")


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="the system has no /dev/shm")
def test_no_file_of_shared_memory_is_left() -> None:
    """Of this process; another one's, whose number begins alike, stay."""
    number = 10**9 + os.getpid()  # no process has it
    left, other = (Path(f"/dev/shm/torch_{each}_1_0") for each in (number, 10 * number))
    for path in (left, other):
        path.touch()
    try:
        forget_memory(number)
        assert not left.exists()
        assert other.exists()
    finally:
        other.unlink()
