"""Budgets of seconds are for an idle machine; `make test` has none."""

from __future__ import annotations

import pytest
import seconds

KNOWN = {"budgets": {"tests/cli": 30.0}, "seconds": {}}
TEST = "tests/cli/test_run.py::test_it"


@pytest.mark.parametrize(
    ("took", "slow", "over"), [(60.0, 1.0, False), (70.0, 1.0, True), (90.0, 1.5, False), (150.0, 3.0, False)]
)
def test_a_folder_is_over_its_budget_only_where_the_machine_is_not_slow(took: float, slow: float, over: bool) -> None:
    (row,) = seconds.table({TEST: took}, {TEST: slow}, KNOWN)
    assert (row.folder, row.took, row.over) == ("tests/cli", took, over)


def test_a_faster_machine_is_no_reason_to_take_longer() -> None:
    (row,) = seconds.table({TEST: 70.0}, {TEST: 0.5}, KNOWN)
    assert row.over


@pytest.mark.parametrize(("slow", "over"), [(1.5, True), (1.6, False)])
def test_budgets_hold_for_nothing_on_a_machine_of_another_kind(slow: float, over: bool) -> None:
    (row,) = seconds.table({TEST: 1000.0}, {TEST: slow}, KNOWN)
    assert row.over == over


@pytest.mark.parametrize(("load", "crowd"), [(0.5, 1.0), (4.0, 2.0)])
def test_a_core_has_a_crowd_where_more_processes_than_cores_run(
    load: float, crowd: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 9.0, 9.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert seconds.crowd() == crowd


def test_the_yardstick_takes_time() -> None:
    assert seconds.yardstick() > 0
