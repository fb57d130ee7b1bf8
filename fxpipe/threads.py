"""CPU threads: how many a worker has, and computing with that many: another number changes the last bits.

Imports no torch until it computes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


def cores() -> int:
    """The CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_for(count: int | None, local_workers: int) -> int:
    """CPU threads of one worker: the given number, else its share of the cores."""
    return count or max(1, cores() // local_workers)


@contextmanager
def threads(count: int | None, local_workers: int) -> Iterator[None]:
    """Compute with as many threads as one worker of a distributed run has."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads_for(count, local_workers))
    try:
        yield
    finally:
        torch.set_num_threads(before)
