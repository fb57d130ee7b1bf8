"""The environment variables by which torchrun, or a user, gives a process of a run its place; those of CUDA."""

from __future__ import annotations

import os

from fxpipe.errors import RunError

MOST_PORTS = 65535

BEGUN, MOVED = "FXPIPE_BEGUN", "FXPIPE_MOVED"
"""How many times a process, and each other one of its run, has begun again, and why (see `begin_again`)."""

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def widen_queues() -> None:
    """Let streams of CUDA have 32 hardware queues where no number is set. CUDA reads it once: at its first call.

    A stream that shares a queue with another one's NCCL kernel waits for it; torch's own streams are 32.
    """
    os.environ.setdefault(CONNECTIONS, "32")


def has_place() -> bool:
    """Whether this process is one of several that torchrun, a similar program or a user has started.

    Raises:
        RunError: the variables contradict each other, or have values that they cannot have.
    """
    if any(name not in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return False
    place()
    _number("MASTER_PORT", 1, MOST_PORTS)
    if not os.environ["MASTER_ADDR"].strip():
        raise _wrong("MASTER_ADDR", "a host's name or address")
    return True


def place() -> tuple[int, int]:
    """The rank and the number of processes.

    Raises:
        RunError: as `has_place`.
    """
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
