"""What the processes of a run exchange in addition to messages: texts, one object from each, the time.

A run of days writes many texts: a process that knows that all have read a text removes it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import monotonic, perf_counter_ns, sleep
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from fxpipe.errors import FxpipeError, RunError
from fxpipe.messages import warn
from fxpipe.runtime.wires.group import alone, peers
from fxpipe.runtime.wires.run_folder import FULL, RunFolder
from fxpipe.torch_private import default_store

RETRY = 1.0
"""Seconds between two attempts to write to a full disk."""


class Exchange(Protocol):
    """Texts by key that all workers of a run see."""

    def set(self, key: str, text: str) -> None:
        """Write one."""

    def get(self, keys: list[str]) -> list[str] | None:
        """All of these texts; None until all are there. Does not wait."""

    def forget(self, keys: list[str]) -> None:
        """Remove these: no process will read them again."""


class FolderExchange:
    """For the processes of a run on one machine: a file for each text. torch's `FileStore` never removes anything."""

    def __init__(self, folder: Path) -> None:
        self._folder = RunFolder(folder)

    def set(self, key: str, text: str) -> None:
        """Write a text; if all disks are full, warns and waits."""
        for attempt in count():
            try:
                self._folder.write(_name(key), text)
                return
            except OSError as error:
                if error.errno not in FULL:
                    raise
                if not attempt:
                    where = " and of ".join(map(str, self._folder.places))
                    warn(f"the disk of {where} is full: the run waits until there is space")
                sleep(RETRY)

    def get(self, keys: list[str]) -> list[str] | None:
        found = [text for key in keys if (text := self._folder.read(_name(key))) is not None]
        return found if len(found) == len(keys) else None

    def forget(self, keys: list[str]) -> None:
        for key in keys:
            self._folder.remove(_name(key))


def _name(key: str) -> str:
    return key.replace("/", "-")


class StoreExchange:
    """In a store of torch.

    Args:
        store: of this process alone; None takes the process group's, for workers that torchrun has started.
    """

    def __init__(self, store: Any = None) -> None:
        self._store = default_store() if store is None else store

    def set(self, key: str, text: str) -> None:
        self._store.set(key, text)

    def get(self, keys: list[str]) -> list[str] | None:
        if not self._store.check(keys):
            return None
        return [self._store.get(key).decode() for key in keys]

    def forget(self, keys: list[str]) -> None:
        for key in keys:
            self._store.delete_key(key)


T = TypeVar("T")

PERIOD = 1.0
"""Seconds between two reads of the store."""

PATIENCE = 5.0
"""How many seconds the stopping worker waits for the others' answers."""

_ASKED = "fxpipe/stop"


def gathered(own: T, rank: int, workers: int) -> list[T]:
    """Gather an object from each process, by rank; the same list on all of them."""
    if alone():
        return [own]
    found: list[Any] = [None] * workers
    with peers(rank):
        dist.all_gather_object(found, own)
    return found


def of_worker_0(value: T, rank: int) -> T:
    """Broadcast worker 0's value to all processes."""
    if alone():
        return value
    box: list[Any] = [value]
    with peers(rank):
        dist.broadcast_object_list(box, 0)
    found: T = box[0]
    return found


def barrier(rank: int) -> None:
    """Wait until all processes have called this."""
    if not alone():
        with peers(rank):
            dist.barrier()


def agreed_error(error: FxpipeError | None, rank: int, workers: int) -> FxpipeError | None:
    """This worker's error, or else another worker's, for all of them to raise."""
    met = gathered(error, rank, workers)
    if error is not None:
        return error
    for worker, other in enumerate(met):
        if other is not None:
            return RunError(f"on worker {worker}: {other.what}", where=other.where, hint=other.hint, page=other.page)
    return None


def agree_on(error: FxpipeError | None, rank: int, workers: int) -> None:
    """Raise this worker's error, or else another worker's, on all of them."""
    if (found := agreed_error(error, rank, workers)) is not None:
        raise found


class AgreedStop:
    """Lets a worker that stops the run first collect what all workers have found; made inside `peers`.

    The others are blocked by receives that will never end, so no message can reach them. So each has a thread that
    reads the process group's store once a second.

    Args:
        look: returns what this worker has found, as JSON; called in a thread separate from training.
    """

    def __init__(self, rank: int, workers: int, look: Callable[[], Any]) -> None:
        self._rank, self._workers, self._look = rank, workers, look
        self._store: Any = default_store()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def ask(self) -> list[Any]:
        """What the workers have found, this one first; without those that do not answer in time."""
        self._over.set()
        found = [self._look()]
        missing = [rank for rank in range(self._workers) if rank != self._rank]
        with suppress(RuntimeError):  # the store ends with the process that holds it
            self._store.set(_ASKED, b"1")
            end = monotonic() + PATIENCE
            while missing and monotonic() < end:
                for rank in [rank for rank in missing if self._store.check([_answer(rank)])]:
                    found.append(json.loads(self._store.get(_answer(rank))))
                    missing.remove(rank)
                sleep(0.05)
        return found

    def end(self) -> None:
        """Stop listening."""
        self._over.set()
        self._thread.join(PERIOD)

    def _listen(self) -> None:
        with suppress(RuntimeError):
            while not self._over.wait(PERIOD):
                if self._store.check([_ASKED]):
                    self._store.set(_answer(self._rank), json.dumps(self._look()))
                    return


def _answer(rank: int) -> str:
    return f"{_ASKED}/{rank}"


_EXCHANGES = 16


@dataclass(frozen=True)
class ClockOffset:
    """At time `at` of this process's clock, worker 0's clock was `offset` ahead, plus or minus `error`; nanoseconds.

    The zero of `perf_counter_ns` differs between machines. A worker asks worker 0 for its time several times, and
    assumes that worker 0 answered in the middle of the quickest exchange. So the offset is wrong by at most half the
    time of that exchange (Cristian, Probabilistic clock synchronization, 1989). Clocks also drift: if the offsets
    before and after a run differ by more than their errors, linear interpolation between them corrects the times.
    """

    at: int
    offset: int
    error: int


def read_offset(rank: int, workers: int, now: Callable[[], int] = perf_counter_ns) -> ClockOffset:
    """Compare this clock with worker 0's; every process of the default group calls it, and they take turns."""
    time = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        for worker in range(1, workers):
            for _ in range(_EXCHANGES):
                dist.recv(time, worker)
                time[0] = now()
                dist.send(time, worker)
        return ClockOffset(now(), 0, 0)
    found = []
    for _ in range(_EXCHANGES):
        asked = now()
        dist.send(time, 0)
        dist.recv(time, 0)
        answered = now()
        middle = (asked + answered) // 2
        found.append(ClockOffset(middle, int(time[0]) - middle, (answered - asked + 1) // 2))
    return min(found, key=lambda reading: reading.error)


def aligned(time: int, before: ClockOffset, after: ClockOffset) -> int:
    """Convert a time of this process's clock to worker 0's clock, by the readings before and after training.

    Readings that differ by no more than their errors show no drift: then the more precise one is used, and durations do
    not change.
    """
    if abs(after.offset - before.offset) <= before.error + after.error:
        return time + min(before, after, key=lambda reading: reading.error).offset
    apart = max(after.at - before.at, 1)
    return time + before.offset + (after.offset - before.offset) * (time - before.at) // apart
