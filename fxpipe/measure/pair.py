"""What is wrong between two machines: each runs `fxpipe doctor --pair OTHER`, and both learn what both have found.

They meet over plain sockets, before torch is asked, since torchrun waits in silence where they cannot. Each listens and
connects to the other, so each direction is tried by itself. Over the connection they then compare what a run compares
and what it does not see, each opens a port that the system chooses, as gloo and NCCL do, and the other sends packets of
full size there. If all this works, `fxpipe doctor --links` runs on both, as torchrun would start it.

What they say is one JSON object a line: nothing that arrives is unpickled, and of who else connects nothing is read.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import select
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import fxpipe
from fxpipe.errors import RunError
from fxpipe.runtime.process.guardian import Guardian

PORT = 29500
"""Of torchrun's store, and the default here."""

ANSWER = 4.0
"""Seconds that one machine has to do what the other one has done, and a connection to be made."""

MEASURE = 180.0
"""The same for all messages of `fxpipe doctor --links`."""

CLOCKS = 1.0
"""Seconds by which clocks may differ: which file of a shared disk is newer is seen by its time."""

BLOB = 256 << 10
"""Bytes that fill packets, whatever size an interface allows."""

LONGEST = 1 << 20
"""Bytes of a line, at most."""

EXCHANGES = 9
_ADDRESS_OF, _MTU_OF = (0x8915, 0x8921) if sys.platform == "linux" else (0xC0206921, 0xC0206933)
"""The numbers of SIOCGIFADDR and SIOCGIFMTU."""


@dataclass(frozen=True)
class Finding:
    """One thing that was tried; `do` says what to do if it does not work."""

    what: str
    seen: str
    do: str | None = None


class _Dialogue:
    """A connection to the other machine: one JSON object a line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.here, self.there = (name()[0] for name in (connection.getsockname, connection.getpeername))
        self._read = b""
        self.hello: dict[str, Any] = {}

    def say(self, **facts: Any) -> None:
        self.connection.settimeout(ANSWER)
        self.connection.sendall(json.dumps(facts).encode() + b"\n")

    def hear(self, seconds: float = 3 * ANSWER) -> dict[str, Any]:
        """What the other says next.

        Raises:
            OSError: it says nothing for so long, or is gone.
            ValueError: it is not this program.
        """
        until = time.monotonic() + seconds
        while b"\n" not in self._read:
            self.connection.settimeout(max(until - time.monotonic(), 0.001))
            if not (more := self.connection.recv(1 << 16)):
                raise ConnectionError(errno.ECONNRESET, "it has ended")
            self._read += more
            if len(self._read) > LONGEST:
                raise ValueError("a line without end")
        line, _, self._read = self._read.partition(b"\n")
        if not isinstance(facts := json.loads(line), dict):
            raise ValueError("no object")
        return facts

    @property
    def spoken(self) -> bool:
        """Whether the other has said something that is not read yet."""
        return bool(self._read) or bool(select.select([self.connection], [], [], 0)[0])


VERSIONS = ("fxpipe", "fxpipe's code", "torch", "Python")


def facts_here() -> dict[str, str]:
    """What must be the same on both machines: `VERSIONS`."""
    code = hashlib.sha256()
    for folder, folders, files in os.walk(Path(fxpipe.__file__).parent, followlinks=True):
        folders.sort()
        for name in sorted(name for name in files if name.endswith(".py")):
            code.update(Path(folder, name).read_bytes())
    python = ".".join(platform.python_version_tuple()[:2])
    return dict(zip(VERSIONS, (fxpipe.__version__, code.hexdigest()[:12], version("torch"), python), strict=True))


class Pair:
    """This machine and the other one, which runs the same. `wait` is how many seconds it has to begin; `facts` must be
    the same on both; `say` is called with what is being done. `links` is what `fxpipe doctor --links --json` printed.
    """

    def __init__(
        self, other: str, port: int, wait: float, facts: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        self.other, self.port, self.wait, self.facts, self.say = other, port, wait, dict(facts), say
        self.links: dict[str, Any] | None = None
        self.name, self.clock, self._id = socket.gethostname(), time.time, os.urandom(16).hex()

    def findings(self) -> Iterator[Finding]:
        """What is found, in the order in which it is tried: after something that keeps the rest from working, no more.

        Raises:
            RunError: this cannot be tried, because the port is taken, or `other` is this machine.
        """
        try:
            address = socket.getaddrinfo(self.other, self.port, socket.AF_INET)[0][4]
            yield from self._together(self._met(address))
        except socket.gaierror as error:
            do = f"give its address, or add a line to /etc/hosts: 'ADDRESS {self.other}'"
            yield Finding(self.other, f"this machine knows no address of IPv4 for it: {error.strerror}", do)
        except (OSError, ValueError, KeyError) as error:
            do = "look at its screen, and begin again on both"
            yield Finding(self.other, f"it has stopped answering: {_why(error)}", do)

    def _listener(self) -> socket.socket:
        try:
            return socket.create_server(("", self.port))
        except OSError as error:
            raise RunError(
                f"port {self.port} of this machine cannot be used: {error.strerror}",
                hint=f"end what listens there (ss -ltnp 'sport = :{self.port}'), or on both machines: --pair HOST:PORT",
            ) from error

    def _met(self, address: Any) -> dict[str, _Dialogue] | str:
        """The lines: 'out' leads to the other machine, 'in' comes from there; or why there is none.

        Tries both directions until each has worked, or one has for some seconds, or the time is up.
        """
        lines: dict[str, _Dialogue] = {}
        until, why, spoke = time.monotonic() + self.wait, "", 0
        with self._listener() as listener:
            while spoke < 2 and time.monotonic() < until:
                try:
                    if select.select([listener], [], [], 0.1)[0]:
                        line = self._greeted(listener.accept()[0])
                        lines |= {} if "in" in lines and lines["in"].hello else {"in": line}
                    if "out" not in lines:
                        lines["out"] = self._greeted(socket.create_connection(address, ANSWER / 4))
                        why = "what listens there says nothing"
                except OSError as error:
                    why = _why(error)
                for way, line in list(lines.items()):
                    try:
                        if not line.hello and line.spoken:
                            line.hello = line.hear(ANSWER)
                            line.hello["facts"], until = (
                                dict(line.hello["facts"]),
                                until if spoke else time.monotonic() + ANSWER,
                            )
                            spoke += 1
                    except (OSError, ValueError, KeyError, TypeError):
                        del lines[way]
                self.say(f"port {self.port} of {self.other}: {why}")
        lines = {way: line for way, line in lines.items() if line.hello}
        if any(line.hello["id"] == self._id for line in lines.values()):
            raise RunError(f"{self.other} is this machine", hint="name the other one: --pair HOST, on each")
        return lines or why

    def _greeted(self, connection: socket.socket) -> _Dialogue:
        line = _Dialogue(connection)
        line.say(id=self._id, name=self.name, facts=self.facts, interface=used(line.here, self.name))
        return line

    def _together(self, lines: dict[str, _Dialogue] | str) -> Iterator[Finding]:
        """What both find, once one has reached the other. The one with the smaller number leads."""
        if isinstance(lines, str):
            yield Finding(
                self.other,
                f"nothing answers at port {self.port} after {self.wait:g} s: {lines}",
                f"run this command there, too, and keep it running; compare the address with `ip address` there; let "
                f"port {self.port} through both firewalls: sudo ufw allow from ADDRESS_OF_THE_OTHER",
            )
            return
        line = lines.get("out") or lines["in"]
        there = line.hello
        if leads := self._id < there["id"]:
            line.say(leads=True)
        else:
            if not any(each.spoken for each in lines.values()):
                select.select([each.connection for each in lines.values()], [], [], 3 * ANSWER)
            line = next((each for each in lines.values() if each.spoken), line)
            line.hear()
        ends = (line.here, line.there)
        yield Finding("machines", f"{ends[0]} ({self.name}) is here, {ends[1]} ({there['name']}) is the other one")
        sound = len(lines) == 2
        for direction, (start, end) in (("out", ends), ("in", ends[::-1])):
            seen, do = f"port {self.port} answers", None
            if direction not in lines:
                seen, do = f"port {self.port} does not answer, and the other direction works", _admit(start, end)
            yield Finding(f"{start} → {end}", seen, do)
        interface = used(line.here, self.name)
        yield from (Finding("interface", *each[1:]) for each in (interface, there["interface"]))
        yield self._clocks(line, leads)
        yield from compare(self.facts, there["facts"], *ends)
        if sound:
            for sends in (leads, not leads):
                tried = self._sent(line) if sends else self._received(line)
                sound = sound and not tried
                yield _of_port(tried, *(ends if sends else ends[::-1]))
        if sound:
            yield self._measured(line, leads, interface[0])
        else:
            yield Finding("messages", "not measured: torchrun would wait for ever", "first do what is said above")

    def _clocks(self, line: _Dialogue, leads: bool) -> Finding:
        """Compare the clocks by the middle of the quickest of some exchanges (see `read_offset`)."""
        self.say("comparing clocks")
        readings = []
        for _ in range(EXCHANGES):
            if leads:
                sent = self.clock()
                line.say(now=True)
                theirs, answered = float(line.hear()["now"]), self.clock()
                readings.append((answered - sent, theirs - (sent + answered) / 2))
            else:
                line.hear()
                line.say(now=self.clock())
        if leads:
            line.say(ahead=min(readings)[1])
        ahead = min(readings)[1] if leads else -float(line.hear()["ahead"])
        if abs(ahead) < CLOCKS:
            return Finding("clocks", f"they differ by {abs(ahead) * 1e3:.0f} ms")
        first, second = (line.there, line.here) if ahead > 0 else (line.here, line.there)
        return Finding(
            "clocks", f"{first} is {abs(ahead):.1f} s ahead of {second}", "on both: sudo timedatectl set-ntp true"
        )

    def _sent(self, line: _Dialogue) -> str:
        """Connect to a port that the other opens, and send a blob; returns what does not work."""
        self.say("trying ports")
        port, problem = int(line.hear()["port"]), ""
        try:
            with socket.create_connection((line.there, port), ANSWER) as trial:
                problem = PACKETS
                trial.sendall(bytes(BLOB))
                problem = "" if trial.recv(1) else "it was closed"
        except OSError as error:
            problem = problem or _why(error)
        line.say(tried=problem)
        return problem

    def _received(self, line: _Dialogue) -> str:
        """The other end of `_sent`."""
        with socket.create_server((line.here, 0)) as listener:
            line.say(port=listener.getsockname()[1])
            if select.select([listener, line.connection], [], [], 3 * ANSWER)[0] == [listener]:
                with listener.accept()[0] as trial, suppress(OSError):  # the sender says what happened
                    trial.settimeout(ANSWER)
                    missing = BLOB
                    while missing and (more := trial.recv(missing)):
                        missing -= len(more)
                    trial.sendall(b"k")
            return str(line.hear()["tried"])

    def _measured(self, line: _Dialogue, leads: bool, interface: str | None) -> Finding:
        """What `fxpipe doctor --links` measures between the two; the one who leads is rank 0."""
        self.say("measuring messages")
        place = {"RANK": "0" if leads else "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        place |= {"MASTER_ADDR": line.here if leads else line.there, "MASTER_PORT": str(self.port)}
        place |= {} if interface is None else dict.fromkeys(INTERFACES, interface)
        command = [sys.executable, "-P", "-m", "fxpipe", "doctor", "--links", "--json"]
        setting: dict[str, Any] = {"env": {**os.environ, **place}, "stdin": subprocess.DEVNULL, "text": True}
        setting |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
        until, theirs = time.monotonic() + MEASURE, dict[str, Any]()
        with Guardian() as guardian:
            process = subprocess.Popen(command, **setting)
            guardian.guard(process.pid)
            try:
                while process.poll() is None and time.monotonic() < until and not theirs.get("error"):
                    theirs = line.hear() if line.spoken else theirs
                    time.sleep(0.05)
            finally:
                process.kill()  # all that it has said is in the pipes: it is little
                out, err = process.communicate()
        errors = [text for text in err.splitlines() if "error: " in text] or [f"no end after {MEASURE:g} s"]
        problem = errors[-1] if process.returncode else ""
        links = json.loads(out) if out and not problem else None
        line.say(error=problem, links=links)
        theirs = theirs or line.hear(MEASURE)
        if problem or theirs["error"]:
            seen = f"{line.there}: {theirs['error']}" if theirs["error"] else f"{line.here}: {problem}"
            return Finding("messages", seen, "`fxpipe doctor --links` under torchrun on both shows all of it")
        self.links = links or theirs["links"]
        ends = (line.here, line.there) if leads else (line.there, line.here)
        pairs = [
            f"{ends[each['source']]} → {ends[each['target']]} {statistics.median(each['bandwidth']) / 1e9:.3f} GB/s, "
            f"{each['latency'] * 1e6:.0f} µs"
            for each in self.links["pairs"]
        ]
        return Finding("messages", f"{self.links['transport']}: {'; '.join(pairs)}")


INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def used(address: str, name: str) -> tuple[str | None, str, str | None]:
    """The interface that has this address of this machine, called `name`; whether a run would use it; what to do.

    The system says only the first address of each: None for others.
    """
    interfaces = {_asked(each, _ADDRESS_OF)[20:24]: each for _, each in socket.if_nameindex()}
    interface = interfaces.get(socket.inet_aton(address))
    if interface is None:
        return None, f"{address}: not compared", None
    do = f"on {address}: export {' '.join(f'{variable}={interface}' for variable in INTERFACES)}"
    for variable in INTERFACES:
        if (value := os.environ.get(variable)) and interface not in value.split(","):
            return interface, f"{variable}={value}, but {address} is that of {interface}", do
    where = _bindable(name)
    if not os.environ.get(INTERFACES[0]) and interfaces.get(socket.inet_aton(where)) != interface:
        alone = " where no other machine can connect," if where.startswith("127.") else ""
        return interface, f"gloo would listen at {where},{alone} since the name {name} leads there: not {interface}", do
    return interface, f"{address}: {interface}, MTU {struct.unpack('i', _asked(interface, _MTU_OF)[16:20])[0]}", None


def _bindable(name: str) -> str:
    """The address that gloo takes where no interface is named: the host name's first that is one of this machine."""
    with suppress(socket.gaierror):
        for *_, address in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM):
            with suppress(OSError), socket.socket() as probe:
                probe.bind(address)
                return str(address[0])
    return "127.0.0.1"


def _asked(interface: str, request: int) -> bytes:
    """The system's answer about an interface; zeros if it has no such thing."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return fcntl.ioctl(probe, request, struct.pack("256s", interface.encode()[:15]))
    return bytes(256)


def compare(facts: Mapping[str, str], others: Mapping[str, str], here: str, there: str) -> Iterator[Finding]:
    """Facts of this machine and the other one: each that differs, else all in one line."""
    differ = [name for name in {**facts, **others} if facts.get(name) != others.get(name)]
    for name in differ:
        do = "copy the build and the model file of one machine to the other, to the same path"
        if name in VERSIONS:
            do = f"install the same {name} on both"
        yield Finding(name, f"{facts.get(name, 'none')} on {here}, {others.get(name, 'none')} on {there}", do)
    if not differ:
        build = ", and all of the build" if len(facts) > len(VERSIONS) else ""
        yield Finding("versions", f"the same {', '.join(f'{name} {facts[name]}' for name in VERSIONS)}{build}")


def _admit(start: str, end: str) -> str:
    return f"on {end}, let {start} through the firewall, at all ports, such as: sudo ufw allow from {start}"


PACKETS = "full packets are lost"


def _of_port(problem: str, start: str, end: str) -> Finding:
    """What a trial of a port says."""
    way, port = f"{start} → {end}", f"a port that {end} chose"
    if problem == PACKETS:
        do = "what is in between takes smaller ones; on both: sudo ip link set dev INTERFACE mtu 1400"
        return Finding(way, f"{port} answers, but {problem}", do)
    if problem:
        return Finding(way, f"{port} does not answer: {problem}", _admit(start, end))
    return Finding(way, f"{port} answers, and packets of full size arrive")


def _why(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer (a firewall drops packets, or the machine is off)"
    if isinstance(error, ConnectionRefusedError):
        return "refused (nothing listens there yet)"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
