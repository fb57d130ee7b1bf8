"""Where the two workers are: on two hosts with a real link between them, or, without root, on this one with a meter."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from two_hosts import Host, two_hosts

from fxpipe.planner.device import read_throttle

HERE = Path(__file__).resolve().parent
PORT = 29519
LOOPBACK = "loopback"
LONGEST = 600
"""Seconds that two processes may take for what they are told."""


@dataclass(frozen=True)
class Link:
    """How fast two hosts talk.

    Attributes:
        text: as `fxpipe run --throttle` takes it; or `LOOPBACK`, for two processes of one machine.
        bits: a second, each way.
        latency: seconds.
    """

    text: str
    bits: float
    latency: float

    @staticmethod
    def of(text: str) -> Link:
        """Read `100Mbit` or `100Mbit,20ms`."""
        if text == LOOPBACK:
            return Link(text, math.inf, 0.0)
        links = read_throttle(text, 2)
        assert links is not None
        return Link(text, 8 * links.bandwidth_of(0, 1), links.latency_of(0, 1))

    @property
    def planned(self) -> tuple[str, ...]:
        """The flags that tell a compile of it."""
        if self.text == LOOPBACK:
            return ()
        rate, _, latency = self.text.partition(",")
        return ("--bandwidth", rate, *(("--latency", latency) if latency else ()))


@dataclass(frozen=True)
class Here:
    """This machine, in the place of a host."""

    address: str = "127.0.0.1"
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self, command: Sequence[object], folder: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """As `Host.start`."""
        own = {"OMP_NUM_THREADS": "1", **(environment or {})}
        process = subprocess.Popen(
            [*map(str, command)],
            cwd=folder,
            env={**os.environ, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process


Hosts = Sequence[Host] | Sequence[Here]


@contextlib.contextmanager
def hosts_of(link: Link, real: bool) -> Iterator[Hosts]:
    """Two hosts with this link, if it can be `real`; else this machine, twice, with nothing slow about it."""
    if real:
        with two_hosts(link.bits, latency=link.latency) as hosts:
            yield hosts
        return
    places = (Here(), Here())
    try:
        yield places
    finally:
        for process in (process for place in places for process in place.started if process.poll() is None):
            process.kill()


def measured_link(hosts: Hosts) -> dict[str, float]:
    """Bytes a second and seconds of latency, as `fxpipe doctor --links` finds them under torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1]
    port, doctor = _port(hosts), ["-m", "fxpipe", "doctor", "--links", "--json"]
    commands = [
        [*torchrun, "--node-rank", rank, "--master-addr", hosts[0].address, "--master-port", port, *doctor]
        for rank in (0, 1)
    ]
    with tempfile.TemporaryDirectory() as folder:
        said = _together(hosts, commands, Path(folder), {})
    report = json.loads(said[0])
    return {key: report[key] for key in ("bandwidth", "latency")}


def train(hosts: Hosts, orders: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What `worker.py` answers to `Orders`, a process on each host."""
    file, answer = folder / "orders.json", folder / "answer.json"
    file.write_text(json.dumps({**orders, "answer": str(answer)}))
    answer.unlink(missing_ok=True)
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(_port(hosts))}
    command = [sys.executable, HERE / "worker.py", file]
    _together(hosts, [command, command], folder, environment)
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def _together(
    hosts: Hosts, commands: Sequence[Sequence[object]], folder: Path, environment: Mapping[str, str]
) -> list[str]:
    """What the commands print, one on each host.

    Raises:
        SystemExit: one failed, with what both said; or they are not done in `LONGEST` seconds.
    """
    started = [
        host.start(command, folder, {**environment, "RANK": str(rank)} if environment else None)
        for rank, (host, command) in enumerate(zip(hosts, commands, strict=True))
    ]
    try:
        said = [process.communicate(timeout=LONGEST) for process in started]
    except subprocess.TimeoutExpired:
        raise SystemExit(f"not done in {LONGEST} s: {' '.join(map(str, commands[0]))}") from None
    if any(process.returncode for process in started):
        raise SystemExit("\n".join(f"worker {rank}:\n{error}" for rank, (_, error) in enumerate(said)))
    return [out for out, _ in said]


def _port(hosts: Hosts) -> int:
    """One that is free: on hosts of their own, any."""
    if isinstance(hosts[0], Host):
        return PORT
    with socket.socket() as found:
        found.bind((hosts[0].address, 0))
        port: int = found.getsockname()[1]
    return port
