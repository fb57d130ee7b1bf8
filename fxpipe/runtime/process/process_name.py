"""What messages call a process of a run: by its worker, or by its rank where it has several."""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.errors import listed


def process_name(rank: int, placement: Sequence[int] = ()) -> str:
    """`worker 2`, or `rank 1 (workers 1 and 3)`.

    Args:
        placement: the rank of each worker; empty where worker k is on rank k, or as long as that is not known.
    """
    hosted = [worker for worker, own in enumerate(placement) if own == rank] or [rank]
    if len(hosted) == 1:
        return f"worker {hosted[0]}"
    return f"rank {rank} (workers {listed([str(worker) for worker in hosted])})"
