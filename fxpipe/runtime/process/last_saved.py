"""What is left of a run that an error ends: checkpoints that are being written become whole where they can, and the
newest that a run can go on from is named.

A worker cuts a checkpoint between two actions and writes it in a thread, which goes on while the worker waits for
others. So a checkpoint that all have cut becomes whole though the run stands still; one that a worker has not come to
never will. The disk tells one from the other: the files of the first still change, and their folder is touched once a
second while a worker writes, since a disk that syncs, and a digest that is computed, change nothing that can be seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep

from fxpipe.checkpoint.manifest import Manifest, read_manifest
from fxpipe.checkpoint.shelf import Shelf
from fxpipe.errors import CheckpointError, FxpipeError, NotFiniteError, listed
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.process.resume import NEWEST

PATIENCE = 10.0
"""Seconds without a change after which what is half written stays so: a disk may take long over the last of it."""

MOST = 600.0
"""Seconds that this takes at most."""

RUNNING_ON = 2.0
"""The same where a worker was lost: nobody is to outlive it for long."""

TOUCH = 1.0
"""Seconds between two touches of a folder in which a worker writes."""

LOOK = 0.05
"""Seconds between two looks."""


def finish_writing(out: str | Path | None, most: float = MOST, writes: Callable[[], bool] = lambda: False) -> bool:
    """Wait until the checkpoints of an output folder that are being written are whole, as long as that goes on.

    Args:
        writes: whether this process still has something to write.

    Returns:
        whether there were any.
    """
    shelf = None if out is None else Shelf.of(out)
    if shelf is None or not ((before := shelf.unfinished()) or writes()):
        return False
    begin = changed = now = monotonic()
    while (before or writes()) and now < min(begin + most, changed + PATIENCE):
        sleep(LOOK)
        found, now = shelf.unfinished(), monotonic()
        if found != before or writes():
            before, changed = found, now
    return True


@contextmanager
def shown_alive(folder: Path) -> Iterator[None]:
    """Inside, a folder is touched once a second: see above."""
    done = Event()

    def touch() -> None:
        while not done.wait(TOUCH):
            with suppress(OSError):
                os.utime(folder)

    thread = Thread(target=touch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def last_checkpoint(options: PipelineOptions, out: str | Path | None, spoilt: list[str] | None = None) -> str | None:
    """The newest checkpoint that a run could go on from now, as a user would give it; None without any.

    Its manifest is read, and its files have the sizes that they should have.

    Args:
        spoilt: nothing in it may be infinite or no number; gets the newer ones in which something is.
    """
    shelf = None if out is None else Shelf.of(out)
    paths = [] if shelf is None else [shelf.path(step) for step in reversed(shelf.steps())]
    if options.resume not in (None, NEWEST):
        paths.append(Path(str(options.resume)))
    for path in paths:
        try:
            manifest = read_manifest(path)
            if not _has_its_sizes(path, manifest):
                continue
            if spoilt is None or not _spoilt(path, manifest):
                return str(path)
            spoilt.append(str(path))
        except (CheckpointError, OSError):
            continue
    return None


def name_checkpoint(error: FxpipeError, options: PipelineOptions, out: str | Path | None) -> None:
    """Add to the hint of an error that ends a run where it goes on."""
    spoilt: list[str] | None = [] if isinstance(error, NotFiniteError) else None
    try:
        path = last_checkpoint(options, out, spoilt)
    except OSError:  # of a disk that fails: no reason to hide the error
        return
    if path is not None:
        said = f"the last good checkpoint is {path}: go on from there with --resume"
        if spoilt:
            said += f", after deleting what holds numbers that are not finite: {listed(spoilt)}"
        error.hint = said if error.hint is None else f"{error.hint}; {said}"


def _has_its_sizes(path: Path, manifest: Manifest) -> bool:
    return all((path / name).stat().st_size == entry.bytes for name, entry in manifest.files.items())


def _spoilt(path: Path, manifest: Manifest) -> bool:
    from fxpipe.checkpoint.tensor_file import TensorFile
    from fxpipe.runtime.worker.not_finite import is_finite

    for name in sorted(manifest.files):
        if name.startswith(("model-", "optimizer-")) and name.endswith(".safetensors"):
            file = TensorFile(path / name)
            if not all(is_finite(file(tensor)) for tensor in file.names):
                return True
    return False
