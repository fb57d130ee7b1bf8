"""The process group of a run, which is torch's default group only while fxpipe communicates.

If `torch.distributed.is_initialized()`, user code may change what it does: an optimizer sums over all processes, a data
set gives each process its share. It assumes that the processes are replicas of a model, but here they are workers of a
pipeline; and its calls must not mix with the pipeline's. So user code sees no process group in a distributed run, as at
compile time and in a local run, and does the same in all of them. A group that the user's script has made before is
hidden during the run, and restored afterwards.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from fxpipe.errors import FxpipeError, PeerLost, RunError, near
from fxpipe.messages import warn
from fxpipe.runtime.wires.board import FolderBoard
from fxpipe.runtime.wires.meeting import BEGUN, close_doors, greet, listening, place, read_meeting
from fxpipe.torch_private import FileStore, PrefixStore

_group: Any = None  # of the run in this process
_timeout: timedelta | None = None  # of the run
_parts: list[Any] = []  # groups of some processes of the run
_connected: dict[tuple[int, ...], Any] | None = None  # on one machine, all of them over gloo, by processes
_outside: Any = None  # the user's own, which is hidden meanwhile
_name = "this process"  # what messages call it
_stores: dict[tuple[str | None, ...], Any] = {}  # where this process has met others, by the environment variables then
_meetings: Counter[tuple[str | None, ...]] = Counter()

INTERFACE = "GLOO_SOCKET_IFNAME"
ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")


def place_of_process() -> tuple[int, int] | None:
    """The rank and number of processes, by the user's own process group or by environment variables; else None. Errors
    as `has_place`."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return place()
    return None


def check_no_run_here() -> None:
    """Refuse another run, or pipeline, while this process is one of a run."""
    if _group is not None:
        raise RunError(
            "this process is one of a run that has not ended, and cannot begin another one or a pipeline",
            hint="do it after the run, or in a process of its own; close() a pipeline of fxpipe.join before",
        )


def open_group(
    rank: int, ranks: int, timeout: timedelta, board: FolderBoard | None = None, patience: float = 0.0
) -> None:
    """Join the process group of a run, among the processes of `place_of_process`.

    A run on this machine has a board: the workers meet in its folder, not at a port, and no other process can join (see
    `fxpipe.runtime.wires.meeting`). After so many seconds of patience, and again at growing intervals, one process of
    each machine says that others are missing; 0 for never.

    Raises:
        PeerLost: another process is gone.
        RunError: another process has connected, or GLOO_SOCKET_IFNAME names a network interface that does not exist;
            or as `check_no_run_here`.
    """
    global _group, _outside, _name, _timeout, _connected
    check_no_run_here()
    _check_interface()
    _outside, _name, _timeout, _connected = dist.group.WORLD, f"worker {rank}", timeout, None
    with peers():
        if board is not None:
            store = FileStore(str(board.path / "store"), ranks)
            store.set_timeout(timeout)
            store.set(f"here/{rank}", "")
            store.wait([f"here/{other}" for other in range(ranks)])  # so that sockets listen only for a moment
            secret, groups = read_meeting(board)
            before = listening()
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
            greet(rank, range(ranks), secret)
            connected = {tuple(members): group_among(members, "gloo") for members in groups}
            for members, group in connected.items():
                if group is not None:
                    greet(rank, members, secret, group)
            close_doors(listening() - before)
            _connected = connected
        elif _outside is not None:
            dist.group.WORLD = dist.new_group(backend="gloo", timeout=timeout)
            # It inherits a device that the user's own is bound to, and torch would split NCCL's groups off it.
            dist.group.WORLD.bound_device_id = None
        else:
            with _waiting(rank, ranks, patience):
                store = _fresh_store(timeout)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
        _group = dist.group.WORLD
    dist.group.WORLD = None


@contextmanager
def _waiting(rank: int, ranks: int, patience: float) -> Iterator[None]:
    """Says, while this lasts, that not all processes have joined."""
    met = threading.Event()

    def say_late() -> None:
        begin, interval = time.monotonic(), patience
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        while not met.wait(interval):
            interval *= 2
            warn(
                f"the process of rank {rank} has waited {time.monotonic() - begin:.0f} s for all {ranks} to meet at "
                f"{where}: check that each has started and none has ended"
            )

    if not patience or os.environ.get("LOCAL_RANK", "0") != "0":
        yield
        return
    threading.Thread(target=say_late, name="fxpipe waiting", daemon=True).start()
    try:
        yield
    finally:
        met.set()


def _check_interface() -> None:
    """Refuse GLOO_SOCKET_IFNAME if this host has no such interface: gloo's own error does not list those it has."""
    there = [name for _, name in socket.if_nameindex()]
    for name in os.environ.get(INTERFACE, "").split(","):
        if name and name not in there:
            raise RunError(
                f"{INTERFACE}={name}, and {socket.gethostname()} has no network interface of this name"
                f"{near(name, there)}",
                hint=f"it has {', '.join(there)}; set {INTERFACE} on each host to the one that reaches the others",
            )


def _fresh_store(timeout: timedelta) -> Any:
    """The store at which the processes meet, without the keys of an earlier run in the same processes.

    A process may do several runs, one after another. It keeps the first store: if worker 0 holds it, as without the
    agent of torchrun, a second store could not take its port.
    """
    key = tuple(os.environ.get(name) for name in ENVIRONMENT)
    if key not in _stores:
        _stores[key] = next(rendezvous("env://", timeout=timeout))[0]
    _meetings[key] += 1
    return PrefixStore(f"fxpipe/{os.environ.get(BEGUN, 0)}/{_meetings[key]}", _stores[key])


def name_process(name: str) -> None:
    """Set the name of this process in messages while the group is open, once it is known which workers it has."""
    global _name
    _name = name


def group_among(processes: Sequence[int], backend: str) -> Any:
    """A group of some processes of the run, which ends with the run; called by all processes, inside `peers`.

    On one machine, a group over gloo is one of those that `open_group` has connected: no process listens later.

    It has the run's timeout, not torch's default: NCCL's default of 10 minutes may be shorter than an evaluation, and
    ends the process. None if this process is not in the group.
    """
    if _connected is not None and backend == "gloo":
        return _connected[tuple(processes)]
    group = dist.new_group(list(processes), backend=backend, timeout=_timeout)
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        return None
    _parts.append(group)
    return group


def alone() -> bool:
    """Whether this process is the whole run, without a group."""
    return _group is None


def close_group() -> None:
    """Leave it."""
    global _group, _outside
    if _outside is None:
        dist.group.WORLD = _group
        dist.destroy_process_group()  # and all others
    else:
        dist.group.WORLD = _outside
        for group in (*_parts, _group):
            dist.destroy_process_group(group)
    _group = _outside = None
    _parts.clear()


def forget_group() -> None:
    """After an error that other processes may not have: leave without waiting, and restore the user's own group."""
    global _group, _outside
    dist.group.WORLD, _group, _outside = _outside, None, None
    _parts.clear()


def leave_after(error: BaseException) -> None:
    """After an error in a call of all workers: all have the same error, or one is lost."""
    if isinstance(error, FxpipeError) and not isinstance(error, PeerLost):
        close_group()
    else:
        forget_group()


@contextmanager
def peers() -> Iterator[None]:
    """Inside, the run's process group, if one is open, is torch's default group.

    Raises:
        PeerLost: communication failed, which means that another process is gone. Other errors of torch, such as out of
            memory, are raised as they are.
    """
    outside = dist.group.WORLD
    if _group is not None:
        dist.group.WORLD = _group
    try:
        yield
    except RuntimeError as error:
        if not means_lost(error):
            raise
        raise peer_lost(str(error).splitlines()[0]) from error
    finally:
        if _group is not None:
            dist.group.WORLD = outside


def means_lost(error: RuntimeError) -> bool:
    """Whether an error of torch means that another process is gone; others, such as out of memory, do not."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def peer_lost(why: str) -> PeerLost:
    """The error for a process that has lost its connection to another one."""
    return PeerLost(
        f"{_name} lost a connection: {why}",
        hint="another worker stopped first: its own error says why",
    )
