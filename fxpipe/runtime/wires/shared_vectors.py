"""Vectors that two replicas on one machine add up where they lie, in each other's memory.

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
from array import array
from collections import deque
from contextlib import suppress
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
_PATIENCE = 10.0  # seconds to connect in
_WORD = struct.Struct("qqqq")  # what is said, the block, where in it, its bytes
_WRITTEN, _READ = 0, 1  # a region was; what is read is one of the other's
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
        self._told: dict[int, tuple[int, int]] = {}  # the other one's vectors that are not yet added: where each is

    @staticmethod
    def between(group: Any, replica: int) -> SharedVectors | None:
        """Called by both of a group of two: None for both if they are not on one machine, or it is not Linux."""
        other = 1 - replica
        if replica:
            heard = _hear(group, other, _NAME + _SECRET)
            line = _connect(heard[:_NAME], heard[_NAME:]) if any(heard) else None
            _say(group, other, bytes([line is not None]))
            return None if line is None else SharedVectors(line)
        said = secrets.token_bytes(_NAME + _SECRET)
        door = _door(said[:_NAME])
        try:
            _say(group, other, bytes(len(said)) if door is None else said)
            met = _hear(group, other, 1)[0]
            return SharedVectors(_let_in(door, said[_NAME:])) if met and door is not None else None
        finally:
            if door is not None:
                door.close()

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """A vector to write into and to `hand_over`; waits until the other one has read what its memory held.

        Raises:
            RunError: there is no memory.
        """
        size = elements * dtype.itemsize
        free = self._free.setdefault(size, deque())
        region = free.popleft() if free else self._new(size)
        while not region.read:
            self._listen()
        self._filling[region.memory.data_ptr()] = region
        return region.memory.view(dtype)

    def hand_over(self, vector: Tensor, divisor: int) -> Shared | None:
        """The vector is written; None if it is not one of `empty`."""
        region = self._filling.pop(vector.data_ptr(), None)
        if region is None:
            return None
        region.read = False
        self._tell(_WRITTEN, region.block.number, region.begin, region.block)
        self._handed += 1
        return Shared(self._handed - 1, vector, region, divisor)

    def added(self, shared: Shared) -> Tensor:
        """The sum of both, divided; waits for the other one's."""
        while shared.number not in self._told:
            self._listen()
        block, begin = self._told.pop(shared.number)
        theirs = self._mapped[block][begin : begin + shared.own.nbytes].view(shared.own.dtype)
        found = torch.empty_like(shared.own)
        for out, own, their in zip(found.split(CHUNK), shared.own.split(CHUNK), theirs.split(CHUNK), strict=True):
            summed([own, their], shared.divisor, out)
        with suppress(ConnectionError):  # it needs its memory no more
            self._tell(_READ, block, begin)
        self._free[shared.own.nbytes].append(shared.region)
        return found

    def end(self) -> None:
        """No more vectors; the memory goes with the process."""
        self._line.close()

    def _new(self, size: int) -> _Region:
        room = -(-size // _PAGE) * _PAGE
        if not self._blocks or self._blocks[-1].used + room > len(self._blocks[-1].memory):
            try:
                descriptor = os.memfd_create("fxpipe")
                os.ftruncate(descriptor, max(_BLOCK, room))
                memory = _map(descriptor, max(_BLOCK, room))
            except OSError as error:
                raise RunError(f"there is no memory to share with the other replica: {error}") from error
            self._blocks.append(_Block(len(self._blocks), descriptor, memory))
        block = self._blocks[-1]
        begin, block.used = block.used, block.used + room
        found = self._regions[block.number, begin] = _Region(block, begin, block.memory[begin : begin + size])
        return found

    def _tell(self, what: int, number: int, begin: int, block: _Block | None = None) -> None:
        """Say a word, and hear the other's as long as nothing more of ours fits into the line: it may do the same."""
        word = _WORD.pack(what, number, begin, 0 if block is None else len(block.memory))
        with_it = []
        if block is not None and block.descriptor is not None:
            with_it = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [block.descriptor]))]
        while True:
            try:
                self._line.sendmsg([word], with_it, socket.MSG_DONTWAIT)
                break
            except BlockingIOError:
                if any(event & select.POLLIN for _, event in self._poll.poll()):
                    self._listen()
        if block is not None and block.descriptor is not None:
            os.close(block.descriptor)
            block.descriptor = None

    def _listen(self) -> None:
        """Wait for one word of the other's."""
        try:
            word, descriptors, _, _ = socket.recv_fds(self._line, _WORD.size, 1)
        except ConnectionResetError:  # it has ended, and did not need our last words: its own are still there
            word, descriptors, _, _ = socket.recv_fds(self._line, _WORD.size, 1)
        if not word:
            raise ConnectionError("Connection closed by peer")
        what, number, begin, size = _WORD.unpack(word)
        if what == _READ:
            self._regions[number, begin].read = True
            return
        for descriptor in descriptors:
            self._mapped[number] = _map(descriptor, size)
            os.close(descriptor)
        self._told[self._heard] = number, begin
        self._heard += 1


def _door(name: bytes) -> socket.socket | None:
    """A socket that others on this machine can connect to; None where there is none, or no memory to share."""
    if not (hasattr(os, "memfd_create") and hasattr(socket, "AF_UNIX")):
        return None
    try:
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        door.bind(_address(name))
        door.listen()
    except OSError:  # not allowed
        return None
    return door


def _let_in(door: socket.socket, secret: bytes) -> socket.socket:
    """The other one, which knows the secret: it has connected."""
    door.settimeout(_PATIENCE)
    while True:
        line, _ = door.accept()
        line.settimeout(_PATIENCE)
        with suppress(OSError):
            if secrets.compare_digest(line.recv(_SECRET), secret):
                line.settimeout(None)
                return line
        line.close()


def _connect(name: bytes, secret: bytes) -> socket.socket | None:
    """A line to who has a door of this name; None if nobody on this machine has."""
    if not hasattr(socket, "AF_UNIX"):
        return None
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        line.connect(_address(name))
        line.send(secret)
    except OSError:
        line.close()
        return None
    return line


def _address(name: bytes) -> bytes:
    return b"\0fxpipe-" + name.hex().encode()


def _say(group: Any, other: int, said: bytes) -> None:
    group.send([torch.frombuffer(bytearray(said), dtype=torch.uint8)], other, _GREETING).wait()


def _hear(group: Any, other: int, size: int) -> bytes:
    heard = torch.empty(size, dtype=torch.uint8)
    group.recv([heard], other, _GREETING).wait()
    return bytes(heard.tolist())


def _map(descriptor: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
