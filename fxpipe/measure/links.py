"""The cost of messages between processes, measured with the runtime's own wires: between processes that torchrun
started, on one or several machines, or between new ones on this machine.

`python -m fxpipe.measure.links FOLDER BYTES` is one of the new processes. They have their own sessions, so that Ctrl-C
reaches only their launcher, and end with it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import permutations, product
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from fxpipe.costs.timer import Rounds
from fxpipe.errors import RunError
from fxpipe.observe.pulse import Signs, no_numbers
from fxpipe.planner.links import Links, matrix
from fxpipe.runtime.process.child import only_here
from fxpipe.runtime.process.device import common_backend, own_device, reuse_freed_memory
from fxpipe.runtime.process.ends import end_process, first_cause, leave_error
from fxpipe.runtime.process.guardian import Guardian
from fxpipe.runtime.wires.addresses import Way
from fxpipe.runtime.wires.board import FolderBoard
from fxpipe.runtime.wires.exchange import gathered
from fxpipe.runtime.wires.group import close_group, leave_after, open_group, peers, place_of_process
from fxpipe.runtime.wires.meeting import prepare_meeting, widen_queues
from fxpipe.runtime.wires.processes import Carrier, ProcessWires
from fxpipe.typed_json import read

Transport = Literal[
    "gloo", "gloo and shared memory", "gloo and peer memory", "gloo-cuda", "nccl", "nccl and peer memory",
    "shared memory", "peer memory",
]  # fmt: skip

SMALL = 4 << 10
"""Bytes of a round trip's messages."""

SIZES = (1 << 20, 2 << 20, 4 << 20, 8 << 20)
"""Bytes of messages in a stream."""

ROUNDS = Rounds.exactly(200, warm=20)
"""Round trips of small messages; both ends run the same number."""

AHEAD = 4
"""Receives posted ahead, and sends under way, as in the runtime."""

TOTAL = 16 << 20
"""Bytes that each pair sends for each size: 10 seconds at 100 Mbit/s."""

NEAR = 128 << 20
"""The same on one machine."""

ALL = 8
"""Up to this many processes measure all pairs; more only measure neighbours, as in pipelines."""

PATIENCE = timedelta(minutes=10)
"""How long a process waits for another."""

SAID, REPORT = "said", "report"
"""The keys of how many pairs are measured, and of the `LinkReport`, on the board of `measure_links`."""


@dataclass(frozen=True)
class PairTimes:
    """What one process measured with another, in one direction."""

    source: int
    target: int
    latency: float  # seconds one way, from round trips of 4 KiB
    bandwidth: tuple[float, ...]  # bytes a second, for each of `SIZES`
    copy: float  # processor seconds a byte, the mean of both ends


@dataclass(frozen=True)
class LinkReport:
    """Pairs of processes over one transport: all of them, or some."""

    transport: Transport
    workers: int
    pairs: tuple[PairTimes, ...]
    alike: bool = True  # whether all pairs are equivalent, as on one machine
    carriers: tuple[Carrier, ...] = ()  # what carries messages in each direction, measured or not

    @property
    def by_device(self) -> bool:
        """Whether devices copy the messages, and the host has no part in that."""
        return "nccl" in self.transport or self.transport == "peer memory"

    @property
    def coverage(self) -> str | None:
        """How many pairs were measured, in words; None if all were."""
        total = self.workers * (self.workers - 1)
        if len(self.pairs) == total:
            return None
        return f"{len(self.pairs)} of {total} pairs" + (", which are alike" if self.alike else "")

    @property
    def links(self) -> Links:
        """For the planner and the simulator: the median over the pairs; if pairs differ, a matrix of them.

        In the matrix, pairs that were not measured get the median.
        """
        copy = 0.0 if self.by_device else statistics.median(p.copy for p in self.pairs)
        rate = statistics.median(_overall(p) for p in self.pairs)
        latency = statistics.median(p.latency for p in self.pairs)
        if self.workers == 2 or (self.alike and not self.by_device):
            return Links(rate, latency, copy)
        ranks = range(self.workers)
        rates = [[rate if i != j else float("inf") for j in ranks] for i in ranks]
        latencies = [[latency if i != j else 0.0 for j in ranks] for i in ranks]
        for pair in self.pairs:
            rates[pair.source][pair.target] = _overall(pair)
            latencies[pair.source][pair.target] = pair.latency
        return Links(matrix(rates), matrix(latencies), copy)


def _overall(pair: PairTimes) -> float:
    return len(pair.bandwidth) / sum(1 / rate for rate in pair.bandwidth)


def measure_links(workers: int = 2, total: int = NEAR, say: Callable[[str], None] = lambda text: None) -> LinkReport:
    """The result of `measure_group` for `workers` new processes on this machine."""
    with (
        tempfile.TemporaryDirectory(prefix="fxpipe_links_", ignore_cleanup_errors=True) as folder,
        Guardian(Path(folder)) as guardian,
    ):
        board = FolderBoard(folder)
        prepare_meeting(board)
        command = [sys.executable, "-P", "-m", "fxpipe.measure.links", folder, str(total)]
        processes: list[subprocess.Popen[bytes]] = []
        codes: list[int | None] = [None]
        progress = ""
        try:
            for rank in range(workers):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(workers)}
                setting: dict[str, Any] = {"env": {**os.environ, **place}, "start_new_session": True}
                processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, **setting))
                guardian.guard(processes[-1].pid)
            while None in codes and not any(codes):
                time.sleep(0.05)
                codes = [process.poll() for process in processes]
                before, progress = progress, board.get(SAID) or ""
                if progress != before:
                    say(progress)
        finally:
            for process in processes:
                process.kill()
            for process in processes:  # after all kills: none has time to miss another
                process.wait()
        if failed := {rank: code for rank, code in enumerate(codes) if code}:
            raise first_cause(board, failed, [Signs.of(no_numbers())] * workers)
        hint = "the machine may be out of disk space: try again"
        return read(board.get(REPORT) or "", LinkReport, error=RunError, hint=hint, where=folder)


def main(folder: Path, total: int) -> None:
    """One of the processes of `measure_links`; the first writes what all have measured."""
    only_here()
    rank, board = int(os.environ["RANK"]), FolderBoard(folder)

    def say(text: str) -> None:
        if rank == 0:
            board.set(SAID, text, patient=False)

    try:
        report = measure_group(total, say, board)
        if rank == 0:
            board.set(REPORT, json.dumps(dataclasses.asdict(report)), patient=False)
    except BaseException as error:
        leave_error(board, rank, error)
        end_process(1)
    end_process(0)


def measure_group(
    total: int = TOTAL, say: Callable[[str], None] = lambda text: None, board: FolderBoard | None = None
) -> LinkReport:
    """Latency, bandwidth and processor time between the processes of the group that the environment describes.

    Every process calls it, and gets the same result. They communicate as workers of a run would: through memory that
    they share, else over NCCL if each has its own CUDA device, else over gloo. Each pair sends `total` bytes for each
    size. Processes of one machine connect through the folder of `board` (see `open_group`).
    """
    place = place_of_process()
    if place is None or place[1] < 2:
        raise RunError("a link needs at least two processes", hint="torchrun --nproc-per-node 2 …, or --nnodes 2")
    rank, workers = place
    reuse_freed_memory()
    widen_queues()
    torch.set_num_threads(1)
    open_group(rank, workers, PATIENCE, board)
    try:
        device = own_device("cuda" if all(gathered(torch.cuda.is_available())) else "cpu")
        backend = common_backend(device)
        pairs = pairs_of_group(workers)
        wires = ProcessWires(rank, backend, [("link", *pair) for pair in permutations(range(workers), 2)], device)
        rows = []
        with peers():
            for row in _measured(wires, workers, pairs, total):
                rows.append(row)
                say(f"measured {len(rows)} of {len(pairs)} pairs")
    except BaseException as error:
        leave_after(error)
        raise
    close_group()
    transport = cast("Transport", "gloo-cuda" if wires.staged and wires.name == "gloo" else wires.name)
    return LinkReport(transport, workers, tuple(rows), board is not None, tuple(wires.carriers))


def pairs_of_group(workers: int) -> list[tuple[int, int]]:
    """All (source, target) pairs of a few processes; for many, only neighbours."""
    near = workers if workers <= ALL else 1
    return [(i, j) for i, j in product(range(workers), repeat=2) if 0 < abs(i - j) <= near]


def _measured(wires: ProcessWires, workers: int, pairs: Sequence[tuple[int, int]], total: int) -> Iterator[PairTimes]:
    """Measure pairs of the processes of the default group, one after the other; all of them do it."""
    for source, target in pairs:
        dist.barrier()
        mine = _End(wires, source, target).measure(total) if wires.rank in (source, target) else None
        ends: list[Any] = [None] * workers
        dist.all_gather_object(ends, mine)
        sent, received = ends[source], ends[target]
        copy = (sent["copy"] + received["copy"]) / 2
        yield PairTimes(source, target, sent["latency"], tuple(received["bandwidth"]), copy)


class _End:
    """One end of a pair: sends as `source`, receives as `target`, with the wires' own calls."""

    def __init__(self, wires: ProcessWires, source: int, target: int) -> None:
        self.wires = wires
        self.sends = wires.rank == source
        self.peer = target if self.sends else source
        self.there, self.back = (Way(self.peer, ("link", *ends)) for ends in ((source, target), (target, source)))

    def measure(self, total: int) -> dict[str, Any]:
        """This end's measurements: each end measures everything, but some figures are taken from one end only."""
        latency = self._latency()
        bandwidth: list[float] = []
        moved, busy = 0, 0.0
        for size in SIZES:
            count = max(total // size, 2 * AHEAD)
            rate, processor = self._stream(size, count)
            bandwidth.append(rate)
            moved, busy = moved + count * size, busy + processor
        return {"latency": latency, "bandwidth": bandwidth, "copy": busy / moved}

    def _latency(self) -> float:
        """Seconds one way: half a round trip, with the receive posted before."""
        message = torch.zeros(SMALL, dtype=torch.uint8, device=self.wires.device)
        outward, inward = (self.there, self.back) if self.sends else (self.back, self.there)
        taken = []
        pending = self.wires.irecv(SMALL, torch.uint8, inward)
        for i, measured in enumerate(ROUNDS.run(), start=1):
            if self.sends:
                begin = time.perf_counter()
                sent = self.wires.isend(message, outward)
                self._take(pending)
                if measured:
                    taken.append((time.perf_counter() - begin) / 2)
            else:
                self._take(pending)
                sent = self.wires.isend(message, outward)
            if i < ROUNDS.warm + ROUNDS.most:
                pending = self.wires.irecv(SMALL, torch.uint8, inward)
            if sent is not None:
                sent.wait()
        return statistics.median(taken) if taken else 0.0

    def _stream(self, size: int, count: int) -> tuple[float, float]:
        """Messages one after the other: bytes a second as they arrive, and this process's processor seconds.

        The receiver answers each, and the sender is at most `AHEAD` answers ahead, as a schedule keeps it.
        """
        message = torch.zeros(size, dtype=torch.uint8, device=self.wires.device)
        answer = message[:1].clone()
        value, way, other = (message, self.there, self.back) if self.sends else (answer, self.back, self.there)
        pending: deque[Any] = deque()
        sent: list[Any] = []
        begin, processor = 0.0, time.process_time()
        for i in range(count):
            while len(pending) < min(AHEAD, count - i):
                pending.append(self.wires.irecv(len(answer if self.sends else message), torch.uint8, other))
                if self.sends:
                    sent.append(self.wires.isend(value, way))
            self._take(pending.popleft())
            if not self.sends:
                sent.append(self.wires.isend(value, way))
            if i == AHEAD - 1:  # the first ones came while the sender was still starting
                begin = time.perf_counter()
        rate = 0.0 if self.sends else (count - AHEAD) * size / (time.perf_counter() - begin)
        for each in sent:
            if each is not None:
                each.wait()
        return rate, time.process_time() - processor

    def _take(self, pending: Any) -> None:
        pending.wait()
        pending.take()
        if self.wires.device.type == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
