"""How the processes of a run find each other: by environment variables that torchrun or a user sets; or on one machine
on the board of their launcher, where only they can connect.

To connect the workers, gloo listens in each on a port of the loopback interface. It accepts any process that sends a
number that is easy to guess first, and torch unpickles what arrives over a connection. So the workers meet before they
begin to listen, connect all groups that the run will need, prove to each other that they know the run's secret before
anything is unpickled, and stop listening. No other process can use an open connection.

The launcher makes the secret and says which groups there are; it does not import torch.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import select
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpipe.errors import RunError
from fxpipe.runtime.wires.board import Board

if TYPE_CHECKING:
    import torch

MEETING = "meeting"
"""The key of the secret and the groups, on the board of the run, which only its owner can read."""

PROOF_WITHIN = timedelta(minutes=1)
"""How long a connected process has to prove that it knows the secret."""


def prepare_meeting(board: Board, groups: Sequence[Sequence[int]] = ()) -> None:
    """Write a new secret, and which processes of the run form groups, on its board.

    Raises:
        RunError: there is no loopback interface over which they could meet.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
        try:
            probe.connect(("127.0.0.1", 9))
        except OSError as error:
            raise RunError(
                f"processes of one machine meet over its loopback interface, which is down: {error.strerror}",
                hint="ip link set lo up; or train in one process: --local",
            ) from error
    board.set(MEETING, json.dumps({"secret": os.urandom(32).hex(), "groups": groups}), patient=False)


def read_meeting(board: Board) -> tuple[bytes, list[list[int]]]:
    """The secret, and the groups."""
    meeting = json.loads(board.wait([MEETING], 0)[0])
    return bytes.fromhex(meeting["secret"]), meeting["groups"]


def greet(worker: int, members: Sequence[int], secret: bytes, group: Any = None) -> None:
    """Check that the other end of each connection of a group knows the secret.

    Raises:
        RunError: one does not know it.
        RuntimeError: a connection is lost, or its other end says nothing.
    """
    import torch
    import torch.distributed as dist

    others = [other for other in members if other != worker]
    sent = {other: _tensor(_word(secret, members, worker, other)) for other in others}
    received = {other: torch.zeros_like(word) for other, word in sent.items()}
    under_way = [dist.irecv(word, other, group=group) for other, word in received.items()]
    under_way += [dist.isend(word, other, group=group) for other, word in sent.items()]
    for work in under_way:
        if work is not None:  # None for a process outside the group
            work.wait(PROOF_WITHIN)
    for other, word in received.items():
        if not hmac.compare_digest(bytes(word.tolist()), _word(secret, members, other, worker)):
            raise RunError(
                f"a process that is not worker {other} has connected to worker {worker} in its place",
                hint="another user of this machine may be attacking the run: find the process, and start the run again",
            )


def listening() -> set[int]:
    """The descriptors of this process's listening sockets; empty if the system does not list them."""
    sockets = set()
    for fd in _descriptors():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                sockets.add(fd)
    return sockets


def close_doors(opened: set[int]) -> None:
    """Replace listening sockets by sockets that do not listen, so that new connections are refused.

    gloo keeps their descriptors, watches them with epoll and removes them from it when it ends. So each descriptor
    stays, and is put back into epoll with a socket that receives nothing. On systems other than Linux they stay open.
    """
    if sys.platform != "linux":
        return
    for epoll in _descriptors():
        try:
            held = _watched_by(epoll)
            for fd in held & opened:
                deaf, other = socket.socketpair()
                os.dup2(deaf.fileno(), fd, inheritable=False)
                _DEAF.extend((deaf, other))
                with select.epoll.fromfd(os.dup(epoll)) as copy:
                    copy.register(fd, select.EPOLLIN)
        except OSError:
            continue


_DEAF: list[socket.socket] = []
"""They stay open: closing one end would wake an epoll that watches the other."""


def _watched_by(epoll: int) -> set[int]:
    if not os.readlink(f"/proc/self/fd/{epoll}").endswith("[eventpoll]"):
        return set()
    lines = Path(f"/proc/self/fdinfo/{epoll}").read_text().splitlines()
    return {int(line.split()[1]) for line in lines if line.startswith("tfd:")}


def _descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")] if os.path.isdir("/proc/self/fd") else []


def _word(secret: bytes, members: Sequence[int], source: int, target: int) -> bytes:
    return hmac.digest(secret, f"among {list(members)}, worker {source} to worker {target}".encode(), "sha256")


def _tensor(data: bytes) -> torch.Tensor:
    import torch

    return torch.tensor(list(data), dtype=torch.uint8)


MOST_PORTS = 65535

BEGUN, MOVED = "FXPIPE_BEGUN", "FXPIPE_MOVED"
"""How many times a process, and each other one of its run, has begun again, and why (see `stopping`)."""

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def widen_queues() -> None:
    """Let streams of CUDA have 32 hardware queues where no number is set. CUDA reads it once: at its first call.

    A stream that shares a queue with another one's NCCL kernel waits for it; torch's own streams are 32.
    """
    os.environ.setdefault(CONNECTIONS, "32")


def has_place() -> bool:
    """Whether this process is one of several that torchrun, a similar program or a user has started. RunError if the
    variables contradict each other, or have values that they cannot have."""
    if any(name not in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return False
    place()
    _number("MASTER_PORT", 1, MOST_PORTS)
    if not os.environ["MASTER_ADDR"].strip():
        raise _wrong("MASTER_ADDR", "a host's name or address")
    return True


def place() -> tuple[int, int]:
    """The rank and the number of processes."""
    world = _number("WORLD_SIZE", 1)
    for name, least, most in (("LOCAL_WORLD_SIZE", 1, world), ("LOCAL_RANK", 0, world - 1)):
        if name in os.environ:
            _number(name, least, most)
    return _number("RANK", 0, world - 1), world


def _number(name: str, least: int, most: int | None = None) -> int:
    text = os.environ[name]
    if (
        text.isascii()
        and text.isdecimal()
        and len(text) < 10
        and least <= int(text) <= (int(text) if most is None else most)
    ):
        return int(text)
    raise _wrong(name, f"a number from {least}" + ("" if most is None else f" to {most}"))


def _wrong(name: str, wanted: str) -> RunError:
    return RunError(
        f"the environment variable {name} is {os.environ[name]!r}, not {wanted}",
        hint="torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; set all of them for processes that you "
        "start one by one, or unset them for a run on this machine alone",
    )
