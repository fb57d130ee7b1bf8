"""What messages cost between the processes that torchrun started, on one machine or on several."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import permutations, product

import torch

from fxpipe.errors import RunError
from fxpipe.measure.links import LinkReport, Transport, measured
from fxpipe.runtime.process.allocator import reuse_freed_memory
from fxpipe.runtime.process.device import common_backend, own_device
from fxpipe.runtime.wires.distributed import Wires
from fxpipe.runtime.wires.group import close_group, leave_after, open_group, peers, place_of_process

TOTAL = 16 << 20
"""Bytes that each pair sends of each size, once: 10 seconds at 100 Mbit."""

ALL = 8
"""So many processes, and no more, measure all pairs; more of them measure neighbours, which is what pipelines are."""


def measure_group(say: Callable[[str], None] = lambda text: None, total: int = TOTAL) -> LinkReport:
    """Latency, bandwidth and processor time between the processes of the group that the environment describes.

    Every process calls it, and gets the same.

    Args:
        say: is called with how many pairs are measured.

    Raises:
        RunError: there is one process alone, or none was started by torchrun.
        PeerLost: another process is gone.
    """
    place = place_of_process()
    if place is None or place[1] < 2:
        raise RunError("links are between two processes at least", hint="torchrun --nproc-per-node 2 …, or --nnodes 2")
    rank, workers = place
    reuse_freed_memory()
    torch.set_num_threads(1)
    device = own_device("cuda" if torch.cuda.is_available() else "cpu")
    open_group(rank, workers, timedelta(minutes=10))
    try:
        backend = common_backend(device, rank, workers)
        pairs = pairs_of_group(workers)
        wires = Wires(rank, backend, [("link", *pair) for pair in permutations(range(workers), 2)], device)
        rows = []
        with peers(rank):
            for row in measured(wires, workers, pairs, total, rounds=1):
                rows.append(row)
                say(f"measured {len(rows)} of {len(pairs)} pairs")
    except BaseException as error:
        leave_after(error)
        raise
    close_group()
    transport: Transport = "nccl" if backend == "nccl" else "gloo" if device.type == "cpu" else "gloo-cuda"
    return LinkReport(transport, workers, tuple(rows), alike=False)


def pairs_of_group(workers: int) -> list[tuple[int, int]]:
    """All (source, target) of a few processes, the neighbours of many."""
    near = workers if workers <= ALL else 1
    return [(i, j) for i, j in product(range(workers), repeat=2) if 0 < abs(i - j) <= near]
