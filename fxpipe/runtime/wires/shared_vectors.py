"""Vectors that two replicas on one machine add up straight from each other's memory.

Each writes its own vector into memory that the other one maps, tells the other so, and adds both when it needs the sum:
one pass over the two vectors, where sockets would copy them four times. The sum goes to memory of its own, and a word
gives the other one's memory back.

The memory is Linux's memfd, and its descriptor travels over a socket in the abstract namespace: neither has a name in
the file system that could outlive the processes, and neither needs /dev/shm, which containers keep small.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.runtime.wires.collective import summed

SMALLEST = 2**16
"""Bytes below which a vector is sent."""

CHUNK = 2**17
"""Elements that are added, and divided while they are still in the cache."""

_GREETING = 1  # tag of messages of the group: 0 is for exchanges of parts
_NAME, _SECRET = 16, 32  # bytes
_PATIENCE, _SECRET_PATIENCE = 10.0, 1.0  # seconds to connect in, and to say the secret in
_WORD = struct.Struct("qqqqq")  # what is said, the block, its bytes, where in it the vector is, the vector's bytes
_DESCRIPTOR = struct.Struct("i")
_WRITTEN, _READ = 0, 1  # a region of the speaker's was written; one of the listener's was read
_BLOCK, _PAGE = 2**28, 2**12
"""Bytes of a piece of memory with a descriptor of its own, which is a page of the system where nothing was written."""


@dataclass
class _Block:
    """Memory of this process that the other one may read.

    Attributes:
        descriptor: until the other one has it; then None.
        used: bytes that regions have.
    """

    number: int
    descriptor: int | None
    memory: Tensor
    used: int = 0


@dataclass
class _Region:
    """A part of a block, for one vector at a time.

    Attributes:
        read: the other one has read what was last in here.
    """

    block: _Block
    begin: int
    memory: Tensor
    read: bool = True


@dataclass(frozen=True)
class Shared:
    """A vector that was handed over."""

    number: int
    own: Tensor
    region: _Region
    divisor: int


class SharedVectors:
    """One of two processes on one machine. Both hand over the same vectors, in the same order.

    Args:
        line: to the other one.
    """

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._poll = select.poll()
        self._poll.register(line, select.POLLIN | select.POLLOUT)
        self._blocks: list[_Block] = []
        self._regions: dict[tuple[int, int], _Region] = {}  # by block, and where they begin
        self._free: dict[int, deque[_Region]] = {}  # by the bytes of their vectors: those whose last sum was taken here
        self._filling: dict[int, _Region] = {}  # by address: those whose vectors are yet to be handed over
        self._mapped: dict[int, Tensor] = {}  # the other one's blocks
        self._handed = self._heard = 0
        self._told: dict[int, tuple[int, int, int]] = {}  # the other one's that are not yet added: block, begin, bytes

    @staticmethod
    def between(group: Any, replica: int) -> SharedVectors | None:
        """Called by both of a group of two: None for both if they are not on one machine, or it is not Linux."""
        other = 1 - replica
        if replica:
            heard = _hear(group, other, _NAME + _SECRET)
            line = _connect(heard[:_NAME], heard[_NAME:]) if any(heard) else None
            _tell(group, other, bytes([line is not None]))
            return None if line is None else SharedVectors(line)
        said = secrets.token_bytes(_NAME + _SECRET)
        door = _door(said[:_NAME])
        try:
            _tell(group, other, bytes(len(said)) if door is None else said)
            met = _hear(group, other, 1)[0]
            return SharedVectors(_let_in(door, said[_NAME:])) if met and door is not None else None
        finally:
            if door is not None:
                door.close()

    def empty(self, elements: int, dtype: torch.dtype, waiting: Callable[[], AbstractContextManager[None]]) -> Tensor:
        """A vector to write into and to `hand_over`; waits until the other one has read what its memory held.

        Args:
            waiting: where it does wait, it does so in this.

        Raises:
            RunError: there is no memory.
        """
        size = elements * dtype.itemsize
        free = self._free.setdefault(size, deque())
        region = free.popleft() if free else self._new(size)
        while not region.read:
            if not self._listen(socket.MSG_DONTWAIT):
                with waiting():
                    self._listen()
        self._filling[region.memory.data_ptr()] = region
        return region.memory.view(dtype)

    def hand_over(self, vector: Tensor, divisor: int) -> Shared | None:
        """The vector is written; None if it is not one of `empty`."""
        region = self._filling.pop(vector.data_ptr(), None)
        if region is None:
            return None
        region.read = False
        self._hand(region, vector.nbytes)
        self._handed += 1
        return Shared(self._handed - 1, vector, region, divisor)

    def added(self, shared: Shared) -> Tensor:
        """The sum of both, divided; waits for the other one's.

        Raises:
            RunError: they are of other sizes.
        """
        while shared.number not in self._told:
            self._listen()
        block, begin, size = self._told.pop(shared.number)
        if size != shared.own.nbytes:
            raise RunError(
                f"two replicas have gradients of {shared.own.nbytes:,} and of {size:,} bytes to add up",
                hint="train_data() must give all replicas the same batches",
            )
        theirs = self._mapped[block][begin : begin + size].view(shared.own.dtype)
        found = torch.empty_like(shared.own)
        for out, own, their in zip(found.split(CHUNK), shared.own.split(CHUNK), theirs.split(CHUNK), strict=True):
            summed([own, their], shared.divisor, out)
        with suppress(ConnectionError):  # it needs its memory no more
            self._say(_WORD.pack(_READ, block, 0, begin, size))
        self._free[shared.own.nbytes].append(shared.region)
        return found

    def end(self) -> None:
        """No more vectors."""
        self._line.close()
        for known in (self._blocks, self._regions, self._free, self._mapped):
            known.clear()

    def _new(self, size: int) -> _Region:
        room = -(-size // _PAGE) * _PAGE
        if not self._blocks or self._blocks[-1].used + room > len(self._blocks[-1].memory):
            try:
                descriptor, memory = _made(max(_BLOCK, room))
            except OSError as error:
                raise RunError(
                    f"there is no memory to share with the other replica: {error}",
                    hint="raise this process's limits of a file's size, open files and memory: ulimit -f, -n, -v",
                ) from error
            self._blocks.append(_Block(len(self._blocks), descriptor, memory))
        block = self._blocks[-1]
        begin, block.used = block.used, block.used + room
        found = self._regions[block.number, begin] = _Region(block, begin, block.memory[begin : begin + size])
        return found

    def _hand(self, region: _Region, size: int) -> None:
        block = region.block
        word = _WORD.pack(_WRITTEN, block.number, len(block.memory), region.begin, size)
        if block.descriptor is None:
            self._say(word)
            return
        self._say(word, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR.pack(block.descriptor))])
        os.close(block.descriptor)
        block.descriptor = None

    def _say(self, word: bytes, with_it: Sequence[tuple[int, int, bytes]] = ()) -> None:
        """Say it, and hear the other's as long as nothing more of ours fits into the line: it may do the same."""
        while True:
            try:
                self._line.sendmsg([word], with_it, socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                if any(event & select.POLLIN for _, event in self._poll.poll()):
                    self._listen()

    def _listen(self, flags: int = 0) -> bool:
        """Wait for one word of the other's; False if none is there, and the flags say not to wait."""
        room = socket.CMSG_LEN(_DESCRIPTOR.size)
        try:
            word, with_it, found, _ = self._line.recvmsg(_WORD.size, room, flags)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # it has ended, and did not need our last words: its own are still there
            word, with_it, found, _ = self._line.recvmsg(_WORD.size, room)
        if not word:
            raise ConnectionError("Connection closed by peer")
        what, number, whole, begin, size = _WORD.unpack(word)
        if what == _READ:
            self._regions[number, begin].read = True
            return True
        if found & socket.MSG_CTRUNC:
            raise RunError(
                "the memory of another replica needs a file descriptor, and this process has no more",
                hint="raise the limit of open files: ulimit -n",
            )
        for _, _, descriptor in with_it:
            self._map_theirs(number, whole, *_DESCRIPTOR.unpack(descriptor))
        self._told[self._heard] = number, begin, size
        self._heard += 1
        return True

    def _map_theirs(self, number: int, size: int, descriptor: int) -> None:
        try:
            self._mapped[number] = _map(descriptor, size)
        except OSError as error:
            raise RunError(f"the memory of another replica cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)


def _door(name: bytes) -> socket.socket | None:
    """A socket that others on this machine can connect to; None where there is none, or no memory to share."""
    if not _can_share():
        return None
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        door.bind(_address(name))
        door.listen()
    except OSError:  # not allowed
        door.close()
        return None
    return door


def _let_in(door: socket.socket, secret: bytes) -> socket.socket:
    """The other one, which knows the secret: it has connected."""
    door.settimeout(_PATIENCE)
    while True:
        line, _ = door.accept()
        line.settimeout(_SECRET_PATIENCE)
        with suppress(OSError):
            if secrets.compare_digest(line.recv(_SECRET), secret):
                line.settimeout(None)
                return line
        line.close()


def _connect(name: bytes, secret: bytes) -> socket.socket | None:
    """A line to who has a door of this name; None if nobody on this machine has, or there is no memory to share."""
    if not _can_share():
        return None
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.settimeout(_PATIENCE)
    try:
        line.connect(_address(name))
        line.send(secret)
    except OSError:
        line.close()
        return None
    line.settimeout(None)
    return line


def _can_share() -> bool:
    """Whether there is memory for a block, and a socket to tell of it."""
    try:
        os.close(_made(_BLOCK)[0])
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).close()
    except (AttributeError, OSError):  # not Linux, or not allowed, or limited
        return False
    return True


def _address(name: bytes) -> bytes:
    return b"\0fxpipe-" + name.hex().encode()


def _tell(group: Any, other: int, said: bytes) -> None:
    group.send([torch.frombuffer(bytearray(said), dtype=torch.uint8)], other, _GREETING).wait()


def _hear(group: Any, other: int, size: int) -> bytes:
    heard = torch.empty(size, dtype=torch.uint8)
    group.recv([heard], other, _GREETING).wait()
    return bytes(heard.tolist())


def _made(size: int) -> tuple[int, Tensor]:
    """A descriptor of new memory, and that memory."""
    descriptor = os.memfd_create("fxpipe")
    try:
        os.ftruncate(descriptor, size)
        return descriptor, _map(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise


def _map(descriptor: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
