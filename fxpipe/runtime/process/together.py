"""What all processes of a run do at once, at a point that all of them come to."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

from fxpipe.errors import FxpipeError, RunError
from fxpipe.runtime.wires.group import peers

T = TypeVar("T")


def gathered(own: T, rank: int, workers: int) -> list[T]:
    """What each process gives, by rank, on all of them."""
    found: list[Any] = [None] * workers
    with peers(rank):
        dist.all_gather_object(found, own)
    return found


def of_worker_0(value: T, rank: int) -> T:
    """What worker 0 gives, on all of them."""
    box: list[Any] = [value]
    with peers(rank):
        dist.broadcast_object_list(box, 0)
    found: T = box[0]
    return found


def agreed_error(error: FxpipeError | None, rank: int, workers: int) -> FxpipeError | None:
    """This worker's error, or else that of another, as all of them are to raise it."""
    met = gathered(error, rank, workers)
    if error is not None:
        return error
    for worker, other in enumerate(met):
        if other is not None:
            return RunError(f"on worker {worker}: {other.what}", where=other.where, hint=other.hint, page=other.page)
    return None


def agree_on(error: FxpipeError | None, rank: int, workers: int) -> None:
    """Raise this worker's error, or that of another, on all of them."""
    if (found := agreed_error(error, rank, workers)) is not None:
        raise found
