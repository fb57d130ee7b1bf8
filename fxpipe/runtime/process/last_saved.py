"""What an error leaves of a run: checkpoints that are being written are finished where possible, and the error names
the newest one that a run can go on from, or says that nothing is saved.

A worker copies its state between two actions and writes it in a thread, which goes on while the worker waits for
others. So a checkpoint that all workers have copied becomes whole although the run stands still; one that a worker has
not reached never will. The disk shows which: the files of the first still change, and their folder is touched once a
second while a worker writes, since syncing and computing a digest change no file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

from fxpipe.checkpoint.manifest import Manifest, read_manifest
from fxpipe.checkpoint.shelf import Shelf
from fxpipe.errors import CheckpointError, FxpipeError, NotFiniteError, listed
from fxpipe.observe.out_folder import FINAL_WEIGHTS
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.process.resume import NEWEST

PATIENCE = 10.0
"""Seconds without a change after which a checkpoint counts as given up: a disk may take long for the end of it."""

MOST = 600.0
"""Seconds that waiting takes at most."""

RUNNING_ON = 2.0
"""The same after a worker was lost: no process should outlive it for long."""

LOOK = 0.05
"""Seconds between two looks."""


def finish_writing(out: str | Path | None, most: float = MOST, writes: Callable[[], bool] = lambda: False) -> bool:
    """Wait while checkpoints of an output folder are being written.

    Returns:
        Whether there were any.
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


def last_checkpoint(options: PipelineOptions, out: str | Path | None, spoilt: list[str] | None = None) -> str | None:
    """The newest checkpoint that a run could go on from now, as a user would give it; None without any.

    Its manifest can be read, and its files have the sizes in it.

    Args:
        spoilt: if given, the checkpoint's numbers must be finite; newer checkpoints with others are added to this.
    """
    shelf = None if out is None else Shelf.of(out)
    paths = [] if shelf is None else [shelf.path(step) for step in reversed(shelf.steps())]
    if options.resume not in (None, NEWEST):
        paths.append(Path(str(options.resume)))
    for path in paths:
        try:
            manifest = read_manifest(path)
            if any((path / name).stat().st_size != entry.bytes for name, entry in manifest.files.items()):
                continue
            if spoilt is None or not _spoilt(path, manifest):
                return str(path)
            spoilt.append(str(path))
        except (CheckpointError, OSError):
            continue
    return None


def name_checkpoint(error: FxpipeError, options: PipelineOptions, out: str | Path | None) -> None:
    """Add to the hint of an error that ends a run from which checkpoint it can go on, or that its steps are lost."""
    spoilt: list[str] | None = [] if isinstance(error, NotFiniteError) else None
    try:
        path = last_checkpoint(options, out, spoilt)
    except OSError:  # a failing disk is no reason to hide the error
        return
    said = None
    if path is not None:
        said = f"the last good checkpoint is {path}: go on from there with --resume"
        if spoilt:
            said += f", after deleting those with numbers that are not finite: {listed(spoilt)}"
    elif options.checkpoint_every is None and out is not None and not (Path(out) / FINAL_WEIGHTS).exists():
        said = "no weights of this run are saved: --checkpoint-every N saves them on the way"
    error.hint = "; ".join(text for text in (error.hint, said) if text) or None


def _spoilt(path: Path, manifest: Manifest) -> bool:
    from fxpipe.checkpoint.safetensors_file import TensorFile
    from fxpipe.runtime.worker.not_finite import is_finite

    for name in sorted(manifest.files):
        if name.startswith(("model-", "optimizer-")) and name.endswith(".safetensors"):
            file = TensorFile(path / name)
            if not all(is_finite(file(tensor)) for tensor in file.names):
                return True
    return False
