"""`make compat` counts what pytest says in each environment, and goes on after one that fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from by_path import module_at

compat = module_at(Path(__file__).parent / "compat.py", "compat")
TESTS = """
import pytest

def test_good(): pass
def test_better(): pass
def test_wrong(): assert False
@pytest.fixture
def broken(): raise OSError
def test_of_what_is_broken(broken): pass
@pytest.mark.skip
def test_skipped(): pass
@pytest.mark.slow
def test_slow(): assert False
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(compat, "PLACE", tmp_path)
    return tmp_path


def environment(place: Path, version: str, command: str, *, installed: bool = True) -> None:
    """Whose python is a shell's command."""
    python = place / version / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{command}\n")
    python.chmod(0o755)
    if installed:
        (place / version / ".installed").touch()


def test_it_goes_on_and_counts(place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    tests, good = place / "test_all.py", place / "test_good.py"
    tests.write_text(TESTS)
    good.write_text("def test(): pass\n")
    this = f'exec "{sys.executable}" "$@"'
    environment(place, "1.0", this)
    environment(place, "1.1", f'echo "$@" > {place}/asked; exit 1', installed=False)
    environment(place, "1.2", "exit 4")
    environment(place, "1.3", f"{this} -k good")
    command = ["compat.py", "--jobs", "0", "--versions", "1.0", "1.1", "1.2", "1.3", "--", str(tests), str(good)]
    monkeypatch.setattr(sys, "argv", command)
    assert compat.main() == 1
    lines = capfd.readouterr().out.splitlines()
    start = lines.index("torch       passed  failed skipped")
    assert [line.split(maxsplit=4) for line in lines[start + 1 :]] == [
        ["1.0", "3", "2", "1", "failed"],
        ["1.1", "0", "0", "0", "not installed: pip says why"],
        ["1.2", "0", "0", "0", "pytest ended with code 4"],
        ["1.3", "2", "0", "0"],
    ]
    asked = (place / "asked").read_text()
    assert asked.startswith("-m pip install")
    assert asked.endswith("torch==1.1\n")
    monkeypatch.setattr(sys, "argv", ["compat.py", "--jobs", "0", "--versions", "1.3", "--", str(tests)])
    assert compat.main() == 0


def test_its_tests_are_there() -> None:
    assert [name for name in compat.TESTS if not (compat.ROOT / name).exists()] == []
