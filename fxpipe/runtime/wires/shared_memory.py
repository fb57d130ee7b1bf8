"""Messages between processes of one machine, through memory that both have mapped.

A direction has an open file without a name, and two pipes:

    sender     copies a message into a free block of the file    ─ line, offset, bytes →
    receiver   uses the block itself as the received tensor
               and has dropped the tensor                        ← offset ─
    sender     uses the block again

Nothing is copied twice, no thread is needed, and a receiver that waits sleeps until its pipe has something to read. The
other process opens file and pipes through `/proc`, where only the same user may.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.runtime.wires.exchange import gathered
from fxpipe.runtime.wires.group import peer_lost
from fxpipe.runtime.wires.wired import Waiting

SWITCH = "FXPIPE_SHARED_MEMORY"
"""The environment variable that turns it off if it is 0."""

_SENT = struct.Struct("=QQQ")  # written at once, since it is shorter than PIPE_BUF: so are reads of several
_READ = 170 * _SENT.size
_DROPPED = struct.Struct("=Q")
PAGE = mmap.ALLOCATIONGRANULARITY
CPU = torch.device("cpu")
Launching = AbstractContextManager[Any]
ALONE: Launching = nullcontext()
"""For a device of which no other thread uses the queue."""

_CURES = {
    "pidfd": "leave expandable_segments out of PYTORCH_ALLOC_CONF, or set kernel.yama.ptrace_scope to 0",
    "cudaMallocAsync": "leave backend:cudaMallocAsync out of PYTORCH_ALLOC_CONF",
}
"""By a word in torch's reason why devices share no memory, what would let them."""

_TRIAL, _TRIED = 0, 1024
"""The line of the message that tries a direction, before those with numbers from 1 on; and its numbers."""


_LARGE = 2**20


def rounded(size: int) -> int:
    """The bytes of a block for a message of this size: if large, a power of two, so that blocks have few sizes."""
    return -(-size // PAGE) * PAGE if size <= _LARGE else 1 << (size - 1).bit_length()


class Handles(NamedTuple):
    """What the receiver opens: the sender's process, and its descriptors of the file and of its ends of the pipes."""

    process: int
    file: int
    sent: int
    dropped: int


class Whereabouts(NamedTuple):
    """Where a process is: those of one user on one machine may share memory.

    `off` says why it shares none, if it does not. Process ids and networks of other `spaces` are other machines to
    their users.
    """

    off: str
    host: str
    spaces: tuple[int, ...]
    user: int

    @staticmethod
    def here() -> Whereabouts:
        """That of this process."""
        spaces: tuple[int, ...] = ()
        with suppress(OSError):
            spaces = tuple([os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net")])
        off = "" if spaces and hasattr(os, "memfd_create") else "only Linux has such memory"
        off = f"{SWITCH}=0" if os.environ.get(SWITCH) == "0" else off
        return Whereabouts(off, socket.gethostname(), spaces, os.getuid())

    def separates(self, other: Whereabouts) -> str:
        """Why this process and another one share no memory; '' if they may."""
        if off := self.off or other.off:
            return off
        if self.host != other.host:
            return "different hosts"
        if self.spaces != other.spaces:
            return "different containers"
        return "" if self.user == other.user else "different users"


class Sender:
    """One end of a direction. It is computed on the device; `launching` is held while what waits for another process is
    put into the device's queue."""

    def __init__(self, device: torch.device = CPU, launching: Launching = ALONE) -> None:
        self._device, self._launching = device, launching
        self._file = os.memfd_create("fxpipe")
        self._theirs, self._sent = os.pipe()
        self._dropped, self._they_drop = os.pipe()
        os.set_blocking(self._dropped, False)
        self._end = 0
        self._blocks: dict[int, mmap.mmap] = {}  # by offset
        self._sizes: dict[int, int] = {}  # of the messages that they are for, by offset
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # offsets, by size

    @property
    def handles(self) -> Handles:
        """For the receiver."""
        return Handles(os.getpid(), self._file, self._theirs, self._they_drop)

    def met(self) -> None:
        """The receiver has opened them: if it ends, its ends of the pipes do."""
        for each in (self._theirs, self._they_drop):
            os.close(each)

    def send(self, line: int, flat: Tensor) -> None:
        """Send a dense vector; it may change at once."""
        size = flat.nbytes
        offset = self._block(rounded(size)) if size else 0
        if size:
            self._fill(offset, flat)
        try:
            os.write(self._sent, _SENT.pack(line, offset, size))
        except OSError as error:
            raise peer_lost("Broken pipe") from error

    def _block(self, size: int) -> int:
        """The offset of a free block."""
        with suppress(BlockingIOError):
            while ended := os.read(self._dropped, 512 * _DROPPED.size):
                for (offset,) in _DROPPED.iter_unpack(ended):
                    self._free[self._sizes[offset]].append(offset)
        if self._free[size]:
            return self._free[size].pop()
        offset = self._made(size)
        self._sizes[offset] = size
        return offset

    def _made(self, size: int) -> int:
        """Make a block; returns its offset."""
        offset, self._end = self._end, self._end + size
        os.ftruncate(self._file, self._end)
        self._blocks[offset] = mmap.mmap(self._file, size, offset=offset)
        return offset

    def _fill(self, offset: int, flat: Tensor) -> None:
        block = torch.frombuffer(self._blocks[offset], dtype=flat.dtype, count=flat.numel())
        block.copy_(flat)

    def close(self) -> None:
        """No more messages."""
        for each in (self._file, self._sent, self._dropped):
            os.close(each)


class Receiver:
    """The other end. OSError if this process must not open what the sender has."""

    def __init__(self, given: Handles, device: torch.device = CPU, launching: Launching = ALONE) -> None:
        self._device, self._launching = device, launching
        there = f"/proc/{given.process}/fd"
        self._file = os.open(f"{there}/{given.file}", os.O_RDWR | os.O_CLOEXEC)
        self._sent = os.open(f"{there}/{given.sent}", os.O_RDONLY | os.O_CLOEXEC)
        self._dropped: int | None = os.open(f"{there}/{given.dropped}", os.O_WRONLY | os.O_CLOEXEC)
        self._blocks: dict[int, mmap.mmap] = {}
        self._expected: Counter[int] = Counter()  # messages, by line
        self._arrived: Counter[int] = Counter()
        self._here: dict[tuple[int, int], tuple[int, int]] = {}  # offset and bytes, by line and number

    def expect(self, line: int, count: int, dtype: torch.dtype) -> Arriving:
        """Begin to receive the next message of a line."""
        self._expected[line] += 1
        return Arriving(self, (line, self._expected[line]), count, dtype)

    def has(self, message: tuple[int, int]) -> bool:
        """Whether a message is known to have arrived."""
        return message in self._here

    def wait(self, message: tuple[int, int]) -> None:
        """Wait until a message has arrived. PeerLost if the sender is gone."""
        while message not in self._here:
            if not (read := os.read(self._sent, _READ)):
                raise peer_lost("Connection closed by peer")
            for line, offset, size in _SENT.iter_unpack(read):
                self._arrived[line] += 1
                self._here[line, self._arrived[line]] = offset, size

    def take(self, message: tuple[int, int], count: int, dtype: torch.dtype) -> Tensor:
        """A message that has arrived."""
        offset, size = self._here.pop(message)
        assert size == count * dtype.itemsize, "the ends of a line have different messages"
        return self._used(offset, count, dtype) if size else torch.empty(0, dtype=dtype, device=self._device)

    def _used(self, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        """The message in a block."""
        size = count * dtype.itemsize
        if offset not in self._blocks:
            self._blocks[offset] = mmap.mmap(self._file, rounded(size), offset=offset)
        memory = (ctypes.c_char * size).from_buffer(self._blocks[offset])  # the tensor's storage keeps it
        weakref.finalize(memory, self._drop, offset).atexit = False
        return torch.frombuffer(memory, dtype=dtype)

    def _drop(self, offset: int) -> None:
        if self._dropped is not None:
            with suppress(OSError):  # the sender has ended
                os.write(self._dropped, _DROPPED.pack(offset))

    def close(self) -> None:
        """No more messages; what was received stays."""
        dropped, self._dropped = self._dropped, None
        assert dropped is not None, "closed twice"
        for each in (self._file, self._sent, dropped):
            os.close(each)


class Arriving:
    """A receive that was posted."""

    def __init__(self, end: Receiver, message: tuple[int, int], count: int, dtype: torch.dtype) -> None:
        self._end, self._message, self._given = end, message, (count, dtype)

    @property
    def here(self) -> bool:
        """Whether it is known to have arrived."""
        return self._end.has(self._message)

    def wait(self, what: Waiting | None = None) -> None:
        """Wait until it has arrived. PeerLost if the sender is gone."""
        self._end.wait(self._message)

    def take(self) -> Tensor:
        """What was received; no other message uses its memory as long as it is used."""
        return self._end.take(self._message, *self._given)


class Ends(NamedTuple):
    """The ends of a process's directions, by the other process. `without` says why not, for each direction of the whole
    run; '' where memory is shared."""

    senders: Mapping[int, Sender]
    receivers: Mapping[int, Receiver]
    without: Mapping[tuple[int, int], str]

    def kinds(self, shared: str, otherwise: str) -> str:
        """How messages travel in the whole run: by names of shared memory and of what is used otherwise."""
        return " and ".join(sorted({otherwise if why else shared for why in self.without.values()})) or otherwise

    def close(self, meet: Callable[[], None]) -> None:
        """No more messages. `meet` waits for all processes of the run: the memory of a device is free once no receiver
        has it open."""
        for receiver in self.receivers.values():
            receiver.close()
        if "" in self.without.values():
            meet()
        for sender in self.senders.values():
            sender.close()


NONE = Ends({}, {}, {})


def connected(
    rank: int,
    directions: Sequence[tuple[int, int]],
    device: torch.device = CPU,
    ends: tuple[type[Sender], type[Receiver]] = (Sender, Receiver),
    launching: Launching = ALONE,
) -> Ends:
    """Connect the processes that can share memory, as a message in each direction tries; called by all of a run. Each
    direction is a sender and a receiver, the same list in every process; `ends` are their kinds."""
    places = gathered(Whereabouts.here())
    without = {(one, other): places[one].separates(places[other]) for one, other in directions}
    shared = [way for way, why in without.items() if not why]
    senders, receivers = dict[int, Sender](), dict[int, Receiver]()
    refused: dict[tuple[int, int], str] = {}
    message = torch.arange(_TRIED, dtype=torch.int32, device=device)
    for one, other in shared:
        if one == rank:
            senders[other] = ends[0](device, launching)
            with _said(refused, (one, other)):
                senders[other].send(_TRIAL, message)
    sent = {other: sender.handles for other, sender in senders.items() if (rank, other) not in refused}
    handles = gathered(sent)
    for one, other in shared:
        if other == rank and rank in handles[one]:
            with _said(refused, (one, other)):
                receivers[one] = ends[1](handles[one][rank], device, launching)
                receivers[one].wait((_TRIAL, 1))
                if not torch.equal(receivers[one].take((_TRIAL, 1), _TRIED, message.dtype), message):
                    raise RuntimeError("what arrives is not what was sent")
    for one in [one for one in receivers if (one, rank) in refused]:
        receivers.pop(one).close()
    failed = {way: why for each in gathered(refused) for way, why in each.items()}
    for other, sender in [*senders.items()]:
        sender.met()
        if (rank, other) in failed:
            senders.pop(other).close()
    return Ends(senders, receivers, without | failed)


@contextmanager
def _said(refused: dict[tuple[int, int], str], way: tuple[int, int]) -> Iterator[None]:
    """Why a direction cannot be used goes into `refused`."""
    try:
        yield
    except OSError:
        refused[way] = "the system does not let one process open the other's memory"
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        refused[way] = "; ".join([why, *(cure for word, cure in _CURES.items() if word in why)])
