"""What is left of a run that an error ends: checkpoints that are being written become whole where they can, and the
newest that a run can go on from is named.

A worker cuts a checkpoint between two actions and writes it in a thread, which goes on while the worker waits for
others. So a checkpoint that all have cut becomes whole though the run stands still; one that a worker has not come to
never will. The disk tells one from the other: the files of the first still change.
"""

from __future__ import annotations

from pathlib import Path
from time import monotonic, sleep

from fxpipe.checkpoint.manifest import Manifest, read_manifest
from fxpipe.checkpoint.shelf import Shelf
from fxpipe.checkpoint.tensor_file import TensorFile
from fxpipe.errors import CheckpointError, FxpipeError, NotFiniteError
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.process.resume import NEWEST
from fxpipe.runtime.worker.not_finite import is_finite

PATIENCE = 10.0
"""Seconds without a change after which what is half written stays so: a disk may take long over the last of it."""

MOST = 600.0
"""Seconds that this takes at most."""

RUNNING_ON = 2.0
"""The same where a worker was lost: nobody is to outlive it for long."""

LOOK = 0.05
"""Seconds between two looks."""


def finish_writing(out: str | Path | None, most: float = MOST) -> bool:
    """Wait until the checkpoints of an output folder that are being written are whole, as long as that goes on.

    Returns:
        whether there were any.
    """
    shelf = None if out is None else Shelf.of(out)
    if shelf is None or not (before := shelf.unfinished()):
        return False
    begin = changed = monotonic()
    while before and (now := monotonic()) < min(begin + most, changed + PATIENCE):
        sleep(LOOK)
        found = shelf.unfinished()
        if found != before:
            before, changed = found, now
    return True


def last_checkpoint(options: PipelineOptions, out: str | Path | None, finite: bool = False) -> str | None:
    """The newest checkpoint that a run could go on from now, as a user would give it; None without any.

    Its manifest is read, and its files have the sizes that they should have.

    Args:
        finite: nothing in it is infinite or no number: it is from before what has spoilt a run.
    """
    shelf = None if out is None else Shelf.of(out)
    paths = [] if shelf is None else [shelf.path(step) for step in reversed(shelf.steps())]
    if options.resume not in (None, NEWEST):
        paths.append(Path(str(options.resume)))
    for path in paths:
        try:
            manifest = read_manifest(path)
            if _has_its_sizes(path, manifest) and not (finite and _spoilt(path, manifest)):
                return str(path)
        except (CheckpointError, OSError):
            continue
    return None


def name_checkpoint(error: FxpipeError, options: PipelineOptions, out: str | Path | None) -> None:
    """Add to the hint of an error that ends a run where it goes on."""
    path = last_checkpoint(options, out, isinstance(error, NotFiniteError))
    if path is not None:
        said = f"the last good checkpoint is {path}: go on from there with --resume"
        error.hint = said if error.hint is None else f"{error.hint}; {said}"


def _has_its_sizes(path: Path, manifest: Manifest) -> bool:
    return all((path / name).stat().st_size == entry.bytes for name, entry in manifest.files.items())


def _spoilt(path: Path, manifest: Manifest) -> bool:
    for name in sorted(manifest.files):
        if name.startswith(("model-", "optimizer-")) and name.endswith(".safetensors"):
            file = TensorFile(path / name)
            if not all(is_finite(file(tensor)) for tensor in file.names):
                return True
    return False
