"""The device of one process of a distributed run, and what carries messages between the devices."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist

from fxpipe.errors import RunError
from fxpipe.messages import warn
from fxpipe.runtime.process.together import gathered


def own_device(kind: str) -> torch.device:
    """This process's device; of several CUDA devices that of its local rank.

    Raises:
        RunError: there is none of the build's kind.
    """
    if kind != "cuda":
        return torch.device(kind)
    if not torch.cuda.is_available():
        raise RunError("the build is for CUDA, but torch sees no CUDA device", hint="compile with --device cpu")
    # A stream that shares a queue with another one's NCCL kernel waits for it: torch's own streams are 32.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def common_backend(device: torch.device, rank: int, ranks: int) -> str:
    """NCCL if every process on every machine has a CUDA device of its own, else gloo."""
    own = None
    if device.type == "cuda" and dist.is_nccl_available():
        host = os.environ.get("NCCL_HOSTID") or socket.gethostname()  # as NCCL itself tells hosts apart
        own = host, str(torch.cuda.get_device_properties(device).uuid)
    answers = gathered(own, rank, ranks)
    if None not in answers and len(set(answers)) == ranks:
        return "nccl"
    if own is not None and rank == 0:
        warn("not every process has a CUDA device of its own: messages go through the CPU's memory, over gloo")
    return "gloo"
