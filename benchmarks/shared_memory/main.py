"""Messages between processes of one machine: shared memory against gloo. See README.md in this folder.

Both are opened in the same processes and used in turn. What counts is the median over the rounds of the ratio of their
times of an exchange.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fxpipe.runtime.process.device import reuse_freed_memory
from fxpipe.runtime.wires.addresses import Way
from fxpipe.runtime.wires.board import FolderBoard
from fxpipe.runtime.wires.group import close_group, open_group, peers
from fxpipe.runtime.wires.meeting import prepare_meeting
from fxpipe.runtime.wires.processes import ProcessWires
from fxpipe.runtime.wires.shared_memory import SWITCH

WORKERS = (2, 4, 8)
SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20)
TOTAL = 32 << 20
"""Bytes that a worker sends another one in a round, in 6 to 400 messages."""

LARGE, GOAL, GOAL_LARGE = 1 << 20, 1.0, 1.5


def main() -> None:
    """Measure and print the table; exit code 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="of both sides, in turn")
    parser.add_argument("--quick", action="store_true", help="two workers, 1 round: only to see that it runs")
    options = parser.parse_args()
    print("| workers | who sends | " + " | ".join(f"{size >> 10} KiB" for size in SIZES) + " |")
    print("|---|---|" + "---|" * len(SIZES))
    missed = []
    for workers in WORKERS[: 1 if options.quick else None]:
        rows = measured(workers, 1 if options.quick else options.rounds)
        for who, row in rows.items():
            print(f"| {workers} | {who} | " + " | ".join(map(text, row)) + " |", flush=True)
            for size, times in zip(SIZES, row, strict=True):
                if ratio(times) < (GOAL_LARGE if size >= LARGE else GOAL):
                    missed.append(f"{ratio(times):.2f} times with {size >> 10} KiB, {workers} workers, {who}")
    print(f"missed: {'; '.join(missed)}" if missed else "goals met")
    if missed and not options.quick:
        raise SystemExit(1)


def ratio(times: dict[str, list[float]]) -> float:
    """How many times as fast shared memory is."""
    return statistics.median(gloo / shared for shared, gloo in zip(times["shared"], times["gloo"], strict=True))


def text(times: dict[str, list[float]]) -> str:
    """The microseconds of both, and the ratio."""
    shared, gloo = (f"{1e6 * statistics.median(times[side]):,.0f}" for side in ("shared", "gloo"))
    return f"{shared}, {gloo}, **{ratio(times):.1f}**"


def measured(workers: int, rounds: int) -> dict[str, list[dict[str, list[float]]]]:
    """By who sends, for each size: the seconds of an exchange through either, by round."""
    with tempfile.TemporaryDirectory(prefix="fxpipe_shared_memory_") as folder:
        prepare_meeting(FolderBoard(folder))
        mp.spawn(worker, (workers, folder, rounds), nprocs=workers)
        found: dict[str, list[dict[str, list[float]]]] = json.loads((Path(folder) / "found").read_text())
    return found


def worker(rank: int, workers: int, folder: str, rounds: int) -> None:
    """One of the processes; the first writes the times."""
    reuse_freed_memory()
    torch.set_num_threads(1)
    open_group(rank, workers, timedelta(minutes=5), FolderBoard(folder))
    neighbours = [other for other in (rank - 1, rank + 1) if 0 <= other < workers]
    channels: list[Any] = [("link", i, j) for i in range(workers) for j in range(workers) if abs(i - j) == 1]
    sides = {}
    for side, switch in (("shared", "1"), ("gloo", "0")):
        os.environ[SWITCH] = switch
        sides[side] = ProcessWires(rank, "gloo", channels, torch.device("cpu"))
        assert ("shared" in sides[side].name) == (side == "shared"), sides[side].carriers
    found: dict[str, list[dict[str, list[float]]]] = {}
    cases = {"all at once": neighbours} | ({"two of them": [1 - rank] if rank < 2 else []} if workers > 2 else {})
    for who, others in cases.items():
        for size in SIZES:
            count = min(max(TOTAL // size, 6), 400)
            times: dict[str, list[float]] = {side: [] for side in sides}
            for number in range(-1, rounds):  # the first warms up
                for side in sorted(sides, reverse=number % 2 == 0):
                    seconds = exchange(sides[side], size, count, others)
                    if number >= 0:
                        times[side].append(seconds)
            found.setdefault(who, []).append(times)
    if rank == 0:
        (Path(folder) / "found").write_text(json.dumps(found))
    close_group()


def exchange(wires: ProcessWires, size: int, count: int, others: Sequence[int]) -> float:
    """Seconds in which each sends a message to each of the others and receives one, at most two messages ahead."""
    messages = {other: torch.zeros(size, dtype=torch.uint8) for other in others}
    ways = {
        other: (Way(other, ("link", wires.rank, other)), Way(other, ("link", other, wires.rank))) for other in others
    }
    pending: dict[int, deque[Any]] = {other: deque() for other in others}
    with peers():
        dist.barrier()
    begin, sent = perf_counter(), []
    for number in range(count + 1):
        if number < count:
            for other in others:
                pending[other].append(wires.irecv(size, torch.uint8, ways[other][1]))
            sent += [wires.isend(messages[other], ways[other][0]) for other in others]
        if number:
            for other in others:
                message = pending[other].popleft()
                message.wait()
                message.take()
    for each in sent:
        if each is not None:
            each.wait()
    with peers():
        dist.barrier()
    return (perf_counter() - begin) / count


if __name__ == "__main__":
    main()
