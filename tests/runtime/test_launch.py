"""Which of several errors a run reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fxpipe.errors import BatchError, PeerLost, RunError
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.launch import first_error, running_under_torchrun


def leave(folder: Path, rank: int, time: float, kind: str | None, what: str, **more: Any) -> None:
    entry = {"rank": rank, "time": time, "kind": kind, "what": what, "where": None, "hint": None, "page": None, **more}
    (folder / f"{rank}.json").write_text(json.dumps(entry))


def test_the_earliest_error_of_ones_own(tmp_path: Path) -> None:
    leave(tmp_path, 0, 1.0, "PeerLost", "echo")
    leave(tmp_path, 1, 3.0, "RunError", "later")
    leave(tmp_path, 2, 2.0, "BatchError", "first", where="here", hint="do this")
    error = first_error(tmp_path, {0: 1, 1: 1, 2: 1})
    assert type(error) is BatchError
    assert str(error) == "first\n  at: here\n  hint: do this"


@pytest.mark.parametrize(
    ("exits", "message"),
    [
        ({0: -15, 1: -9}, "worker 1 was killed by signal 9 (SIGKILL)"),
        ({0: -15}, "worker 0 was killed by signal 15 (SIGTERM)"),
        ({1: -11, 2: 1}, "worker 1 was killed by signal 11 (SIGSEGV)"),
        ({2: 3}, "worker 2 exited with code 3 before it could say why"),
    ],
)
def test_without_words_the_exit_code_speaks(tmp_path: Path, exits: dict[int, int], message: str) -> None:
    leave(tmp_path, 0, 1.0, "PeerLost", "echo")
    error = first_error(tmp_path, exits)
    assert type(error) is RunError
    assert message in str(error)


def test_an_unexpected_error_comes_with_its_traceback(tmp_path: Path) -> None:
    leave(tmp_path, 1, 1.0, None, "ZeroDivisionError: 1/0", trace="Traceback …\nZeroDivisionError: 1/0\n")
    text = str(first_error(tmp_path, {1: 1}))
    assert "worker 1 stopped on an unexpected error\nTraceback" in text
    assert "report" in text


def test_only_echoes(tmp_path: Path) -> None:
    leave(tmp_path, 0, 1.0, "PeerLost", "worker 0 lost a connection")
    assert type(first_error(tmp_path, {0: 1})) is PeerLost


def test_options_travel() -> None:
    options = RunOptions("build", steps=3, policy="stash", out="weird 'name'", threads=2)
    assert RunOptions.from_json(options.to_json()) == options


def test_torchrun_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert not running_under_torchrun()
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    assert running_under_torchrun()
