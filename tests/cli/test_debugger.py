"""`breakpoint()` and Ctrl-C in a stage of a run whose workers take turns in one process, at a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FXPIPE = [sys.executable, "-m", "fxpipe"]


class Terminal:
    """A process at a terminal of its own."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.screen = ""
        self.end, other = pty.openpty()
        self.process = subprocess.Popen(
            command, cwd=folder, stdin=other, stdout=other, stderr=other, start_new_session=True, close_fds=True
        )
        os.close(other)

    def type(self, text: str) -> None:
        os.write(self.end, text.encode())

    def wait_for(self, pattern: str, seconds: float = 60) -> None:
        """Read until the screen has this, from what was not waited for before."""
        until = time.monotonic() + seconds
        while (found := re.search(pattern, self.screen)) is None:
            assert time.monotonic() < until, self.screen
            if select.select([self.end], [], [], 0.1)[0]:
                try:
                    self.screen += os.read(self.end, 1 << 16).decode(errors="replace")
                except OSError:  # its other end is closed
                    self.process.wait(10)
                    raise AssertionError(f"it ended before {pattern}: {self.screen}") from None
        self.screen = self.screen[found.end() :]

    def wait_for_end(self, seconds: float = 60) -> int:
        """Read on until the process ends, which may write more than a terminal holds unread; its exit code."""
        until = time.monotonic() + seconds
        while (code := self.process.poll()) is None:
            assert time.monotonic() < until, self.screen
            if select.select([self.end], [], [], 0.1)[0]:
                with suppress(OSError):  # its other end is closed
                    self.screen += os.read(self.end, 1 << 16).decode(errors="replace")
        return code


@contextmanager
def trained(folder: Path, edit: str, steps: int) -> Iterator[Terminal]:
    """Train a build of two workers in one process, with a line before the second one's forward returns."""
    (folder / "tiny.py").write_text((ROOT / "docs" / "concepts" / "tiny.py").read_text())
    compiles = [*FXPIPE, "compile", "tiny.py", "-n", "2", "--cost", "analytic", "-o", "build"]
    subprocess.run(compiles, cwd=folder, check=True, capture_output=True)
    stage = folder / "build" / "stage_1.py"
    code = stage.read_text()
    assert code.count("comm.recv") > 1
    stage.write_text(re.sub(r"\n(    \w+ = comm\.recv)", rf"\n    {edit}\n\1", code, count=1))
    terminal = Terminal([*FXPIPE, "run", "build", "--local", "--steps", str(steps), "--out", "out"], folder)
    try:
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.end)


@pytest.mark.slow
def test_a_stage_is_stepped_through(tmp_path: Path) -> None:
    with trained(tmp_path, "breakpoint()", steps=2) as terminal:
        for _ in range(2):
            terminal.wait_for(r"stage_1\.py\(\d+\)forward[\s\S]*\(Pdb\) ")
            terminal.type("next\n")  # it receives: the other worker's turn comes in between
            terminal.wait_for(r"\(Pdb\) ")
            terminal.type("p 6 * 7, len(weights)\n")
            terminal.wait_for(r"\(42, \d\)[\s\S]*\(Pdb\) ")
            terminal.type("continue\n")
        terminal.wait_for(r"loss")
        assert terminal.wait_for_end() == 0


@pytest.mark.slow
def test_quitting_the_debugger_is_no_error_of_the_stage(tmp_path: Path) -> None:
    with trained(tmp_path, "breakpoint()", steps=2) as terminal:
        terminal.wait_for(r"\(Pdb\) ")
        terminal.type("q\n")
        terminal.wait_for("interrupted")
        assert terminal.wait_for_end() == 130
        assert "error" not in terminal.screen


@pytest.mark.slow
def test_ctrl_c_in_a_stage_ends_the_run(tmp_path: Path) -> None:
    with trained(tmp_path, "print('it computes'); import time; time.sleep(600)", steps=2) as terminal:
        terminal.wait_for("it computes")
        os.killpg(terminal.process.pid, 2)
        assert terminal.wait_for_end() == 130
        assert not (tmp_path / "out" / ".fxpipe.lock").exists()
