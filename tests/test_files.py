"""Files and folders that appear whole or not at all, and what a killed process leaves of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fxpipe.errors import BuildError
from fxpipe.files import remove_abandoned, replaced, replacing, temporary

KILLED = """
import os, signal, sys
from pathlib import Path
from fxpipe import files

target, point = Path(sys.argv[1]), sys.argv[2]
rename = Path.rename
files.exchange = lambda one, other: False  # as where the system cannot

def stop(path, to):
    if point == "moved" and to == target:
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(path, to)

Path.rename = stop
if point == "file":
    with files.replaced(target) as file:
        file.write(b"half")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
with files.replacing(target) as fresh:
    (fresh / "new").write_text("new")
    if point == "written":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(target: Path, point: str) -> None:
    """A process that was killed at this point while it wrote `target`."""
    ended = subprocess.run([sys.executable, "-c", KILLED, str(target), point], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert len(list(target.parent.glob(".*.tmp"))) == (2 if point == "moved" else 1)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("point", ["written", "moved"])
def test_the_next_writer_of_a_folder_removes_what_a_killed_one_left(tmp_path: Path, point: str) -> None:
    target = tmp_path / "build"
    target.mkdir()
    (target / "old").write_text("old")
    killed(target, point)
    with pytest.raises(RuntimeError), replacing(target):
        raise RuntimeError
    assert names(tmp_path) == ["build"]
    assert names(target) == ["old"], "not even a kill between two renames costs the folder"
    with replacing(target) as fresh:
        (fresh / "new").write_text("new")
    assert names(tmp_path) == ["build"]
    assert names(target) == ["new"]


def test_the_next_writer_of_a_file_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("old")
    killed(tmp_path / "model", "file")
    assert (tmp_path / "model").read_text() == "old"
    remove_abandoned(tmp_path)
    assert names(tmp_path) == ["model"]


def test_a_killed_process_whose_parent_does_not_look_writes_no_more(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "100"]) as child:
        mine = temporary(tmp_path / "model")
        left = mine.with_name(mine.name.replace(f".{os.getpid()}.", f".{child.pid}."))
        left.write_text("half")
        remove_abandoned(tmp_path)
        assert left.exists()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        remove_abandoned(tmp_path)
        assert names(tmp_path) == []


def test_what_belongs_to_somebody_stays(tmp_path: Path) -> None:
    """To a process that lives, to another host, or to the user."""
    mine = temporary(tmp_path / "model")
    other = tmp_path / mine.name.replace(f".{os.getpid()}.", f".{os.getppid()}.")
    elsewhere = tmp_path / ".model.another-host.4194305.tmp"
    for path in (mine, other, elsewhere, tmp_path / ".notes.tmp", tmp_path / "x.1.tmp"):
        path.write_text("here")
    before = names(tmp_path)
    remove_abandoned(tmp_path)
    assert names(tmp_path) == before
    remove_abandoned(tmp_path / "missing")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), replaced(path) as file:
        file.write(b"new" * (1 // 0))
    assert names(tmp_path) == ["model"]
    assert path.read_text() == "old"
    with replaced(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert names(tmp_path) == ["model"]
    assert path.read_text() == "new"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="cannot be written"), replacing(tmp_path / "file" / "build"):
        pass
