"""What messages between processes of this machine cost, measured over the runtime's own wires.

`python -m fxpipe.measure.links REQUEST` is one of the processes. They are started in sessions of their own, so that
Ctrl-C reaches only their parent. They end when their standard input closes, so none outlives it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fxpipe.costs.timer import Rounds
from fxpipe.errors import RunError
from fxpipe.planner.links import Links, matrix
from fxpipe.typed_json import read

if TYPE_CHECKING:
    from fxpipe.runtime.wires.distributed import Wires

Transport = Literal["gloo", "gloo-cuda", "nccl"]

SMALL = 4 << 10
"""Bytes of the messages that go back and forth."""

SIZES = (1 << 20, 2 << 20, 4 << 20, 8 << 20)
"""Bytes of the messages that follow each other."""

ROUNDS = Rounds.exactly(200, warm=20)
"""Round trips of small messages: both ends count the same."""

AHEAD = 4
"""Receives that are posted ahead, and sends under way, as in the runtime."""

PATIENCE = 180.0
"""The test is given up if no pair is measured in this many seconds; the first ones include starting the processes."""

ALIKE = 6
"""Pairs that are measured over gloo, at most: on one machine all are alike, and only their medians matter."""


@dataclass(frozen=True)
class PairTimes:
    """What one process measured with another, in one direction.

    Attributes:
        latency: seconds one way, of 4 KiB there and back.
        bandwidth: bytes a second, for each of `SIZES`.
        copy: processor seconds a byte, the mean of both ends.
    """

    source: int
    target: int
    latency: float
    bandwidth: tuple[float, ...]
    copy: float


@dataclass(frozen=True)
class LinkReport:
    """Pairs of processes over one transport: all of them, or some.

    Attributes:
        alike: whether all pairs are alike, as over gloo on one machine.
    """

    transport: Transport
    workers: int
    pairs: tuple[PairTimes, ...]
    alike: bool = True

    @property
    def coverage(self) -> str | None:
        """How many pairs were measured, in words; None if all were."""
        total = self.workers * (self.workers - 1)
        if len(self.pairs) == total:
            return None
        return f"{len(self.pairs)} of {total} pairs" + (", which are alike" if self.alike else "")

    @property
    def links(self) -> Links:
        """For the planner and the simulator: medians of the pairs; where these differ, a matrix of them.

        In it, pairs that were not measured are like the median.
        """
        copy = 0.0 if self.transport == "nccl" else statistics.median(p.copy for p in self.pairs)
        rate = statistics.median(_overall(p) for p in self.pairs)
        latency = statistics.median(p.latency for p in self.pairs)
        if self.workers == 2 or (self.alike and self.transport != "nccl"):
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


def transports(workers: int) -> tuple[Transport, ...]:
    """What can be measured here: gloo, and what CUDA workers would use if there are devices."""
    import torch
    import torch.distributed as dist

    devices = torch.cuda.device_count()
    if not devices:
        return ("gloo",)
    return ("gloo", "nccl" if devices >= workers and dist.is_nccl_available() else "gloo-cuda")


def pairs_to_measure(workers: int, transport: Transport) -> list[tuple[int, int]]:
    """All (source, target), or over gloo up to `ALIKE` of them, spread over the processes."""
    pairs = list(permutations(range(workers), 2))
    return pairs if transport == "nccl" else pairs[:: -(-len(pairs) // ALIKE)]


def measure_links(
    workers: int = 2,
    transport: Transport = "gloo",
    total: int = 128 << 20,
    say: Callable[[str], None] = lambda text: None,
) -> LinkReport:
    """Latency, bandwidth and processor time between `workers` new processes, one pair after the other.

    Args:
        total: bytes sent for each size, three times.
        say: is called with how many pairs are measured.

    Raises:
        RunError: a process failed or did not come back; the others were ended.
    """
    with tempfile.TemporaryDirectory(prefix="fxpipe_links_") as exchange:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(workers):
                processes.append(_start(exchange, rank, workers, transport, total))
            _wait(processes, Path(exchange), len(pairs_to_measure(workers, transport)), say)
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        hint = "the machine may be out of disk space: try again"
        pairs = read(Path(exchange) / "pairs.json", tuple[PairTimes, ...], error=RunError, hint=hint)
    return LinkReport(transport, workers, pairs)


def _start(exchange: str, rank: int, workers: int, transport: str, total: int) -> subprocess.Popen[bytes]:
    request = {"exchange": exchange, "rank": rank, "workers": workers, "transport": transport, "total": total}
    command = [sys.executable, "-P", "-m", "fxpipe.measure.links", json.dumps(request)]
    with open(Path(exchange) / f"{rank}.err", "wb") as errors:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=errors, start_new_session=True)


def _wait(processes: Sequence[subprocess.Popen[bytes]], exchange: Path, pairs: int, say: Callable[[str], None]) -> None:
    """Return when all have ended well; raise when one has not, without waiting for the others."""
    measured, deadline = 0, time.monotonic() + PATIENCE
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            break
        if (exchange / f"measured_{measured}").exists():
            measured, deadline = measured + 1, time.monotonic() + PATIENCE
            say(f"measured {measured} of {pairs} pairs")
            continue
        if time.monotonic() > deadline:
            raise RunError(
                f"the link test got stuck: {measured} of {pairs} pairs measured, and none in the last {PATIENCE:.0f} s",
                hint="the machine may be too busy: try again when it is not, or with fewer processes (-n)",
            )
        time.sleep(0.05)
    failed = {rank: process.poll() for rank, process in enumerate(processes) if process.poll()}
    if failed:
        said = {rank: _last_line(exchange / f"{rank}.err") or f"exit code {code}" for rank, code in failed.items()}
        first = min(said, key=lambda rank: ("PeerLost" in said[rank], rank))  # PeerLost is a consequence
        raise RunError(
            f"process {first} of the link test failed: {said[first]}",
            hint="`fxpipe doctor` shows which transports are here; the processes talk over the loopback interface",
        )


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line and not line[0].isspace()]
    return lines[-1] if lines else ""


def main(request: dict[str, Any]) -> None:
    """One process of the test; the first writes what all have measured."""
    threading.Thread(target=_end_with_parent, args=(request["exchange"],), daemon=True).start()
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    import torch
    import torch.distributed as dist

    from fxpipe.runtime.process.allocator import reuse_freed_memory
    from fxpipe.runtime.process.end_process import end_process
    from fxpipe.runtime.wires.distributed import Wires

    reuse_freed_memory()
    torch.set_num_threads(1)
    rank, workers, transport = request["rank"], request["workers"], request["transport"]
    device = torch.device("cpu")
    if transport != "gloo":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    store = Path(request["exchange"]) / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=workers)
    channels = [("link", *pair) for pair in permutations(range(workers), 2)]
    wires = Wires(rank, transport.removesuffix("-cuda"), channels, device)
    rows: list[PairTimes] = []
    for row in measured(wires, workers, pairs_to_measure(workers, transport), request["total"], rounds=3):
        if rank == 0:
            (Path(request["exchange"]) / f"measured_{len(rows)}").touch()
        rows.append(row)
    if rank == 0:
        text = json.dumps([dataclasses.asdict(row) for row in rows])
        (Path(request["exchange"]) / "pairs.json").write_text(text)
    dist.barrier()
    end_process(0)


def measured(
    wires: Wires, workers: int, pairs: Sequence[tuple[int, int]], total: int, rounds: int
) -> Iterator[PairTimes]:
    """Measure pairs of the processes of the default group, one after the other; all of them do it.

    Args:
        total: bytes sent for each size, so many `rounds`.
    """
    import torch.distributed as dist

    for source, target in pairs:
        dist.barrier()
        mine = _End(wires, source, target).measure(total, rounds) if wires.rank in (source, target) else None
        ends: list[Any] = [None] * workers
        dist.all_gather_object(ends, mine)
        sent, received = ends[source], ends[target]
        copy = (sent["copy"] + received["copy"]) / 2
        yield PairTimes(source, target, sent["latency"], tuple(received["bandwidth"]), copy)


def _end_with_parent(exchange: str) -> None:
    sys.stdin.buffer.read()  # ends when the parent does
    shutil.rmtree(exchange, ignore_errors=True)  # no one else is left to do it
    os._exit(1)


class _End:
    """One end of a pair: sends as `source`, receives as `target`, by the wires' own calls."""

    def __init__(self, wires: Wires, source: int, target: int) -> None:
        self.wires = wires
        self.sends = wires.rank == source
        self.peer = target if self.sends else source
        self.there, self.back = ("link", source, target), ("link", target, source)

    def measure(self, total: int, rounds: int) -> dict[str, Any]:
        """What this end sees: each end measures everything, but some figures are taken from one end only."""
        latency = self._latency()
        rates: list[list[float]] = []
        moved, busy = 0, 0.0
        for _ in range(rounds):
            rates.append([])
            for size in SIZES:
                count = max(total // size, 2 * AHEAD)
                rate, processor = self._stream(size, count)
                rates[-1].append(rate)
                moved, busy = moved + count * size, busy + processor
        bandwidth = [statistics.median(column) for column in zip(*rates, strict=True)]
        return {"latency": latency, "bandwidth": bandwidth, "copy": busy / moved}

    def _latency(self) -> float:
        """Seconds one way: half of there and back, the receive posted before."""
        import torch

        message = torch.zeros(SMALL, dtype=torch.uint8, device=self.wires.device)
        outward, inward = (self.there, self.back) if self.sends else (self.back, self.there)
        taken = []
        pending = self.wires.irecv(SMALL, torch.uint8, self.peer, inward)
        for i, measured in enumerate(ROUNDS.run(), start=1):
            if self.sends:
                begin = time.perf_counter()
                sent = self.wires.isend(message, self.peer, outward)
                self._take(pending)
                if measured:
                    taken.append((time.perf_counter() - begin) / 2)
            else:
                self._take(pending)
                sent = self.wires.isend(message, self.peer, outward)
            if i < ROUNDS.warm + ROUNDS.most:
                pending = self.wires.irecv(SMALL, torch.uint8, self.peer, inward)
            self.wires.finished(sent)
        return statistics.median(taken) if taken else 0.0

    def _stream(self, size: int, count: int) -> tuple[float, float]:
        """Messages one after the other: bytes a second as they arrive, and this process's processor seconds."""
        import torch

        message = torch.zeros(size if self.sends else 0, dtype=torch.uint8, device=self.wires.device)
        pending: deque[Any] = deque()
        begin, first, processor = 0.0, AHEAD, time.process_time()
        for i in range(count):
            if self.sends:
                pending.append(self.wires.isend(message, self.peer, self.there))
                if len(pending) == AHEAD:
                    self.wires.finished(pending.popleft())
                continue
            while len(pending) < min(AHEAD, count - i):
                pending.append(self.wires.irecv(size, torch.uint8, self.peer, self.there))
            self._take(pending.popleft())
            if i == first - 1:  # the first ones came while the sender was getting ready
                begin = time.perf_counter()
        rate = 0.0 if self.sends else (count - first) * size / (time.perf_counter() - begin)
        while pending:
            self.wires.finished(pending.popleft())
        return rate, time.process_time() - processor

    def _take(self, pending: Any) -> None:
        import torch

        self.wires.finished(pending)
        self.wires.received(pending)
        if self.wires.device.type == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except Exception:
        traceback.print_exc()
        os._exit(1)  # a normal exit would wait for the threads of a broken process group
