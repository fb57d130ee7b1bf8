"""All workers of a run under torchrun go on from one checkpoint, and none of them reads all of it to find out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fxpipe.checkpoint.manifest import MANIFEST, Manifest, check_files
from fxpipe.checkpoint.safetensors_file import write_bytes
from fxpipe.checkpoint.shard import INDEX, state_files
from fxpipe.checkpoint.shelf import Shelf
from fxpipe.runtime.process import membership
from fxpipe.runtime.process.membership import newest_of_all

WORKERS = 4


def put(shelf: Shelf, step: int, text: str = "") -> Path:
    """A checkpoint of four workers."""
    partial = shelf.partial(step)
    partial.mkdir(parents=True)
    names = [INDEX, *(name for worker in range(WORKERS) for name in state_files(worker, WORKERS))]
    files = {name: write_bytes(partial / name, f"{text} {name} {step}".encode()) for name in names}
    run = {"seed": 0, "schedule": "async", "policy": "latest"}
    manifest = Manifest(step, 0, WORKERS, "plan", run, {"torch": "2"}, files)
    write_bytes(partial / MANIFEST, manifest.to_json().encode())
    shelf.commit(step)
    return shelf.path(step)


def together(look: Callable[[int, Any], Any], workers: int) -> list[Any]:
    """What each worker gives, who all run at once and gather from each other."""
    barrier, given = threading.Barrier(workers, timeout=20), [None] * workers

    def gather(worker: int, own: Any) -> list[Any]:
        given[worker] = own
        barrier.wait()
        found = list(given)
        barrier.wait()
        return found

    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(lambda k: look(k, lambda own: gather(k, own)), range(workers)))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were compared with their digests, by all workers."""
    found: list[str] = []

    def noted(folder: Path, manifest: Manifest, names: list[str]) -> None:
        found.extend(f"{folder.name}/{name}" for name in names)
        check_files(folder, manifest, names)

    monkeypatch.setattr(membership, "check_files", noted)
    return found


@pytest.mark.parametrize("workers", [4, 3, 6])
def test_each_reads_its_part(workers: int, tmp_path: Path, read: list[str]) -> None:
    shelf = Shelf.of(tmp_path)
    put(shelf, 100)
    newest = put(shelf, 900)
    assert together(lambda k, gather: newest_of_all(shelf, k, workers, gather), workers) == [newest] * workers
    assert sorted(read) == sorted(f"step-900/{path.name}" for path in newest.iterdir() if path.name != MANIFEST)


@pytest.mark.parametrize("name", [INDEX, *state_files(2, WORKERS), MANIFEST])
def test_what_one_finds_damaged_all_leave_out(
    name: str, tmp_path: Path, read: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shelf = Shelf.of(tmp_path)
    before, newest = put(shelf, 100), put(shelf, 900)
    (newest / name).write_bytes((newest / name).read_bytes()[:-1] + b"?")
    assert together(lambda k, gather: newest_of_all(shelf, k, WORKERS, gather), WORKERS) == [before] * WORKERS
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert name in said or name == MANIFEST
    assert "step-900" in said
    (before / name).unlink()
    assert together(lambda k, gather: newest_of_all(shelf, k, WORKERS, gather), WORKERS) == [None] * WORKERS


def test_machines_that_see_different_folders(tmp_path: Path) -> None:
    """One lacks the newest, another has one of the same step from another run."""
    shelves = [Shelf.of(tmp_path / str(k)) for k in range(WORKERS)]
    for k, shelf in enumerate(shelves):
        for step in (100, 200, *([300] if k != 1 else [])):
            put(shelf, step, text="other" if (k, step) == (2, 200) else "")
    found = together(lambda k, gather: newest_of_all(shelves[k], k, WORKERS, gather), WORKERS)
    assert found == [shelf.path(100) for shelf in shelves]


def test_one_that_was_not_asked(tmp_path: Path) -> None:
    """It would begin anew; the comparison of options says so, and none waits for it."""
    shelf = Shelf.of(tmp_path)
    put(shelf, 100)
    found = together(lambda k, gather: newest_of_all(shelf if k else None, k, WORKERS, gather), WORKERS)
    assert found == [None] * WORKERS
