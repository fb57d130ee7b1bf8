"""Where a trace shows a worker: in a process of its own, or in a row of its rank's."""

from __future__ import annotations

from collections.abc import Sequence

REPLICA = 1 << 16
"""How far the numbers of processes of one replica are from those of the next: more than any run has."""


def row_of(worker: int, placement: Sequence[int] = (), replica: int = 0) -> tuple[int, int]:
    """The process and the row in it that show a replica of a worker; `worker_of` is the way back of the first one's."""
    process, row = (placement[worker], worker) if placement else (worker, 0)
    return process + replica * REPLICA, row


def worker_of(process: int, row: int) -> int:
    """The worker of a row: worker 0 is always in process 0, and no other's row is 0 where there is
    one."""
    return row or process
