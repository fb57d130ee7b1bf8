"""What each test takes, and what each folder may: `tests/seconds.json`.

    make seconds                          run all tests, write what each takes
    python -m pytest … --budgets          print what each folder takes and may; fail where it takes too much, as in CI

What took longer than `SLOW` is a slow test, as if it were marked so. Of tests/law, choose.py says what is quick.

A folder's budget is for its quick tests on an idle machine of the kind on which the seconds were written. Elsewhere, or
while others use the machine, all takes longer, and not equally long all the time. So a yardstick is timed every few
seconds, some milliseconds of work that is always the same, and each test notes how many processes wait for how many
cores. A test's seconds count in yardsticks, as if it had waited for no core. Where the machine is slower than
`COMPARABLE`, memory and processes are slow in another measure than the yardstick: budgets hold for nothing there.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
from collections import defaultdict
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import pytest

FILE = Path(__file__).parents[1] / "seconds.json"
LEAST = 0.05
"""Seconds that are not worth a line."""

SLOW = 0.35
"""Seconds that are too many for a quick test."""

YARDSTICK = 0.002
"""Seconds of the yardstick on that machine."""

ATTEMPTS, OLD = 3, 5.0
"""How often the yardstick is timed, and after how many seconds anew."""

COMPARABLE = 1.5
"""How many times slower a machine may be for budgets to hold."""

SLOW_NOW = "times slower"
"""The name of a test's property: the product of what `slowness` gave before it, and `crowd`."""

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
        self.slow: dict[str, float] = {}

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "skipped":
            self.took[report.nodeid] += report.duration
        self.slow[report.nodeid] = dict(report.user_properties).get(SLOW_NOW, 1.0)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        self.known = read()
        self.rows = table(self.took, self.slow, self.known)
        if self.holds and any(row.over for row in self.rows) and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.writes:
            write(self.took, self.known)

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.rows:
            return
        slower = statistics.median(self.slow.values())
        budgets = "" if slower <= COMPARABLE else ": too slow for budgets"
        terminalreporter.section(f"seconds by folder (the machine: {slower:.2f} times slower{budgets})")
        for row in sorted(self.rows, key=lambda row: -row.took):
            budget = "" if row.budget is None else f" of {row.budget:.0f}"
            terminalreporter.line(f"{row.took:8.1f}{budget:8} {row.folder}{'  OVER ITS BUDGET' if row.over else ''}")


class Row(NamedTuple):
    """What a folder took, that on an idle machine, and what it may.

    Attributes:
        counted: as `took` would be if the machine had always been idle, and as fast as where that was written.
    """

    folder: str
    took: float
    counted: float
    budget: float | None

    @property
    def over(self) -> bool:
        return self.budget is not None and self.counted > ALLOWED * self.budget + SLACK


def table(took: dict[str, float], slow: dict[str, float], known: dict[str, dict[str, float]]) -> list[Row]:
    """A row a folder."""
    sums: dict[str, float] = defaultdict(float)
    counted: dict[str, float] = defaultdict(float)
    for test, seconds in took.items():
        sums[folder_of(test)] += seconds
        counted[folder_of(test)] += seconds / max(1.0, slow.get(test, 1.0))
    comparable = statistics.median(slow.values()) <= COMPARABLE
    budgets = known["budgets"] if comparable else {}
    return [Row(folder, seconds, counted[folder], budgets.get(folder)) for folder, seconds in sums.items()]


def slowness() -> float:
    """The yardstick of the last seconds."""
    return _slowness(int(perf_counter() / OLD))


@functools.lru_cache(maxsize=1)
def _slowness(period: int) -> float:
    return yardstick()


def yardstick() -> float:
    """How many times longer than written the yardstick takes now: the mean of some attempts."""
    begin = perf_counter()
    for _ in range(ATTEMPTS):
        sum(number * number % 7 for number in range(50_000))
    return (perf_counter() - begin) / ATTEMPTS / YARDSTICK


def crowd() -> float:
    """How many processes there were for each core in the last minute; 1 where cores were free."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def folder_of(test: str) -> str:
    """`tests/cli` of `tests/cli/test_run.py::test_it`; `tests` of what is at the top."""
    path = Path(test.split("::")[0])
    return "/".join(path.parts[:2]) if len(path.parts) > 2 else "tests"


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
