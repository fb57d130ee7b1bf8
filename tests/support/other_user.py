"""Another user of the machine, who connects to whatever listens: python other_user.py start|training OUT COMMAND…

The command runs in a network of its own, so all that listens there is its own. From the start, or from its first
training step on, user `nobody` connects to each listening socket: sends gloo's small numbers, to take a seat of a
process that is yet to come; and floods it. Prints as JSON: the exit code, stderr, how many sockets and connections
the other user found and made, and the most bytes that came over one of them.
"""

from __future__ import annotations

import ctypes
import json
import os
import pwd
import resource
import selectors
import socket
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

CLONE_NEWNET = 0x40000000
SEATS, FLOOD = 16, 1000


def listeners() -> set[tuple[str, str]]:
    """Where sockets listen in this network, by kind."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            if (columns := line.split())[3] == "0A":
                found.add((table, columns[1].rpartition(":")[2]))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        columns = line.split()
        if columns[3] == "00010000":  # it accepts connections
            found.add(("unix", columns[7] if len(columns) > 7 else ""))
    return found


def attack(begin: int, end: int, said: int) -> None:
    """Wait for a byte, then attack until the other pipe ends."""
    os.read(begin, 1)
    os.set_blocking(end, False)
    found: set[tuple[str, str]] = set()
    attacks: list[Future[tuple[int, int]]] = []
    pool = ThreadPoolExecutor(32)
    while True:
        for kind, port in listeners() - found:
            found.add((kind, port))
            if kind != "unix":
                attacks.append(pool.submit(assault, int(port, 16)))
        with suppress(BlockingIOError):
            if not os.read(end, 1):
                break
        time.sleep(0.001)
    made, heard = zip((0, 0), *(attack.result() for attack in attacks), strict=True)
    os.write(said, json.dumps({"sockets": len(found), "connections": sum(made), "heard": max(heard)}).encode())


def assault(port: int) -> tuple[int, int]:
    """Connect to a port, over and over; how often that worked, and the most bytes that one connection was sent."""
    held: list[socket.socket] = []
    heard: dict[socket.socket, int] = {}
    deadline = time.monotonic() + 2
    with selectors.DefaultSelector() as waiting, suppress(OSError):
        while len(held) < FLOOD and time.monotonic() < deadline:
            one = socket.socket()
            one.settimeout(1)
            one.connect(("127.0.0.1", port))
            held.append(one)
            if len(held) <= SEATS:
                one.sendall((len(held) - 1).to_bytes(8, "little"))
                heard[one] = 0
                waiting.register(one, selectors.EVENT_READ)
        while heard and time.monotonic() < deadline and (ready := waiting.select(0.2)):
            for key, _ in ready:
                if not (data := key.fileobj.recv(1 << 16)):  # type: ignore[union-attr]
                    waiting.unregister(key.fileobj)
                heard[key.fileobj] += len(data)  # type: ignore[index]
    return len(held), max(heard.values(), default=0)


def main(moment: str, out: Path, command: list[str]) -> None:
    """Run the command among others."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        sys.exit(os.strerror(ctypes.get_errno()))
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    (begun, begin), (over, end), (heard, said) = os.pipe(), os.pipe(), os.pipe()
    other = os.fork()
    if not other:
        os.close(end)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 8192), most))
        os.setgroups([])
        os.setgid(pwd.getpwnam("nobody").pw_gid)
        os.setuid(pwd.getpwnam("nobody").pw_uid)
        try:
            attack(begun, over, said)
        finally:
            os._exit(0)
    if moment == "start":
        os.write(begin, b"!")
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    metrics = out / "metrics.jsonl"
    while moment == "training" and run.poll() is None:
        if metrics.is_file() and metrics.stat().st_size:
            os.write(begin, b"!")
            break
        time.sleep(0.02)
    _, err = run.communicate()
    with suppress(OSError):
        os.write(begin, b"!")  # if no step was trained
    os.close(end)
    os.waitpid(other, 0)
    os.close(said)
    print(json.dumps({"code": run.returncode, "err": err, **json.loads(os.read(heard, 1 << 16))}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
