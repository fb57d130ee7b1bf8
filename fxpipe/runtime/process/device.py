"""What a process computes on: its device, the backend that carries messages, the C allocator."""

from __future__ import annotations

import ctypes
import os
import socket
import sys

import torch
import torch.distributed as dist

from fxpipe.device_copies import is_here
from fxpipe.errors import RunError
from fxpipe.messages import warn
from fxpipe.planner.device import INFINITE, Device, at_peak
from fxpipe.runtime.wires.exchange import gathered
from fxpipe.runtime.wires.meeting import CONNECTIONS, widen_queues


def own_device(kind: str) -> torch.device:
    """This process's device; with several CUDA devices, the one of its local rank.

    Raises:
        RunError: there is none of the build's kind.
    """
    if kind not in ("cuda", "mps"):
        return torch.device(kind)
    late = CONNECTIONS not in os.environ and torch.cuda.is_initialized()
    widen_queues()
    if not is_here(kind):
        what = f"the build is for {kind.upper()}, but torch sees no {kind.upper()} device"
        raise RunError(what, hint="compile with --device cpu")
    if kind != "cuda":
        return torch.device(kind)
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if late and local_rank == 0:
        warn(
            f"this script has used CUDA before fxpipe could set {CONNECTIONS}=32, so a copy may wait for another "
            "message: set it before the script starts"
        )
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def common_backend(device: torch.device) -> str:
    """NCCL if every process on every machine has a CUDA device of its own, else gloo."""
    device_here = None
    if device.type == "cuda" and dist.is_nccl_available():
        host = os.environ.get("NCCL_HOSTID") or socket.gethostname()  # as NCCL itself identifies hosts
        device_here = host, str(torch.cuda.get_device_properties(device).uuid)
    answers = gathered(device_here)
    return "nccl" if None not in answers and len(set(answers)) == len(answers) else "gloo"


def devices_of(device: torch.device, peak: float | None, process: int) -> list[Device | None]:
    """The devices of a run, each once, with their peaks as `flops`; None where a peak is not known. Called by all.

    A machine's CPU counts once for each process, and so does MPS. `peak` is the FLOP/s of each device, if the user gave
    them.
    """
    name, which = device.type, f"process {process}"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, which = properties.name, f"{socket.gethostname()} {properties.uuid}"
    entry = Device(name, peak, INFINITE) if peak else at_peak(name, torch.backends.cuda.matmul.fp32_precision == "tf32")
    return list(dict(gathered((which, entry))).values())


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGEST = 32 << 20  # bytes: the largest mmap threshold that glibc accepts


def reuse_freed_memory() -> bool:
    """Keep freed memory for this process's lifetime; False if the C library is not glibc."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL("libc.so.6")
        return bool(libc.mallopt(_MMAP_THRESHOLD, _LARGEST)) and bool(libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1))
    except (OSError, AttributeError):
        return False
