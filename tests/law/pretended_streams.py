"""CUDA devices that are not here, for `peer_memory`: streams that are late, events and memory that processes share.

A stream is a thread with a queue: what is launched on it happens later, in order, with delays by chance. What a process
computes is on the CPU, so it waits for its stream where it begins to use what it has received (`record_stream`).
"""

from __future__ import annotations

import mmap
import os
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxpipe.device_copies import ToCpu
from fxpipe.runtime.process import losses
from fxpipe.runtime.wires import peer_memory, processes

PATIENCE = 20
"""Seconds after which an event is taken to wait for ever."""

forgotten = ""
"""A fault: streams of this process do not wait until a message is 'made' or 'copied', or a block 'freed'."""

_chance = random.Random(os.getpid())
_failed: list[str] = []
_counts: list[memoryview] = []


def _shared(size: int, path: str = "") -> tuple[mmap.mmap, str]:
    """Bytes that other processes may open by their path, as long as this process is there."""
    number = os.open(path, os.O_RDWR) if path else os.memfd_create("pretended")
    if not path:
        os.ftruncate(number, size)
    return mmap.mmap(number, size), path or f"/proc/{os.getpid()}/fd/{number}"


clock = time.monotonic


class Event:
    """In two numbers: how often it was recorded, and how often its stream has come to that."""

    def __init__(self, *, enable_timing: bool = False, path: str = "", **more: bool) -> None:
        self.own, self._timed, self._at = not path, enable_timing, 0.0
        self._bytes, self._path = _shared(16, path)
        self._numbers = memoryview(self._bytes).cast("q")

    @staticmethod
    def from_ipc_handle(device: torch.device, handle: bytes) -> Event:
        return Event(path=handle.decode())

    def ipc_handle(self) -> bytes:
        return self._path.encode()

    def record(self, stream: Stream | None = None) -> None:
        self._numbers[0] += 1
        number = self._numbers[0]

        def come() -> None:
            self._at = clock() if self._timed else 0.0
            self._numbers[1] = number

        (stream or current()).launch(come)

    def query(self) -> bool:
        return self._numbers[0] == self._numbers[1]

    def synchronize(self) -> None:
        self.then()()

    def elapsed_time(self, later: Event) -> float:
        return 1000 * (later._at - self._at)

    def then(self) -> Callable[[], Any]:
        """Waits until its stream has come to the last record."""
        number = self._numbers[0]

        def wait() -> None:
            end = time.monotonic() + PATIENCE
            while self._numbers[1] < number:
                time.sleep(0.0001)
                if time.monotonic() > end:
                    _failed.append("an event waits for ever")
                    return

        return wait


class Stream:
    """A queue, and a thread that is late."""

    def __init__(self, device: Any = None) -> None:
        self.of_copies = device is not None
        self._queue: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def launch(self, what: Callable[[], Any]) -> None:
        self._queue.put(what)

    def wait_event(self, event: Event) -> None:
        kind = "copied" if event.own else "made" if self.of_copies else "freed"
        if kind != forgotten:
            self.launch(event.then())

    def synchronize(self) -> None:
        over = threading.Event()
        self.launch(over.set)
        over.wait()
        assert not _failed, _failed

    def _run(self) -> None:
        while True:
            what = self._queue.get()
            time.sleep(delay(self))
            what()


def delay(stream: Stream) -> float:
    """Seconds by which the next of a stream is late."""
    return _chance.random() / 500 if _chance.random() < 0.3 else 0.0


class Memory:
    """Bytes of a device, of which parts are copied on the current stream, after a number: who has opened them.

    Args:
        path: of what another process shares.
    """

    def __init__(self, size: int, path: str = "") -> None:
        shared, self.path = _shared(8 + size, path)
        self.bytes = torch.frombuffer(shared, dtype=torch.uint8, offset=8)
        self._opened = memoryview(shared)[:8].cast("q")
        if path:
            self._opened[0] += 1
            weakref.finalize(self, _let_go, self._opened).atexit = False
        else:
            _counts.append(self._opened)

    def __getitem__(self, place: slice) -> Part:
        return Part(self.bytes[place])


def _let_go(opened: memoryview) -> None:
    opened[0] -= 1


def collect() -> None:
    """As `torch.cuda.ipc_collect`, which can free no memory that another process has open."""
    assert not any(opened[0] for opened in _counts), "another process has memory open that is to be freed"


class Part:
    """What is copied, later."""

    def __init__(self, there: Tensor) -> None:
        self.there = there

    def copy_(self, source: Tensor) -> None:
        value = source.clone()  # which the host may change before the stream comes to it
        current().launch(partial(self.there.copy_, value))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target, part = args
        assert function is Tensor.copy_, function
        current().launch(partial(target.copy_, part.there))
        return target


_own = threading.local()
_computing: list[Stream] = []


def current(device: Any = None) -> Stream:
    """The stream on which the calling thread launches."""
    if not _computing:
        _computing.append(Stream())
    found: list[Stream] = getattr(_own, "streams", [])
    return found[-1] if found else _computing[0]


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    """Inside, the current stream is this."""
    _own.streams = [*getattr(_own, "streams", []), stream]
    yield
    _own.streams = _own.streams[:-1]


def memory_of(size: int, device: Any) -> tuple[Memory, tuple[int, str]]:
    """As `torch_private.shared_memory`."""
    memory = Memory(size)
    return memory, (size, memory.path)


class LateToCpu(ToCpu):
    """Of a loss, which is there only where it is waited for."""

    here = False  # type: ignore[assignment]


def set_up(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Have messages between processes of this run go through such devices' memory.

    Args:
        put: sets an attribute.
    """
    names = {"Event": Event, "Stream": Stream, "stream": on, "current_stream": current, "ipc_collect": collect}
    for name, value in names.items():
        put(torch.cuda, name, value)
    put(Tensor, "record_stream", lambda self, stream: stream.synchronize())
    put(peer_memory, "shared_memory", memory_of)
    put(peer_memory, "opened_memory", lambda opens, device: Memory(*opens))
    put(processes, "Sender", peer_memory.PeerSender)
    put(processes, "Receiver", peer_memory.PeerReceiver)
    put(losses, "ToCpu", LateToCpu)
