"""Broken schedules are refused, and the message shows where."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from written_schedule import Written, WrittenApart

from fxpipe.errors import ScheduleError
from fxpipe.schedule import Action, check, grid, make
from fxpipe.schedule.check import held, moments


def refusal(*rows: str, minibatches: int = 2) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(Written(len(rows), rows=rows), minibatches)
    return str(caught.value)


def test_a_written_schedule_can_be_right() -> None:
    written = Written(2, rows=("F0 F1 B0 B1", "F0 B0 F1 B1"))
    assert check(written, 2).in_flight == (2, 1)
    assert grid(written, 2) == "worker 0: F0 F1 .. B0 .. B1\nworker 1: .. F0 B0 F1 B1"


def test_a_deadlock_marks_every_waiting_action() -> None:
    assert refusal("F0 B0 F1 B1", "F0 F1 B0 B1").splitlines() == [
        "schedule 'written' deadlocks: "
        "worker 0 waits at B0 for B0 of worker 1; worker 1 waits at F1 for F1 of worker 0",
        "  worker 0: F0   >B0<",
        "  worker 1: ..   F0   >F1<",
    ]


def test_a_missing_backward() -> None:
    assert refusal("F0 F1 B0 B1", "F0 B0 F1").splitlines() == [
        "schedule 'written' is wrong: worker 1 never does B1",
        "  worker 0: F0   F1   B0   B1",
        "  worker 1: F0   B0   F1   >B1<",
    ]


@pytest.mark.parametrize(
    ("row", "what", "shown"),
    [
        ("B0 F0 F1 B1", "does B0 before F0", ">B0< F0   F1   B1"),
        ("F0 F1 B1 B0", "does B0 after B1", "F0   F1   B1   >B0<"),
        ("F0 F0 B0 F1 B1", "does F0 twice", "F0   >F0< B0   F1   B1"),
        ("F0 B0 B0 F1 B1", "does B0 twice", "F0   B0   >B0<"),
        ("F0 F0.1 B0 F1 B1", "does F0.1, but there is no such microbatch", "F0     >F0.1< B0     F1     B1"),
        ("", "never does F0", ">F0<"),
    ],
)
def test_an_unlawful_row(row: str, what: str, shown: str) -> None:
    assert refusal(row) == f"schedule 'written' is wrong: worker 0 {what}\n  worker 0: {shown}"


@pytest.mark.parametrize(
    ("row", "what", "shown"),
    [
        ("F0 W0 B0 F1 B1 W1", "does W0 before B0", "F0   >W0< B0   F1   B1   W1"),
        ("F0 B0 F1 B1 W1 W0", "does W0 after W1", "F0   B0   F1   B1   W1   >W0<"),
        ("F0 B0 F1 B1 W0 W0", "does W0 twice", "F0   B0   F1   B1   W0   >W0<"),
        ("F0 B0 W0 F1 B1", "never does W1", "F0   B0   W0   F1   B1   >W1<"),
    ],
)
def test_an_unlawful_row_with_weight_gradients_apart(row: str, what: str, shown: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        check(WrittenApart(1, rows=(row,)), 2)
    assert str(caught.value) == f"schedule 'written' is wrong: worker 0 {what}\n  worker 0: {shown}"


def test_weight_gradients_in_a_schedule_without_them() -> None:
    assert "worker 0 does W0, but its backwards make the weight gradients" in refusal("F0 B0 W0 F1 B1")


def test_the_fullest_moments() -> None:
    """Microbatches between F and B, and between B and W: none that another moment exceeds in both."""
    assert [moments(make("gpipe", 2, 4), worker) for worker in range(2)] == [((4, 0),), ((4, 0),)]
    assert [moments(make("1f1b", 2, 4), worker) for worker in range(2)] == [((2, 0),), ((1, 0),)]
    zero_bubble = [moments(make("zb-h1", 3, 6), worker) for worker in range(3)]
    assert zero_bubble == [((2, 1), (3, 0)), ((1, 2), (2, 1)), ((0, 3), (1, 2))]
    assert [max(map(sum, found)) for found in zero_bubble] == list(held(make("zb-h1", 3, 6)))


def test_what_is_held_until_its_weight_gradients() -> None:
    written = WrittenApart(2, rows=("F0 F1 B0 W0 B1 W1", "F0 B0 F1 B1 W0 W1"))
    report = check(written, 2)
    assert report.in_flight == (2, 1)
    assert report.held == (2, 2)
    assert grid(written, 2) == "worker 0: F0 F1 .. B0 W0 B1 W1\nworker 1: .. F0 B0 F1 B1 W0 W1"


def test_the_offences_of_all_workers_are_told_at_once() -> None:
    message = refusal("B0 F0", "F0 F0", minibatches=1)
    assert "worker 0 does B0 before F0; worker 1 does F0 twice" in message


def test_the_backwards_of_a_minibatch_come_in_order_since_the_last_one_updates() -> None:
    with pytest.raises(ScheduleError, match=r"does B0 after B0\.1"):
        check(Written(1, microbatches=2, rows=("F0 F0.1 B0.1 B0",)), 1)


def test_a_worker_that_repeats_itself_for_ever_is_refused() -> None:
    class Stuck(Written):
        def actions(self, worker: int, start: int = 0) -> Iterator[Action]:
            while True:
                yield Action("F", 0)

    with pytest.raises(ScheduleError, match="does F0 twice"):
        check(Stuck(1), 2)


def test_an_action_of_an_earlier_minibatch_is_refused() -> None:
    with pytest.raises(ScheduleError, match="does F0, but there is no such microbatch"):
        check(Written(1, rows=("F0 B0 F1 B1",)), minibatches=1, start=1)


def test_the_grid_aligns_wide_labels_and_many_workers() -> None:
    lines = grid(make("gpipe", 11, 2), 1).splitlines()
    assert lines[0].startswith("worker  0: F0   F0.1 ..   ..")
    assert lines[10].endswith("..   F0   F0.1 B0   B0.1")
