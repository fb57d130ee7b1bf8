"""The process group of a run, there only while fxpipe itself talks.

The user's code asks `torch.distributed.is_initialized()`: an optimizer then adds a sum over all processes, a data set
gives each process its share. It means replicas of a model, and the workers of a pipeline are none. Nor may its calls
come between those of the pipeline. So it finds no process group, in a distributed run as at compile time and in a local
run, and does the same in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fxpipe.errors import PeerLost

_group: Any = None  # of the run in this process


def open_group(worker: int, timeout: timedelta) -> None:
    """Join the process group that the environment describes (RANK, WORLD_SIZE, MASTER_ADDR, …).

    Raises:
        PeerLost: another process is gone.
    """
    global _group
    with peers(worker):
        dist.init_process_group("gloo", timeout=timeout)
        _group = dist.group.WORLD


def close_group() -> None:
    """Leave it."""
    global _group
    dist.group.WORLD, _group = _group, None
    dist.destroy_process_group()


@contextmanager
def peers(worker: int) -> Iterator[None]:
    """Inside, the run's process group is torch's default group, where fxpipe has opened it.

    Raises:
        PeerLost: communication failed, which means that another process is gone.
    """
    outside = dist.group.WORLD
    if _group is not None:
        dist.group.WORLD = _group
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(
            f"worker {worker} lost a connection: {str(error).splitlines()[0]}",
            hint="another worker stopped first: its own error says why",
        ) from error
    finally:
        if _group is not None:
            dist.group.WORLD = outside
