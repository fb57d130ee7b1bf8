"""A folder that is replaced, as a build or an export: whoever is killed, there is the old one or the new one."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxpipe import files
from fxpipe.files import exchange, remove_abandoned, replacing
from tests.survive.disk import Call, Recorder

Tree = dict[str, bytes | None]
"""What is in a folder, by relative path: a file's bytes, or None for a folder."""

OLD: Tree = {"build/stage": b"old"}
NEW: Tree = {"build/stage": b"new", "build/plan": b"{}"}


def killed(root: Path) -> list[Tree]:
    """What is there if the process that replaces the old folder is killed before each of its calls, or at its end."""
    recorder, found = Recorder(root), list[Tree]()

    def look(number: int = 0, call: Call | None = None) -> None:
        paths = sorted(root.rglob("*")) if root.exists() else []
        found.append({str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in paths})

    recorder.fail = look
    with recorder.recording():
        for held in (OLD, NEW):
            found.clear()
            with replacing(root / "build") as fresh:
                for name, data in held.items():
                    with (fresh / Path(name).name).open("wb") as file:
                        file.write(data or b"")
    look()
    return found


def in_place(tree: Tree) -> Tree:
    return {name: data for name, data in tree.items() if name.startswith("build/")}


@pytest.fixture
def exchanges(tmp_path: Path) -> None:
    """Skips a test where the system exchanges no names."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    if not exchange(tmp_path / "one", tmp_path / "other"):
        pytest.skip("this file system exchanges no names")


@pytest.mark.usefixtures("exchanges")
def test_one_of_the_two_is_always_there(tmp_path: Path) -> None:
    trees = killed(tmp_path / "root")
    assert len(trees) > 5
    assert all(in_place(tree) in (OLD, NEW) for tree in trees)
    assert trees[-1] == {"build": None, **NEW}


@pytest.mark.usefixtures("exchanges")
def test_two_that_cannot_change_places(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "one", tmp_path / "none")


def test_without_the_call_the_next_writer_puts_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "exchange", lambda one, other: False)
    monkeypatch.setattr(files, "process_began", lambda process: "")
    trees = killed(tmp_path / "root")
    assert any(not in_place(tree) for tree in trees), "no kill costs anything: the test looks at nothing"
    for number, tree in enumerate(trees):
        folder = tmp_path / str(number)
        folder.mkdir()
        for place, data in tree.items():
            (folder / place).mkdir() if data is None else (folder / place).write_bytes(data)
        remove_abandoned(folder)
        assert sorted(path.name for path in folder.iterdir()) == ["build"]
        left = {f"build/{path.name}": path.read_bytes() for path in (folder / "build").iterdir()}
        assert left in (OLD, NEW)
