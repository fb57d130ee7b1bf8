"""The folder of a run: texts go where there is room, and without room a run does not begin."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fxpipe.errors import RunError
from fxpipe.runtime.wires.run_folder import RunFolder, make_folders, prepared


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of folders whose disk takes no more."""
    names: set[str] = set()
    write = os.replace

    def replace(source: Path, target: Path) -> None:
        if target.parent.name in names:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(source, target)

    monkeypatch.setattr(os, "replace", replace)
    return names


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    made = [tmp_path / "first", tmp_path / "second"]
    for folder in made:
        folder.mkdir()
    return made


def test_a_text_goes_where_there_is_room(folders: list[Path], full: set[str]) -> None:
    path = prepared(folders, 10, lambda folder: None)
    assert path == folders[0]
    one, other = RunFolder(path), RunFolder(path)
    one.write("a.json", "früh")
    full.add("first")
    one.write("a.json", "spät")
    one.write("b.json", "")
    assert (other.read("a.json"), other.read("b.json"), other.read("c.json")) == ("spät", "", None)
    assert sorted(other.names(".json")) == ["a.json", "b.json"]
    full.add("second")
    with pytest.raises(OSError, match="No space left"):
        one.write("c.json", "")
    full.clear()
    one.write("a.json", "zuletzt")
    assert other.read("a.json") == "zuletzt"
    for name in ("a.json", "b.json", "c.json"):
        other.remove(name)
    assert [[path.name for path in folder.iterdir()] for folder in folders] == [["spare"], []]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_text_of_another_user_is_none(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write("a.json", "")
    os.chown(tmp_path / "a.json", 65534, -1)
    assert folder.read("a.json") is None


def test_what_has_no_room_in_the_first_folder_begins_in_the_second(folders: list[Path]) -> None:
    def prepare(folder: Path) -> None:
        (folder / "begun").touch()
        if folder.name in small:
            raise OSError(errno.ENOSPC, "No space left on device")

    small = {"first"}
    assert prepared(folders, 10, prepare) == folders[1]
    assert (folders[1] / "spare").resolve() == folders[0]
    assert not list(folders[0].iterdir())
    (folders[1] / "spare").unlink()
    small.add("second")
    with pytest.raises(RunError, match=r"have no folder to exchange files: .*No space left.*; .*No space") as caught:
        prepared(folders, 64 << 10, prepare)
    assert caught.value.hint == "free 64 KiB there, or set TMPDIR to a folder with room"


def test_folders_are_private_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    made = make_folders("out")
    for folder in made:
        with folder as path:
            assert os.path.isabs(path)
            assert os.stat(path).st_mode & 0o077 == 0
        assert not os.path.exists(path)
    assert len(made) == 2
    assert len(make_folders("missing")) == len(make_folders(None)) == 1


def test_several_processes_may_write_the_same_text(tmp_path: Path) -> None:
    """As replicas that meet a new shape of batch."""
    code = "from pathlib import Path; from fxpipe.runtime.wires.run_folder import RunFolder\n"
    code += f"for _ in range(2000): RunFolder(Path({str(tmp_path)!r})).write('shape', 'x' * 9999)"
    writers = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["shape"]
