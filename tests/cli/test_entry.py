"""Ctrl-C and SIGTERM at any moment: one line, the right exit code, nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiproc
HEEDING = """
import os, signal, sys, tempfile, threading
from fxpipe.cli.entry import main
sys.argv = ["fxpipe", *sys.argv[1:]]
"""


def run(script: str, tmp_path: Path, *arguments: str) -> tuple[int, str]:
    """Run a script in a process of its own that heeds Ctrl-C; its exit code and stderr."""
    (tmp_path / "tmp").mkdir()
    result = subprocess.run(
        [sys.executable, "-c", HEEDING + script, *arguments],
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert list((tmp_path / "tmp").iterdir()) == []
    assert result.stdout == ""
    return result.returncode, result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_an_import(tmp_path: Path, number: signal.Signals) -> None:
    """Whatever the module makes of it: most of all, nothing."""
    (tmp_path / "click.py").write_text(f"""import os, tempfile
folder = tempfile.TemporaryDirectory(prefix="fxpipe_")
try:
    os.kill(os.getpid(), {int(number)})
except BaseException:
    pass
""")
    assert run("main()", tmp_path) == (128 + number, "interrupted\n")


KILL = "os.kill(os.getpid(), NUMBER)"
BODIES = {
    "raised": KILL,
    "turned into another error": f"""
    try:
        {KILL}
    except BaseException:
        raise ImportError""",
    "in a finalizer": f"""
    class Late:
        def __del__(self): {KILL}
    late = Late()
    del late""",
    "in a context": f"""
    with tempfile.TemporaryDirectory():
        {KILL}""",
    "swallowed once": f"""
    for _ in range(2):
        try:
            {KILL}
        except BaseException:
            pass""",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_a_command(tmp_path: Path, body: str, number: signal.Signals) -> None:
    script = f"import fxpipe.cli.main as m\ndef run(): {body.replace('NUMBER', str(int(number)))}\nm.main = run\nmain()"
    assert run(script, tmp_path) == (128 + number, "interrupted\n")


def test_what_is_ignored_stays_so(tmp_path: Path) -> None:
    script = "signal.signal(signal.SIGINT, signal.SIG_IGN)\nimport fxpipe.cli.main as m\n"
    script += "m.main = lambda: os.kill(os.getpid(), signal.SIGINT)\nmain()"
    assert run(script, tmp_path) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_at_any_moment(tmp_path: Path, number: signal.Signals) -> None:
    """From when Python has begun to run fxpipe's code, which an environment variable shows, in steps of 40 ms."""
    for tenth in range(20):
        process = subprocess.Popen(
            [sys.executable, "-c", HEEDING + "print('begun', flush=True)\nmain()", "doctor"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        time.sleep(0.01 + 0.04 * tenth)
        process.send_signal(number)
        _, err = process.communicate(timeout=20)
        assert process.returncode == 128 + number, tenth
        assert err in ("interrupted\n", "\ninterrupted\n"), tenth  # click, inside a command, first ends the line of ^C


@pytest.mark.parametrize("closed", ["1", "2", "0 1 2"])
def test_closed_streams_are_opened(tmp_path: Path, closed: str) -> None:
    """What opens a file next must not get their numbers, and what is printed goes nowhere."""
    script = f"""
import os, subprocess, sys
for number in {closed.split()}:
    os.close(int(number))
child = "import os; [os.fstat(number) for number in (0, 1, 2)]"
run = "import sys; from fxpipe.cli.entry import _open_streams; _open_streams(); print('x'); print('y', file=sys.stderr)"
run += f"; import subprocess; sys.exit(subprocess.run([sys.executable, '-c', {{child!r}}]).returncode)"
os.execv(sys.executable, [sys.executable, "-c", run])
"""
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0


def test_what_an_encoding_lacks_is_replaced(tmp_path: Path) -> None:
    script = "from fxpipe.cli.entry import _open_streams; _open_streams(); print('a · b ─')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)
    assert result.stdout == b"a ? b ?\n"
