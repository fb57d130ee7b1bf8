"""The folder of a run's checkpoints: one folder a step, whole or not there, the oldest taken away. Needs no torch."""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fxpipe.checkpoint.manifest import MANIFEST, Manifest, check_files, read_manifest
from fxpipe.errors import CheckpointError
from fxpipe.files import sync_folder

CHECKPOINTS = "checkpoints"
_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Shelf:
    """The checkpoints of a run in `OUT/checkpoints/`: `step-500/` and so on.

    A checkpoint is written into `.step-500.partial/`, its manifest last, and gets its name by one rename when the disk
    has all of it. So a folder that has its name is whole, unless somebody has changed it since.
    """

    folder: Path

    @staticmethod
    def of(out: str | Path) -> Shelf:
        """That of an output folder."""
        return Shelf(Path(out) / CHECKPOINTS)

    def path(self, step: int) -> Path:
        """The folder of the checkpoint at a step."""
        return self.folder / f"step-{step}"

    def partial(self, step: int) -> Path:
        """Where it is written."""
        return self.folder / f".step-{step}.partial"

    def steps(self) -> list[int]:
        """Of all checkpoints that have a manifest, in rising order."""
        if not self.folder.is_dir():
            return []
        found = (_STEP.fullmatch(path.name) for path in self.folder.iterdir() if (path / MANIFEST).is_file())
        return sorted(int(match[1]) for match in found if match)

    def newest(self) -> tuple[Path, Manifest, list[CheckpointError]]:
        """The newest checkpoint whose files are all as they were written, and what is wrong with those after it.

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
            hint="a run writes them with --checkpoint-every; --resume PATH takes one from elsewhere",
        )

    def unfinished(self) -> frozenset[tuple[str, int, int]]:
        """What there is of checkpoints that are being written: files, their sizes and the times of the last writes."""
        found = set()
        with suppress(OSError):
            for path in sorted(self.folder.glob(".step-*.partial")):
                with suppress(OSError):  # a folder or a file that gets its name, or goes, at this moment
                    files = [path, *path.iterdir()]
                    found |= {(str(file), (at := file.stat()).st_size, at.st_mtime_ns) for file in files}
        return frozenset(found)

    def commit(self, step: int) -> None:
        """Give the partial folder of a step its name; an older checkpoint of the same step is replaced.

        Raises:
            OSError: the disk does not take it; all has the names it had.
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
        """Return when the disk has the folder's own name, and those of the folders that it is in.

        Raises:
            OSError: the disk does not take them.
        """
        for folder in self.folder.resolve().parents:
            with suppress(PermissionError):  # one of another user's, that this run has not made
                sync_folder(folder)

    def prune(self, keep: int, newest: int) -> None:
        """Take all but the newest checkpoints away, up to the one that was just written.

        Those of later steps are damaged, or the run would have gone on from them: they do not count as kept.
        """
        for step in [step for step in self.steps() if step <= newest][:-keep]:
            leaving = self.folder / f".step-{step}.old"
            try:
                self.path(step).rename(leaving)
            except OSError:
                continue
            shutil.rmtree(leaving, ignore_errors=True)

    def clear(self) -> None:
        """Take away what a run that was killed has left half written."""
        for path in [*self.folder.glob(".step-*.partial"), *self.folder.glob(".step-*.old")]:
            shutil.rmtree(path, ignore_errors=True)
