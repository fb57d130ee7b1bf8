"""What the processes of a run tell each other besides messages: texts, an object from each at one point, the time.

A run of days writes many texts: whoever knows that all have read one forgets it.
"""

from __future__ import annotations

import errno
import json
import os
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
from fxpipe.torch_private import default_store

RETRY = 1.0
"""Seconds until what a full disk did not take is tried again."""


class Exchange(Protocol):
    """Texts by key that all workers of a run see."""

    def set(self, key: str, text: str) -> None:
        """Write one."""

    def get(self, keys: list[str]) -> list[str] | None:
        """All of these, once all are there; None before. Does not wait."""

    def forget(self, keys: list[str]) -> None:
        """Remove these: nobody will ask for them again."""


class FolderExchange:
    """For the processes of a run on one machine: a file each. In torch's `FileStore` nothing ever goes away."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def set(self, key: str, text: str) -> None:
        """Write one; waits, and says so, as long as the disk is full."""
        path = self._path(key)
        unfinished = path.with_name(f"{path.name}.tmp")
        for attempt in count():
            try:
                unfinished.write_text(text)
                os.replace(unfinished, path)
                return
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                if not attempt:
                    warn(f"{self._folder} is on a disk that is full: the run waits until there is room")
                sleep(RETRY)

    def get(self, keys: list[str]) -> list[str] | None:
        try:
            return [self._path(key).read_text() for key in keys]
        except FileNotFoundError:
            return None

    def forget(self, keys: list[str]) -> None:
        for key in keys:
            with suppress(OSError):
                self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")


class StoreExchange:
    """In a store of torch's.

    Args:
        store: one of this process alone; None takes the process group's, for workers that torchrun has started.
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
"""Seconds between two looks into the store."""

PATIENCE = 5.0
"""Seconds for which the worker that stops waits for the others' answers."""

_ASKED = "fxpipe/stop"


def gathered(own: T, rank: int, workers: int) -> list[T]:
    """What each process gives, by rank, on all of them."""
    if alone():
        return [own]
    found: list[Any] = [None] * workers
    with peers(rank):
        dist.all_gather_object(found, own)
    return found


def of_worker_0(value: T, rank: int) -> T:
    """What worker 0 gives, on all of them."""
    if alone():
        return value
    box: list[Any] = [value]
    with peers(rank):
        dist.broadcast_object_list(box, 0)
    found: T = box[0]
    return found


def barrier(rank: int) -> None:
    """Wait until all have come here."""
    if not alone():
        with peers(rank):
            dist.barrier()


def agreed_error(error: FxpipeError | None, rank: int, workers: int) -> FxpipeError | None:
    """This worker's error, or else that of another, as all of them are to raise it."""
    met = gathered(error, rank, workers)
    if error is not None:
        return error
    for worker, other in enumerate(met):
        if other is not None:
            return RunError(f"on worker {worker}: {other.what}", where=other.where, hint=other.hint, page=other.page)
    return None


def agree_on(error: FxpipeError | None, rank: int, workers: int) -> None:
    """Raise this worker's error, or that of another, on all of them."""
    if (found := agreed_error(error, rank, workers)) is not None:
        raise found


class AgreedStop:
    """A worker's part in how one of them stops the run, and first asks the others what they see; made inside `peers`.

    The others wait for messages that will never come, and cannot be told by a message. So each has a thread that looks
    into the process group's store once a second.

    Args:
        look: says what this worker sees, as JSON; called in another thread than the training's.
    """

    def __init__(self, rank: int, workers: int, look: Callable[[], Any]) -> None:
        self._rank, self._workers, self._look = rank, workers, look
        self._store: Any = default_store()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def ask(self) -> list[Any]:
        """What all workers see, this one first; only those that answer in time."""
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
    """At the time `at` of this process's clock, worker 0's was `offset` ahead, give or take `error`; nanoseconds.

    The zero of `perf_counter_ns` differs from machine to machine. A worker asks worker 0 for its time several times,
    and assumes that worker 0 answered in the middle of the quickest exchange. So the offset is wrong by at most half of
    that exchange's time (Cristian, Probabilistic clock synchronization, 1989). Clocks also drift: if the offsets before
    and after a run differ by more than their errors, a straight line between them corrects the times.
    """

    at: int
    offset: int
    error: int


def read_offset(rank: int, workers: int, now: Callable[[], int] = perf_counter_ns) -> ClockOffset:
    """Compare clocks with worker 0's, one process after the other; every process of the default group calls it."""
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
    """A time of this process's clock as a time of worker 0's, by the readings before and after training.

    Readings that differ by no more than their errors show no drift: the more precise one counts, and durations stay as
    they are.
    """
    if abs(after.offset - before.offset) <= before.error + after.error:
        return time + min(before, after, key=lambda reading: reading.error).offset
    apart = max(after.at - before.at, 1)
    return time + before.offset + (after.offset - before.offset) * (time - before.at) // apart
