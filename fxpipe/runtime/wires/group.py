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
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from fxpipe.errors import PeerLost
from fxpipe.runtime.wires.doors import SECRET, close_doors, greet, listening

_group: Any = None  # of the run in this process


def open_group(worker: int, workers: int, timeout: timedelta, exchange: str | None = None) -> None:
    """Join the process group that the environment describes (RANK, WORLD_SIZE, MASTER_ADDR, …).

    Args:
        exchange: of a run on this machine, the folder that only its owner can read: the workers meet there, over no
            port, and nobody else gets in (see `fxpipe.runtime.wires.doors`).

    Raises:
        PeerLost: another process is gone.
        RunError: somebody else has connected.
    """
    global _group
    with peers(worker):
        if exchange is None:
            dist.init_process_group("gloo", timeout=timeout)
        else:
            folder = Path(exchange)
            store = FileStore(str(folder / "store"), workers)
            store.set_timeout(timeout)
            store.set(f"here/{worker}", "")
            store.wait([f"here/{other}" for other in range(workers)])  # then the doors are open only for a moment
            before = listening()
            dist.init_process_group("gloo", store=store, rank=worker, world_size=workers, timeout=timeout)
            greet(worker, workers, (folder / SECRET).read_bytes())
            close_doors(listening() - before)
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
