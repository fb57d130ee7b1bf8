"""Two hosts on one machine: network namespaces with a link of a given bandwidth and latency between them.

Each host has its own network, and its own view of the files: what it is given is at the same path on both, but not the
same folder. The link is a pair of virtual interfaces, each of which lets so many bits a second out (`tc tbf`). With a
latency, they are TUN devices, and a process carries the packets (`delayed_wire`). Needs root. Whatever happens, the
hosts go, and with them all that was started on them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import delayed_wire  # whoever finds this file finds that one

PREFIX = "fxpipe-links"
NETWORK = "10.213.77"
BURST = 0.0005
"""Seconds of the link's rate that may pass at once after a pause."""

PACKET = 9000
"""Bytes, the most, of a packet on a link with latency: each costs the process that carries it the same time."""

SEGMENTS = {200e6: 1500, 2e9: 16384}
"""By the bits a second below which it is so: the largest packet. Small ones cost more processor, and let less burst."""


@dataclass(frozen=True)
class Host:
    """One of the two.

    Attributes:
        mounts: for each path of this host, the folder that is there.
        started: the processes that were started on it.
    """

    name: str
    interface: str
    address: str
    mounts: Mapping[Path, Path]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self, command: Sequence[object], folder: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a command on the host, in `folder`; its output is in pipes."""
        script = "".join(f"mount --bind '{source}' '{path}' && " for path, source in self.mounts.items())
        inside = ["ip", "netns", "exec", self.name, "sh", "-c", f'{script}exec "$@"', "sh"]
        own = {"GLOO_SOCKET_IFNAME": self.interface, "OMP_NUM_THREADS": "1", **(environment or {})}
        process = subprocess.Popen(
            [*inside, *map(str, command)],
            cwd=folder,
            env={**os.environ, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process


def missing(latency: float = 0.0) -> str | None:
    """Why there can be no such hosts here, in words; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"there is no command {program} (Debian's package iproute2)"
    try:
        with two_hosts(1e9, latency=latency):
            return None
    except OSError as error:
        return f"{error.filename or 'TUN devices'}: {error.strerror}"
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


@contextlib.contextmanager
def two_hosts(
    bits: float, own: Mapping[Path, Sequence[Path]] | None = None, latency: float = 0.0
) -> Iterator[tuple[Host, Host]]:
    """Two hosts, and a link of so many bits a second, each way, between them.

    Args:
        own: for each path, the folders that the first and the second host have there.
        latency: seconds that a packet takes besides, each way.

    Raises:
        CalledProcessError: the system refuses one of these things.
        OSError: there are no TUN devices, for a link with latency.
    """
    _forget_dead()
    segment = PACKET if latency else next((size for most, size in SEGMENTS.items() if bits < most), 65536)
    hosts: list[Host] = []
    names = [f"{PREFIX}-{os.getpid()}-{k}" for k in (0, 1)]
    ends = ["fx-left", "fx-right"]  # which differ, so that each host must say what its interface is called
    wire = contextlib.ExitStack()
    try:
        for name in names:
            _do("ip", "netns", "add", name)
        if latency:
            wire.enter_context(_delayed(names, ends, latency))
        else:
            _do("ip", "link", "add", ends[0], "netns", names[0], "type", "veth", "peer", ends[1], "netns", names[1])
        for k, (name, end) in enumerate(zip(names, ends, strict=True)):
            _do("ip", "-n", name, "address", "add", f"{NETWORK}.{k + 1}/24", "dev", end)
            _do("ip", "-n", name, "link", "set", end, "gso_max_size", str(segment))
            _do("ip", "-n", name, "link", "set", end, "up")
            _do("ip", "-n", name, "link", "set", "lo", "up")
            _limit(name, end, bits, segment)
        hosts += (
            Host(name, end, f"{NETWORK}.{k + 1}", {path: folders[k] for path, folders in (own or {}).items()})
            for k, (name, end) in enumerate(zip(names, ends, strict=True))
        )
        yield hosts[0], hosts[1]
    finally:
        for process in (process for host in hosts for process in host.started if process.poll() is None):
            os.killpg(process.pid, signal.SIGKILL)  # it may not have got to its host yet
        for name in names:
            _remove(name)
        wire.close()


@contextlib.contextmanager
def _delayed(names: Sequence[str], ends: Sequence[str], seconds: float) -> Iterator[None]:
    """A TUN device in each network, and the process that carries packets between them."""
    opened: list[int] = []
    carrier: subprocess.Popen[bytes] | None = None
    try:
        for name, end in zip(names, ends, strict=True):
            made = (
                f"fxt{os.getpid()}-{len(opened)}"  # here, where it is for a moment, another process may make one, too
            )
            opened.append(delayed_wire.open_device(made))
            _do("ip", "link", "set", made, "netns", name, "name", end, "mtu", str(PACKET), "txqueuelen", "10000")
        command = [sys.executable, delayed_wire.__file__, *map(str, opened), str(seconds)]
        carrier = subprocess.Popen(command, pass_fds=opened, start_new_session=True)
        for descriptor in opened:  # so that the devices go with the process
            os.close(descriptor)
        opened.clear()
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)
        if carrier is not None:
            carrier.kill()
            carrier.wait()


def slow_down(hosts: Sequence[Host], bits: float) -> None:
    """From now on the link lets so many bits a second through, each way."""
    for host in hosts:
        _limit(host.name, host.interface, bits, next(iter(SEGMENTS.values())))


def _limit(name: str, interface: str, bits: float, segment: int) -> None:
    # TCP may send two segments, with headers, as one packet. One that waits in the queue when the rate falls, and is
    # larger than the new burst, would block the link for ever.
    burst = max(4 * segment, int(bits / 8 * BURST))
    shaped = ["rate", f"{bits:.0f}bit", "burst", str(burst), "limit", str(max(4 * burst, 1 << 22))]
    _do("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", interface, "root", "tbf", *shaped)


def _remove(name: str) -> None:
    """End what runs on a host, and the host."""
    for _ in range(50):
        found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
        if not found:
            break
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.1)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _forget_dead() -> None:
    """Remove the hosts of processes that were killed before they could."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for name, pid in re.findall(rf"^({PREFIX}-(\d+)-\d)\b", listed, re.MULTILINE):
        if not Path(f"/proc/{pid}").exists():
            _remove(name)


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
