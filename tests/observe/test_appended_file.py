"""A file that grows, on a disk that is full for a while, and in a folder that somebody deletes."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fxpipe.observe import appended_file
from fxpipe.observe.appended_file import AppendedFile

Says = Callable[[], str]


@pytest.fixture(autouse=True)
def _tries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appended_file, "RETRY", 0.0)


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
def test_what_a_full_disk_refuses_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    file = AppendedFile(tmp_path / "log")
    disk = FullDisk(monkeypatch, 7, code)
    for piece in (b"one\n", b"second\n", b"third\n"):
        file.write(piece)
    assert (tmp_path / "log").read_bytes() == b"one\nsec"
    said = capsys.readouterr().err
    assert said.count("warning") == 1
    assert f"log cannot be written: {os.strerror(code)}; training goes on" in said
    assert file.problems == [{"file": "log", "late": 2, "lost": 2}]
    disk.room = 1000
    file.write(b"fourth\n")
    assert "log is written again" in capsys.readouterr().err
    file.close()
    assert (tmp_path / "log").read_bytes() == b"one\nsecond\nthird\nfourth\n"
    assert file.problems == [{"file": "log", "late": 3, "lost": 0}]


def test_what_never_can_be_written_is_counted_and_takes_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(appended_file, "HELD", 100)
    file = AppendedFile(tmp_path / "log")
    disk = FullDisk(monkeypatch, 5)
    for number in range(100):
        file.write(b"%09d\n" % number)
    disk.room = 15
    file.close()
    assert (tmp_path / "log").read_bytes() == b"000000000\n000000091\n"
    assert file.problems == [{"file": "log", "late": 100, "lost": 98}]
    assert "98 lines are lost" in capsys.readouterr().err


def test_nothing_is_said_where_all_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = AppendedFile(tmp_path / "log")
    file.write(b"one\n")
    file.sync()
    file.close()
    file.close()
    assert file.problems == []
    assert capsys.readouterr().err == ""


def test_a_deleted_folder_is_made_again_with_all_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    file = AppendedFile(tmp_path / "out" / "log")
    file.write(b"one\n")
    shutil.rmtree(tmp_path / "out")
    file.write(b"second\n")
    file.write(b"third\n")
    file.close()
    assert (tmp_path / "out" / "log").read_bytes() == b"one\nsecond\nthird\n"
    assert capsys.readouterr().err.count("was deleted: it is made again") == 1


def test_a_closed_stderr_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = AppendedFile(tmp_path / "log")
    FullDisk(monkeypatch, 0)
    with open(os.devnull, "w") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
    file.write(b"one\n")
    assert file.late == 1


def test_a_thread_syncs_while_another_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines were written twice, or `IndexError: pop from an empty deque` ended the run."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # so that it syncs often
    file = AppendedFile(tmp_path / "lines")
    over = threading.Event()

    def sync() -> None:
        while not over.is_set():
            file.sync()

    thread = threading.Thread(target=sync)
    thread.start()
    pieces = [f"{k}\n".encode() for k in range(20000)]
    try:
        for piece in pieces:
            file.write(piece)
    finally:
        over.set()
        thread.join()
    file.close()
    assert (tmp_path / "lines").read_bytes() == b"".join(pieces)
