"""The board of a run: texts that are there for all until they are forgotten; without room a run does not begin."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from fxpipe.files import owned
from fxpipe.runtime.wires import board as module
from fxpipe.runtime.wires.board import Board, DictBoard, FolderBoard, StoreBoard, make_folder


@pytest.fixture(params=["one process", "one machine", "torchrun"])
def board(request: pytest.FixtureRequest, tmp_path: Path) -> Board:
    if request.param == "one machine":
        return FolderBoard(tmp_path)
    return DictBoard() if request.param == "one process" else StoreBoard(dist.HashStore())


def test_until_they_are_forgotten(board: Board) -> None:
    board.set("run/5/0", "früh")
    assert board.all(["run/5/0", "run/5/1"]) is None
    board.set("run/5/1", "")
    board.set("run/5/0", "spät")
    assert board.all(["run/5/1", "run/5/0"]) == ["", "spät"]
    board.forget(["run/5/0", "never there"])
    assert board.get("run/5/0") is None
    assert board.get("run/5/1") == ""


def test_who_waits_gets_all_of_them(board: Board) -> None:
    assert board.wait([], 0) == []
    board.set("a", "1")
    with pytest.raises(TimeoutError):
        board.wait(["a", "b"], 0.01)
    writer = threading.Timer(0.05, board.set, ("b", "2"))
    writer.start()
    assert board.wait(["b", "a"], 60) == ["2", "1"]
    writer.join()


def test_one_process_is_the_first() -> None:
    store = dist.HashStore()
    assert [StoreBoard(store).first("ended") for _ in range(3)] == [True, False, False]


def test_a_folder_keeps_no_forgotten_text(tmp_path: Path) -> None:
    one, other = FolderBoard(tmp_path), FolderBoard(tmp_path)
    for number in range(20):
        one.set(f"run/{number}", "text")
        assert other.get(f"run/{number}") == "text"
        one.forget([f"run/{number}"])
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_waited_for_where_that_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "RETRY", 0.0)
    failures, write = [errno.ENOSPC, errno.EDQUOT], Path.write_text

    def full(path: Path, text: str) -> int:
        if failures:
            raise OSError(failures.pop(), "No space left on device")
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", full)
    board = FolderBoard(tmp_path)
    board.set("run/1", "text")
    assert board.get("run/1") == "text"
    assert capsys.readouterr().err.count(" is full: the run waits until there is space") == 1
    for number, patient in ((errno.EIO, True), (errno.ENOSPC, False)):
        failures.append(number)
        with pytest.raises(OSError, match="No space"):
            board.set("run/1", "other", patient)
    assert board.get("run/1") == "text"


def test_a_folder_is_private_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with make_folder(10) as path:
        assert stat.S_IMODE(os.stat(path).st_mode) & 0o077 == 0
        assert list(tmp_path.iterdir()) == [Path(path)]
    assert not list(tmp_path.iterdir())


def test_folders_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gone, elsewhere = owned().replace(f".{os.getpid()}.", f".{2**22 + 1}."), f".another-host.{2**22 + 1}.tmp"
    left, *stays = [tmp_path / f"fxpipe_run_a{end}" for end in (gone, owned(), elsewhere)]
    for path in (left, *stays):
        path.mkdir()
        (path / "meeting").write_text("secret")
    with make_folder(10):
        assert not left.exists()
        assert all((path / "meeting").exists() for path in stays)


def test_several_processes_may_write_the_same_text(tmp_path: Path) -> None:
    """As replicas that meet a new shape of batch."""
    code = "from fxpipe.runtime.wires.board import FolderBoard\n"
    code += f"for _ in range(2000): FolderBoard({str(tmp_path)!r}).set('shape', 'x' * 9999)"
    writers = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["shape"]
