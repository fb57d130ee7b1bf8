"""The newest checkpoint that is whole, found by all workers of a run together: each looks at its own part of it.

worker 0:  step-900: files 1 of 4 are whole   │             │ step-600: whole │
worker 3:  step-900: optimizer-00004 is short │ all hear it │ step-600: whole │ all go on from step-600
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxpipe.checkpoint.manifest import check_files, read_manifest
from fxpipe.checkpoint.shard import worker_of
from fxpipe.checkpoint.shelf import Shelf
from fxpipe.errors import CheckpointError
from fxpipe.messages import warn

Gather = Callable[[Any], list[Any]]
"""What each worker gives, by worker; all of them call it."""


@dataclass(frozen=True)
class _Found:
    """What a worker says of a checkpoint: what is wrong with its part, else the digest of the manifest."""

    problem: str | None
    manifest: str = ""


def newest_of_all(shelf: Shelf | None, worker: int, workers: int, gather: Gather) -> Path | None:
    """The folder of the newest checkpoint of which every worker finds its part whole; called by all of them.

    Of the checkpoint's files, those of worker k are worker k's part; where fewer workers go on, they share them.

    Args:
        shelf: where this worker would look; None if it was not asked to look for the newest.

    Returns:
        None if some worker was not asked, or no checkpoint is whole: who looks by itself, will say what is wrong.
    """
    seen = gather(None if shelf is None else shelf.steps())
    if any(steps is None for steps in seen):
        return None
    assert shelf is not None
    for step in sorted({step for steps in seen for step in steps}, reverse=True):
        path = shelf.path(step)
        found: list[_Found] = gather(_looked_at(path, worker, workers))
        others = [k for k, other in enumerate(found) if other.manifest != found[0].manifest]
        problems = [f"worker {k}: {other.problem}" for k, other in enumerate(found) if other.problem is not None]
        if not problems and others:
            problems = [f"worker {others[0]} has another one than worker 0"]
        if not problems:
            return path
        if worker == 0:
            warn(f"{path}: {'; '.join(problems)}; it is left out")
    return None


def _looked_at(path: Path, worker: int, workers: int) -> _Found:
    try:
        manifest = read_manifest(path)
        check_files(path, manifest, [name for name in sorted(manifest.files) if worker_of(name) % workers == worker])
    except CheckpointError as error:
        return _Found(error.what)
    return _Found(None, manifest.digest)
