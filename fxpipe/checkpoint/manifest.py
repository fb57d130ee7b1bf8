"""The manifest of a checkpoint: its step, its run, and the digest of each of its files. Needs no torch."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxpipe.errors import CheckpointError, listed
from fxpipe.files import digest
from fxpipe.plan.signed import Signed, read_signed
from fxpipe.typed_json import convert, explained

MANIFEST = "checkpoint.json"
FORMAT = 2
FORMATS = (FORMAT, 1)
"""All that are read: runs of weeks are in them."""

OTHER = "use another checkpoint: --resume PATH"


@dataclass(frozen=True)
class FileEntry:
    """The SHA-256 of a file, and its size in bytes."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class Manifest(Signed, form=FORMAT):
    """The manifest of a checkpoint.

    Attributes:
        step: how many updates have been made.
        start: the first minibatch of the segment that its minibatches in flight belong to.
        workers: how many parts it has.
        plan: the digest of the build's plan.
        run: the options of the run that its numbers depend on, by their names.
        versions: of fxpipe, torch and Python.
        files: all other files, by name.
    """

    step: int
    start: int
    workers: int
    plan: str
    run: dict[str, Any]
    versions: dict[str, str]
    files: dict[str, FileEntry]

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.step or self.workers < 1:
            raise CheckpointError(f"no run has step {self.step}, start {self.start} and {self.workers} workers")
        missing = [name for name in ("schedule", "policy") if not isinstance(self.run.get(name), str)]
        if missing:
            raise CheckpointError(f"run has no {' and no '.join(missing)}")
        if not isinstance(self.run.get("values", {}), dict):
            raise CheckpointError("run has values that no option can have")
        arguments = self.run.get("arguments")
        values_of_options = {
            "settings": ("=", self.run.get("settings", ())),
            "arguments": ("", () if arguments is None else arguments),
        }
        for name, (within, texts) in values_of_options.items():
            if not isinstance(texts, (list, tuple)) or not all(isinstance(t, str) and within in t for t in texts):
                raise CheckpointError(f"run has malformed {name}")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint; no other file of it is read.

    Raises:
        CheckpointError: it is missing, was changed, or has another version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        what = (
            f"{folder} is not a whole checkpoint: it has no {MANIFEST}" if folder.is_dir() else f"there is no {folder}"
        )
        raise CheckpointError(what, hint=OTHER)
    with explained(path, error=CheckpointError, hint=OTHER):
        wrote = "resume with the fxpipe that wrote it"
        body = read_signed(path, "the checkpoint", FORMATS, error=CheckpointError, hint=OTHER, other=wrote)
        return convert(body, Manifest)


def check_replaceable(folder: Path) -> None:
    """Refuse a place of something else, which a new checkpoint would delete.

    Raises:
        CheckpointError: it is a file, or a folder with other files than an earlier checkpoint's.
        OSError: the folder cannot be read.
    """
    there = {path.name for path in folder.iterdir()} if folder.is_dir() else {folder.name} if folder.exists() else set()
    of_checkpoint = {MANIFEST, *read_manifest(folder).files} if MANIFEST in there else set()
    if foreign := sorted(there - of_checkpoint):
        raise CheckpointError(
            f"{folder} exists and {'holds' if folder.is_dir() else 'is'} {listed(foreign, 5)}, which a checkpoint "
            "would delete",
            hint="choose another folder",
        )


def check_files(folder: Path, manifest: Manifest, names: list[str] | None = None) -> None:
    """Compare files of a checkpoint with its manifest; all of them if `names` is None.

    Raises:
        CheckpointError: files are missing or were changed (lists all).
    """
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # hashlib releases the GIL
        names = sorted(manifest.files) if names is None else names
        problems = threads.map(lambda name: _problem(folder / name, manifest.files.get(name)), names)
    wrong = [f"{name} {problem}" for name, problem in zip(names, problems, strict=True) if problem is not None]
    if wrong:
        raise CheckpointError("the checkpoint is damaged: " + "; ".join(wrong), where=str(folder), hint=OTHER)


def _problem(path: Path, entry: FileEntry | None) -> str | None:
    """What is wrong with a file."""
    if entry is None:
        return f"is not in {MANIFEST}"
    try:
        if not path.is_file():
            return "is missing"
        if path.stat().st_size != entry.bytes:
            return f"has {path.stat().st_size} bytes, not {entry.bytes}"
        whole = digest(path) == entry.sha256
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None if whole else "was changed after it was written"
