"""A run in processes of its own, seen from outside: its processes, their sockets, what they leave."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from warm import heed_interrupts

from fxpipe.runtime.options import RunOptions

LAUNCH = """import sys
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.launch import launch
launch(RunOptions.from_json(sys.argv[1]), int(sys.argv[2]))"""


class StartedRun:
    """A launcher that was started, and what it has started."""

    def __init__(self, command: list[str], temporary: Path) -> None:
        temporary.mkdir(exist_ok=True)
        self.temporary = temporary
        self.launcher = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, "TMPDIR": str(temporary)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=heed_interrupts,
        )

    def workers(self) -> dict[int, int]:
        """Process ids by rank; while torch is imported, it is the same for all."""
        found: dict[int, int] = {}
        for process in self.all():
            with contextlib.suppress(OSError):
                name = Path(f"/proc/{process}/comm").read_text()
                if name.startswith("fxpipe rank "):
                    found[int(name.split()[2])] = process
                    continue
                words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
                if b"fxpipe.runtime.process.child" in words:
                    found = {int(rank): process for rank in words[7:-1]} | found
        return found

    def all(self) -> list[int]:
        """All processes that belong to the run: they share its folder for temporary files."""
        mark = f"TMPDIR={self.temporary}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (path / "environ").read_bytes().split(b"\0") and state_of(int(path.name)) != "Z":
                    found.append(int(path.name))
        return found

    def until(self, holds: Callable[[], object], seconds: float = 60) -> None:
        """Wait until something holds, while the launcher runs."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert self.launcher.poll() is None, self.launcher.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def ends(self, seconds: float) -> tuple[int, str]:
        """Wait for the launcher; its exit code and what it wrote to stderr."""
        _, err = self.launcher.communicate(timeout=seconds)
        return self.launcher.returncode, err

    def is_gone(self, seconds: float) -> None:
        """Every process and every file of the run is gone within so many seconds."""
        deadline = time.monotonic() + seconds
        while left := [*self.all(), *self.temporary.glob("fxpipe*")]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)


def started_run(options: RunOptions, workers: int, temporary: Path) -> contextlib.AbstractContextManager[StartedRun]:
    """Start a run; in the end whatever is left of it is killed."""
    return started_command(["-c", LAUNCH, options.to_json(), str(workers)], temporary)


@contextlib.contextmanager
def started_command(command: list[str], temporary: Path) -> Iterator[StartedRun]:
    """Start a run by what Python is to be given; in the end whatever is left of it is killed."""
    run = StartedRun(command, temporary)
    try:
        yield run
    finally:
        run.launcher.kill()
        run.launcher.wait()
        for process in run.all():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def listening_addresses(processes: list[int]) -> set[str]:
    """The addresses on which processes listen for TCP, as /proc/net/tcp writes them, without ports."""
    own = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    own.add(os.readlink(entry.path))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in own:
                found.add(columns[1].partition(":")[0])
    return found


def state_of(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
