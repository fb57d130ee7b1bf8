"""`fxpipe` as its user meets it: in this process, which is quick, or in processes of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from warm import Popen, heed_interrupts

from fxpipe.cli import output
from fxpipe.cli.main import main

QUICK = ("--cost", "analytic", "--threads", "1")  # of compile


@dataclass(frozen=True)
class Result:
    """What a command left: its exit code and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """All of stdout, which must be one JSON object."""
        assert self.code == 0, self
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


def fxpipe(*arguments: object) -> Result:
    """Run a command in this process, without the lines about what takes a while: that depends on the machine."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(output, "QUIET", 3600.0)
        with pytest.raises(SystemExit) as stopped:
            main([str(a) for a in arguments])
    assert isinstance(stopped.value.code, int)
    return Result(stopped.value.code, out.getvalue(), err.getvalue())


def start_module(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    """Start `python -m` in a process of its own, the leader of a new session, with torch imported (see `warm`).

    It heeds Ctrl-C even where the tests run in the background, whose children would ignore it.
    """
    return Popen(
        [sys.executable, "-m", *map(str, arguments)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )


def fxpipe_process(*arguments: object, **environment: str) -> Result:
    """Run a command in a process of its own."""
    return finish(start_module("fxpipe", *arguments, **environment), 120)


def free_port() -> int:
    """A port that nothing listens on, for processes that are to meet there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def finish(process: subprocess.Popen[str], timeout: float) -> Result:
    """Wait for a started command; past `timeout` seconds it is killed and the test fails."""
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return Result(process.returncode, out, err)


def wait_for_steps(process: subprocess.Popen[str], out: Path) -> None:
    """Wait until a started run has trained at least one step."""
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.is_file() and metrics.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def processes(text: str) -> dict[int, str]:
    """Processes whose command line holds `text`, by id, each with its name: that of a worker is `fxpipe rank 0`."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text.encode() in (folder / "cmdline").read_bytes():
                found[int(folder.name)] = (folder / "comm").read_text().strip()
    return found


def files(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder: the content of each file, None for a folder. Python's caches do not count."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts
    }


@contextlib.contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """Inside, nothing below `folder` is made, changed or removed for good."""
    before = files(folder)
    yield
    assert files(folder) == before
