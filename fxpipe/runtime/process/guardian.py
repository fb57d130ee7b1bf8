"""A process that outlives the launcher, then ends the workers and removes the folders of the run.

It reads from a pipe whose other end only the launcher has: a process id a line, and `done` at a regular end. When the
pipe ends without that, the launcher was killed. Workers also ask the system to be killed with the launcher
(`fxpipe.runtime.process.child`); but processes that they have started, and the folder, would be left.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

DONE = "done"


class Guardian:
    """The launcher's end of the pipe. Leaving the context is a regular end."""

    def __init__(self, *folders: Path) -> None:
        command = [sys.executable, "-I", "-S", __file__, *map(str, folders)]  # the quickest start: it needs no packages
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def __enter__(self) -> Guardian:
        return self

    def __exit__(self, *_: object) -> None:
        self._say(DONE)
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait()

    def guard(self, process: int) -> None:
        """End this process's group, too."""
        self._say(str(process))

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the guardian was killed
            os.write(self._process.stdin.fileno(), f"{line}\n".encode())  # type: ignore[union-attr]


def main(folders: list[str]) -> None:
    """Wait for the launcher's end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # it ends with the launcher
    groups = []
    for line in map(str.strip, sys.stdin):
        if line == DONE:
            return
        groups.append(int(line))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for _ in range(20):  # a process that ends may still write
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        if not any(map(os.path.exists, folders)):
            return
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1:])
