"""The folder of a run's checkpoints: a folder for each step, whole or absent; removes the oldest. Needs no torch."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

from fxpipe.checkpoint.manifest import MANIFEST, Manifest, check_files, read_manifest
from fxpipe.errors import CheckpointError
from fxpipe.files import sync_folder

CHECKPOINTS = "checkpoints"
_STEP = re.compile(r"step-(\d+)")
TOUCH = 1.0
"""Seconds between two touches of a folder in which a worker writes."""


@dataclass(frozen=True)
class Shelf:
    """The checkpoints of a run in `OUT/checkpoints/`: `step-500/` and so on.

    A checkpoint is written into `.step-500.partial/`, its manifest last, and gets its name by one rename when all of it
    is on the disk. So a folder with this name is whole, unless it was changed later.
    """

    folder: Path

    @staticmethod
    def of(out: str | Path) -> Shelf:
        """The shelf of an output folder."""
        return Shelf(Path(out) / CHECKPOINTS)

    def path(self, step: int) -> Path:
        """The folder of the checkpoint at a step."""
        return self.folder / f"step-{step}"

    def partial(self, step: int) -> Path:
        """The folder into which it is written."""
        return self.folder / f".step-{step}.partial"

    def steps(self) -> list[int]:
        """The steps of all checkpoints that have a manifest, in rising order."""
        if not self.folder.is_dir():
            return []
        matches = (_STEP.fullmatch(path.name) for path in self.folder.iterdir() if (path / MANIFEST).is_file())
        return sorted(int(match[1]) for match in matches if match)

    def newest(self) -> tuple[Path, Manifest, list[CheckpointError]]:
        """The newest undamaged checkpoint, and the errors of those after it.

        Raises:
            CheckpointError: there is none.
        """
        damaged: list[CheckpointError] = []
        for step in reversed(self.steps()):
            try:
                manifest = read_manifest(self.path(step))
                check_files(self.path(step), manifest)
            except CheckpointError as error:
                damaged.append(error)
                continue
            return self.path(step), manifest, damaged
        if damaged:
            raise damaged[0]
        raise CheckpointError(
            f"there is no checkpoint in {self.folder}",
            hint="runs with --checkpoint-every write them; --resume PATH uses one from another folder",
        )

    def unfinished(self) -> frozenset[tuple[str, int, int]]:
        """The files of checkpoints that are being written, with sizes and times of the last writes."""
        states = set()
        with suppress(OSError):
            for path in sorted(self.folder.glob(".step-*.partial")):
                with suppress(OSError):  # a file or folder that is renamed or removed at this moment
                    files = [path, *path.iterdir()]
                    states |= {(str(file), (at := file.stat()).st_size, at.st_mtime_ns) for file in files}
        return frozenset(states)

    def commit(self, step: int) -> None:
        """Give the partial folder of a step its final name, replacing an older checkpoint of the same step.

        Raises:
            OSError: it cannot be renamed; all folders keep their names.
        """
        old, path, partial = self.folder / f".step-{step}.old", self.path(step), self.partial(step)
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        try:
            partial.rename(path)
            sync_folder(self.folder)
        except OSError:
            with suppress(OSError):
                if not partial.exists():
                    path.rename(partial)
                if old.exists():
                    old.rename(path)
            raise
        shutil.rmtree(old, ignore_errors=True)

    def anchor(self) -> None:
        """Return when the names of this folder and its parents are on the disk.

        Raises:
            OSError: they cannot be written.
        """
        for folder in self.folder.resolve().parents:
            with suppress(PermissionError):  # a parent of another user, which this run has not made
                sync_folder(folder)

    def prune(self, keep: int, newest: int) -> None:
        """Remove all checkpoints but the `keep` newest, up to the one that was just written.

        Checkpoints of later steps are damaged, or the run would have resumed from them: they do not count.
        """
        for step in [step for step in self.steps() if step <= newest][:-keep]:
            leaving = self.folder / f".step-{step}.old"
            try:
                self.path(step).rename(leaving)
            except OSError:
                continue
            shutil.rmtree(leaving, ignore_errors=True)

    def clear(self) -> None:
        """Remove partial checkpoints of a run that was killed."""
        for path in [*self.folder.glob(".step-*.partial"), *self.folder.glob(".step-*.old")]:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def shown_alive(folder: Path) -> Iterator[Path]:
    """Inside, there is this folder, and it is touched once a second: syncing and computing a digest change no file."""
    folder.mkdir(parents=True, exist_ok=True)
    done = Event()

    def touch() -> None:
        while not done.wait(TOUCH):
            with suppress(OSError):
                os.utime(folder)

    thread = Thread(target=touch, daemon=True)
    thread.start()
    try:
        yield folder
    finally:
        done.set()
        thread.join()
