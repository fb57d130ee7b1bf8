"""Writes a trace file, worker after worker; the actions of a microbatch are linked, which viewers draw as arrows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from fxpipe.errors import RunError
from fxpipe.files import check_creatable
from fxpipe.observe.trace import ACTIONS, HEAD, TAIL, row_of


def check_trace(path: str | Path) -> None:
    """Refuse, before any work is done, a path to which no trace can be written."""
    path = Path(path)
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "no plain file"
        raise RunError(f"{path} cannot be written: it is {what}", hint="choose another --trace")
    check_creatable(path.resolve().parent, path, "--trace")


def partial(path: str | Path) -> Path:
    """The path of a trace while it is written; a file that stays there was left by a process that was killed."""
    path = Path(path)
    return path.with_name(f".{path.name}.partial")


class TraceWriter:
    """Writes a trace, worker after worker, and keeps nothing of it in memory.

        with TraceWriter("trace.json", workers=2, microbatches=1) as writer:
            writer.add(0, kinds, names, minibatches, microbatches, begins, ends)
            writer.add(1, …)
            writer.close({"seconds": 9.8, …})

    The file appears only when it is closed: leaving the block without `close` leaves no file.

    Arrows follow every microbatch through all of its forwards and backwards, from the forward on worker 0 to the
    backward on worker 0. Replicas have their own arrows, for their own microbatches.

    Each worker is a process, to a viewer; where ranks have several workers, which `placement` says, each rank is one,
    with a row for each of its workers.
    """

    def __init__(
        self,
        path: str | Path,
        workers: int,
        microbatches: int = 1,
        placement: Sequence[int] = (),
        replicas: int = 1,
    ) -> None:
        self.path = Path(path)
        self._placement, self._replicas = placement, replicas
        self.workers = workers
        self.microbatches = microbatches
        self._partial = partial(self.path)
        self._separator = "\n"
        self._file: TextIO | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._partial.open("w", encoding="utf-8")
            self._file.write(HEAD)
        except OSError as error:
            raise self._refused(error) from error
        self._write(
            json.dumps(event, separators=(",", ":"))
            for worker in range(workers)
            for replica in range(replicas)
            for event in worker_metadata(worker, placement, replica if replicas > 1 else None)
        )

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.abort()

    def add(
        self,
        worker: int,
        kind: Sequence[str],
        name: Sequence[str],
        minibatch: Sequence[int],
        microbatch: Sequence[int],
        begin: Sequence[int],
        end: Sequence[int],
        replica: int = 0,
    ) -> None:
        """Write a worker's events, given as columns of one length, in any order.

        Times are nanoseconds from where training began on worker 0. An event that ends later than the one around it is
        cut, so that events always nest.
        """
        if not len(kind) == len(name) == len(minibatch) == len(microbatch) == len(begin) == len(end):
            raise ValueError("the columns differ in length")
        self._write(self._lines(worker, replica, kind, name, minibatch, microbatch, begin, end))

    def close(self, other: dict[str, Any]) -> None:
        """End the file with `other` as its `otherData`, and move it into its place."""
        assert self._file is not None
        try:
            tail = f'{TAIL}: "ms", "otherData": {json.dumps(other)}}}\n'
            self._file.write("\n" + tail)
            self._file.close()
            self._file = None
            self._partial.replace(self.path)
        except OSError as error:
            raise self._refused(error) from error

    def abort(self) -> None:
        """Remove the file if it is not closed yet."""
        file, self._file = self._file, None
        with suppress(OSError):  # if the disk is full
            if file is not None:
                file.close()
        with suppress(OSError):
            self._partial.unlink(missing_ok=True)

    def _lines(
        self,
        worker: int,
        replica: int,
        kinds: Sequence[str],
        names: Sequence[str],
        minibatches: Sequence[int],
        microbatches: Sequence[int],
        begins: Sequence[int],
        ends: Sequence[int],
    ) -> Iterator[str]:
        order = sorted(range(len(kinds)), key=lambda i: kinds[i] not in ACTIONS)  # the outer one of equals is first
        order.sort(key=ends.__getitem__, reverse=True)
        order.sort(key=begins.__getitem__)
        open_ends: list[int] = []
        process, row = row_of(worker, self._placement, replica)
        place = f'"pid":{process},"tid":{row},"ts":'
        for i in order:
            kind, begin, end = kinds[i], begins[i], ends[i]
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            if open_ends:
                end = min(end, open_ends[-1])
            open_ends.append(end)
            link = ""
            if kind in ACTIONS:
                number = (minibatches[i] * self.microbatches + microbatches[i]) * self._replicas + replica
                ways = [way for way, not_on_first in (("in", "F"), ("out", "BW")) if worker or kind not in not_on_first]
                link = f'"bind_id":{number},' + "".join(f'"flow_{way}":true,' for way in ways)
            yield (
                f'{{"ph":"X","cat":"{kind}","name":{json.dumps(names[i])},{place}{begin / 1e3:.3f},'
                f'"dur":{(end - begin) / 1e3:.3f},{link}'
                f'"args":{{"minibatch":{minibatches[i]},"microbatch":{microbatches[i]}}}}}'
            )

    def _write(self, lines: Iterable[str]) -> None:
        assert self._file is not None
        write = self._file.write
        try:
            for line in lines:
                write(self._separator + line)
                self._separator = ",\n"
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> RunError:
        self.abort()
        return RunError(f"{self.path} cannot be written: {error.strerror or error}", hint="choose another --trace")


def worker_metadata(worker: int, placement: Sequence[int] = (), replica: int | None = None) -> list[dict[str, Any]]:
    """The events that name a worker's process and its row, and give it its place among the others: replicas of a rank
    are next to each other. A worker without others has no number of a replica."""
    rank, row = row_of(worker, placement)
    process, _ = row_of(worker, placement, replica or 0)
    named, lane = (f"rank {rank}", f"worker {worker}") if placement else (f"worker {worker}", "compute")
    which = "" if replica is None else f", replica {replica}"
    given: dict[str, dict[str, Any]] = {
        "process_name": {"name": named + which},
        "process_sort_index": {"sort_index": rank},
        "thread_name": {"name": lane},
    }
    return [{"ph": "M", "name": name, "pid": process, "tid": row, "args": args} for name, args in given.items()]
