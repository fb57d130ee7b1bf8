"""A folder of checkpoints: what counts, which is the newest whole one, what is taken away."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fxpipe.checkpoint.interval import Interval
from fxpipe.checkpoint.manifest import FORMAT, MANIFEST, Manifest, read_manifest
from fxpipe.checkpoint.safetensors_file import write_bytes
from fxpipe.checkpoint.shelf import Shelf
from fxpipe.errors import CheckpointError, FxpipeError


def put(shelf: Shelf, step: int, text: str = "weights") -> Path:
    partial = shelf.partial(step)
    partial.mkdir(parents=True)
    files = {name: write_bytes(partial / name, f"{text} {name}".encode()) for name in ("first", "second")}
    manifest = Manifest(step, 0, 2, "plan", {"schedule": "async", "policy": "latest"}, {"torch": "2"}, files)
    write_bytes(partial / MANIFEST, manifest.to_json().encode())
    shelf.commit(step)
    return shelf.path(step)


def test_the_newest_is_found_by_number(tmp_path: Path) -> None:
    shelf = Shelf.of(tmp_path)
    for step in (9, 100, 20):
        put(shelf, step)
    assert shelf.steps() == [9, 20, 100]
    path, manifest, damaged = shelf.newest()
    assert (path, manifest.step, damaged) == (shelf.path(100), 100, [])


def test_what_has_no_manifest_does_not_count(tmp_path: Path) -> None:
    shelf = Shelf.of(tmp_path)
    put(shelf, 5)
    shelf.partial(6).mkdir()
    shelf.path(7).mkdir()
    (shelf.folder / "step-x").mkdir()
    assert shelf.steps() == [5]
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        read_manifest(shelf.path(7))
    shelf.clear()
    assert not shelf.partial(6).exists()


def test_files_that_are_missing_cut_off_or_changed_are_all_named(tmp_path: Path) -> None:
    shelf = Shelf.of(tmp_path)
    path = put(shelf, 3)
    (path / "first").unlink()
    (path / "second").write_bytes(b"weight")
    with pytest.raises(CheckpointError, match="first is missing; second has 6 bytes, not 14"):
        shelf.newest()


def test_files_of_two_steps_do_not_make_one(tmp_path: Path) -> None:
    shelf = Shelf.of(tmp_path)
    older, newer = put(shelf, 1, "older weights"), put(shelf, 2, "newer weights")
    (newer / "first").write_bytes((older / "first").read_bytes())
    path, _, damaged = shelf.newest()
    assert path == older
    assert "first was changed" in damaged[0].what


def test_a_manifest_of_another_format_is_refused(tmp_path: Path) -> None:
    path = put(Shelf.of(tmp_path), 1) / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(CheckpointError, match=f"format 99, this fxpipe reads {FORMAT}"):
        read_manifest(path.parent)


def test_the_oldest_go(tmp_path: Path) -> None:
    shelf = Shelf.of(tmp_path)
    for step in range(1, 6):
        put(shelf, step)
        shelf.prune(2, step)
    assert shelf.steps() == [4, 5]
    assert {path.name for path in shelf.folder.iterdir()} == {"step-4", "step-5"}


def test_an_empty_shelf_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        Shelf.of(tmp_path).newest()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("500", Interval(500)),
        (500, Interval(500)),
        ("30s", Interval(seconds=30)),
        ("1.5h", Interval(seconds=5400)),
        ("10 min", Interval(seconds=600)),
    ],
)
def test_intervals(text: str | int, found: Interval) -> None:
    assert Interval.of(text) == found


@pytest.mark.parametrize("text", ["0", "-1", "ten", "5 days", "0s", "", 0, -1, True, 2.5])
def test_what_is_no_interval(text: Any) -> None:
    with pytest.raises(FxpipeError, match="not an interval"):
        Interval.of(text)
