"""What messages call a process of a run: by its worker, or by its rank where it has several."""

from __future__ import annotations

from fxpipe.errors import listed
from fxpipe.plan.spec import MESH, Mesh


def process_name(process: int, mesh: Mesh = MESH) -> str:
    """`worker 2`, or `rank 1 (workers 1 and 3)`; of replicas, `worker 2, replica 1`.

    Args:
        mesh: the plan's; one worker a process as long as that is not known.
    """
    rank, replica = mesh.seat(process)
    hosted = [worker for worker, own in enumerate(mesh.placement) if own == rank] or [rank]
    which = f", replica {replica}" if len(mesh.of_rank(rank)) > 1 else ""
    if len(hosted) == 1:
        return f"worker {hosted[0]}{which}"
    return f"rank {rank}{which} (workers {listed([str(worker) for worker in hosted])})"
