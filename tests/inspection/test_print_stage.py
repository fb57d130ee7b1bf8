"""A stage's code: untouched in a pipe, coloured and numbered on a terminal."""

from __future__ import annotations

import io
import re
import sys

import pytest

from fxpipe.inspection.print_stage import print_stage

SOURCE = (
    '"""A stage."""\n\nimport torch\n\n\ndef forward(weights, buffers, batch, comm):\r\n'
    '    x = comm.recv("x")  # f32[4] activation from worker 0\n'
    f'    y = {"x + " * 60}x  # "é"\n'
    '    comm.send("y", y)  # activation to worker 2\n\n\n\n'
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_piped_it_is_byte_for_byte(capsys: pytest.CaptureFixture[str]) -> None:
    print_stage(SOURCE)
    out, err = capsys.readouterr()
    assert out == SOURCE
    assert err == ""
    print_stage("x = 1")
    assert capsys.readouterr().out == "x = 1"


def printed(monkeypatch: pytest.MonkeyPatch, source: str, **environment: str) -> str:
    """What a terminal of 80 columns gets."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "80", **environment}.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    print_stage(source)
    return terminal.getvalue()


def test_on_a_terminal_it_is_numbered_and_sends_stand_out(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(monkeypatch, SOURCE)
    reversed_lines = [line for line in text.splitlines() if "7m" in line or ";7;" in line]
    assert len(reversed_lines) == 2
    assert "recv" in reversed_lines[0]
    assert "send" in reversed_lines[1]
    assert re.search(r"\b10 ", re.sub(r"\x1b\[[0-9;]*m", "", text)), "lines are numbered"


def test_without_colour_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(monkeypatch, SOURCE, NO_COLOR="1", TERM="dumb")
    assert text.count("x + ") + text.count("x +\n") >= 55, "long lines are wrapped, not cut"
    assert "  9     comm.send" in text
