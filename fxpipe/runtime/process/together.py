"""What all processes of a run do at once, at a point that all of them come to; or how one stops all."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, sleep
from typing import Any, TypeVar

import torch.distributed as dist

from fxpipe.errors import FxpipeError, RunError
from fxpipe.runtime.wires.group import alone, peers
from fxpipe.torch_private import default_store

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
