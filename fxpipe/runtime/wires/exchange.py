"""Calls that all processes of a run make together: an object from each, one to all, an error of one for all.

They go over the connections of the group and not over the board: a connection breaks when its other end is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from fxpipe.errors import FxpipeError, PeerLost, RunError
from fxpipe.runtime.wires.group import alone, peers

T = TypeVar("T")


def gathered(own: T) -> list[T]:
    """Gather an object from each process, by rank; the same list on all of them."""
    if alone():
        return [own]
    with peers():
        objects: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(objects, own)
    return objects


def of_worker_0(value: T) -> T:
    """Broadcast worker 0's value to all processes."""
    if alone():
        return value
    box: list[Any] = [value]
    with peers():
        dist.broadcast_object_list(box, 0)
    of_0: T = box[0]
    return of_0


def barrier() -> None:
    """Wait until all processes have called this."""
    if not alone():
        with peers():
            dist.barrier()


@contextmanager
def agreeing() -> Iterator[None]:
    """After the block, all raise an error that one of them has raised inside: their own, or else another worker's."""
    error: FxpipeError | None = None
    try:
        yield
    except PeerLost:
        raise
    except FxpipeError as met:
        error = met
    errors = gathered(error)
    if error is not None:
        raise error
    for worker, other in enumerate(errors):
        if other is not None:
            raise RunError(f"on worker {worker}: {other.what}", where=other.where, hint=other.hint, page=other.page)
