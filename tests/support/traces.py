"""A trace of two workers, small enough to be read, and how any is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fxpipe.observe.trace import KINDS
from fxpipe.observe.trace.reader import Trace, flatten
from fxpipe.observe.trace.writer import TraceWriter

Row = tuple[str, str, int, int, int, int]  # kind, name, minibatch, microbatch, begin, end


def columns(rows: list[Row]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(6)]


TWO: list[list[Row]] = [
    [
        ("data", "data", 0, 0, 0, 500),
        ("F", "F0", 0, 0, 500, 10_000),
        ("send", "send a", 0, 0, 8_000, 9_000),
        ("B", "B0", 0, 0, 10_000, 60_000),
        ("wait", "wait for d_a from worker 1", 0, 0, 10_000, 40_000),
        ("update", "update 0", 0, 0, 55_000, 60_000),
    ],
    [
        ("F", "F0", 0, 0, 100, 20_000),
        ("receive", "receive a", 0, 0, 150, 9_600),
        ("wait", "wait for a from worker 0", 0, 0, 200, 9_500),
        ("B", "B0", 0, 0, 20_000, 50_000),
        ("send", "send d_a", 0, 0, 38_000, 39_000),
    ],
]


def written(path: Path, workers: list[list[Row]] = TWO, microbatches: int = 1, **other: Any) -> Path:
    with TraceWriter(path, len(workers), microbatches) as writer:
        for worker, rows in enumerate(workers):
            writer.add(worker, *columns(rows))
        writer.close({"workers": len(workers), **other})
    return path


def busy(trace: Trace) -> dict[int, dict[str, float]]:
    """Seconds by worker and kind: an event inside another counts only as its own kind."""
    found: dict[int, dict[str, float]] = {}
    for piece in flatten(trace.events):
        row = found.setdefault(piece.worker, dict.fromkeys(KINDS, 0.0))
        row[piece.kind] += (piece.end - piece.begin) / 1e9
    return found
