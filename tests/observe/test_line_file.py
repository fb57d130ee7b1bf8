"""Lines are whole or lost, also on a disk that is full."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from fxpipe.observe.line_file import LineFile
from fxpipe.typed_json import parse_lines


def lines(*steps: int, run: int = 1) -> str:
    return "".join(json.dumps({"step": step, "run": run}) + "\n" for step in steps)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def write(file: LineFile, *steps: int, run: int = 2) -> None:
    for step in steps:
        file.write({"step": step, "run": run})


def test_a_new_file_is_there_at_once(path: Path) -> None:
    file = LineFile(path)
    write(file, 1)
    assert path.read_text() == lines(1, run=2)
    file.close()


def test_lines_that_are_no_json_are_left_out() -> None:
    good = [b'{"a":1}\n', b'{"a":-Infinity,"b":1e400}\n', b'{"a":"\\ud800"}\n', b"12345678901234567890123\n"]
    bad = [b'{"a"', b"\xff\xfe\n", b"[" * 100_000 + b"\n", b"\n", b"1" * 5000 + b"\n", b'"\xff"\n']
    found = list(parse_lines([*bad, *good, *bad]))
    assert [line for line, _ in found] == good
    assert [row for _, row in found] == [json.loads(line) for line in good]


def test_lines_follow_those_that_are_there(path: Path) -> None:
    path.write_text(lines(1, 2))
    file = LineFile(path, anew=False)
    write(file, 3)
    file.close()
    assert path.read_text() == lines(1, 2) + lines(3, run=2)
    LineFile(path).close()
    assert list(path.parent.iterdir()) == [], "a run without a line leaves none"


class FullDisk:
    """Takes `room` bytes, then none until there is more room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int, code: int = errno.ENOSPC) -> None:
        self.room, self.code = room, code
        self._write = os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, descriptor: int, data: bytes) -> int:
        if not self.room:
            raise OSError(self.code, os.strerror(self.code))
        count = self._write(descriptor, data[: self.room])
        self.room -= count
        return count


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EPIPE])
def test_what_a_full_disk_refuses_is_lost_as_a_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    file = LineFile(path)
    disk = FullDisk(monkeypatch, len(lines(1)) + 3, code)
    write(file, 1, 2, 3)
    disk.room = 1000
    write(file, 4)
    disk.room = 0
    write(file, 5)
    file.close()
    assert path.read_text() == lines(1, 4, run=2)
    assert file.lost == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path} cannot be written: {os.strerror(code)}; training goes on, and lines are lost" in line


def test_nothing_is_said_where_all_is_well(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = LineFile(path)
    write(file, 1)
    file.sync()
    file.close()
    file.close()
    assert file.lost == 0
    assert capsys.readouterr().err == ""


def test_a_deleted_folder_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    file = LineFile(tmp_path / "out" / "metrics.jsonl")
    write(file, 1)
    shutil.rmtree(tmp_path / "out")
    write(file, 2)
    file.close()
    assert capsys.readouterr().err.count("was deleted during the run: its lines are lost") == 1


def test_a_closed_stderr_ends_no_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = LineFile(path)
    FullDisk(monkeypatch, 0)
    with open(os.devnull, "w") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
    write(file, 1)
    assert file.lost == 1


def test_a_thread_syncs_while_another_writes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # so that it syncs often
    file = LineFile(path)
    over = threading.Event()

    def sync() -> None:
        while not over.is_set():
            file.sync()

    thread = threading.Thread(target=sync)
    thread.start()
    try:
        write(file, *range(5000))
    finally:
        over.set()
        thread.join()
    file.close()
    assert path.read_text() == lines(*range(5000), run=2)
