"""What each test takes, and what each folder may: `tests/seconds.json`.

    make seconds                          run all tests, write what each takes
    python -m pytest … --budgets          print what each folder takes and may; fail where it takes too much

What took longer than `SLOW` is a slow test, as if it were marked so. Of tests/law, choose.py says what is quick.

A folder's budget is for its quick tests on the machine on which the seconds were written. Elsewhere, or when that
machine is slow, all tests take longer: then budgets grow by how many times longer the median test took than is written.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "seconds.json"
LEAST = 0.05
"""Seconds that are not worth a line."""

SLOW = 0.35
"""Seconds that are too many for a quick test."""

TELLING = 0.15
"""What takes as long tells how slow a machine is."""

ALLOWED, SLACK = 1.5, 20.0
"""How many times its budget a folder may take, and seconds more: single tests vary."""


class Seconds:
    """Adds up what tests take, set-up included, and compares it with the file, or writes that.

    Args:
        writes: the seconds of the tests that ran go into the file.
        holds: a folder over its budget fails the run.
    """

    def __init__(self, writes: bool, holds: bool) -> None:
        self.writes, self.holds = writes, holds
        self.took: dict[str, float] = defaultdict(float)

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "skipped":
            self.took[report.nodeid] += report.duration

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        self.known = read()
        self.rows = table(self.took, self.known)
        if self.holds and any(row.over for row in self.rows) and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.writes:
            write(self.took, self.known)

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.rows:
            return
        terminalreporter.section(
            f"seconds by folder (this machine: {slowness(self.took, self.known):.2f} times slower)"
        )
        for row in sorted(self.rows, key=lambda row: -row.took):
            budget = "" if row.budget is None else f" of {row.budget:.0f}"
            terminalreporter.line(f"{row.took:8.1f}{budget:8} {row.folder}{'  OVER ITS BUDGET' if row.over else ''}")


class Row:
    """What a folder took, and may."""

    def __init__(self, folder: str, took: float, budget: float | None, slow: float) -> None:
        self.folder, self.took, self.budget = folder, took, budget
        self.over = budget is not None and took > ALLOWED * budget * max(1.0, slow) + SLACK


def table(took: dict[str, float], known: dict[str, dict[str, float]]) -> list[Row]:
    """A row a folder."""
    sums: dict[str, float] = defaultdict(float)
    for test, seconds in took.items():
        sums[folder_of(test)] += seconds
    slow = slowness(took, known)
    return [Row(folder, seconds, known["budgets"].get(folder), slow) for folder, seconds in sums.items()]


def folder_of(test: str) -> str:
    """`tests/cli` of `tests/cli/test_run.py::test_it`; `tests` of what is at the top."""
    path = Path(test.split("::")[0])
    return "/".join(path.parts[:2]) if len(path.parts) > 2 else "tests"


def slowness(took: dict[str, float], known: dict[str, dict[str, float]]) -> float:
    """How many times longer than is written the median test took; 1 where nothing is known."""
    written = known["seconds"]
    ratios = [seconds / written[test] for test, seconds in took.items() if written.get(test, 0) >= TELLING]
    return statistics.median(ratios) if ratios else 1.0


def slow() -> set[str]:
    """The tests that are slow because of what they took."""
    return {test for test, took in read()["seconds"].items() if took > SLOW and not test.startswith("tests/law/")}


def read() -> dict[str, dict[str, float]]:
    """The file: `budgets` by folder, `seconds` by test."""
    found: dict[str, dict[str, float]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def write(took: dict[str, float], known: dict[str, dict[str, float]]) -> None:
    """Write what each test took; of what did not run, nothing is known any more."""
    seconds = {test: round(s, 2) for test, s in sorted(took.items()) if s >= LEAST}
    text = json.dumps({"budgets": known["budgets"], "seconds": seconds}, indent=0, ensure_ascii=False)
    FILE.write_text(f"{text}\n", encoding="utf-8")
