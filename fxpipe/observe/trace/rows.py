"""Where a trace shows a worker: in a process of its own, or in a row of its rank's."""

from __future__ import annotations

from collections.abc import Sequence


def row_of(worker: int, placement: Sequence[int] = ()) -> tuple[int, int]:
    """The process and the row in it that show a worker; `worker_of` is the way back."""
    return (placement[worker], worker) if placement else (worker, 0)


def worker_of(process: int, row: int) -> int:
    """The worker of a row: worker 0 is always in process 0, and no other's row is 0 where there is
    one."""
    return row or process
