"""How often something is measured, on a clock that stands still unless it is told to go on."""

from __future__ import annotations

import pytest

from fxpipe.costs.timer import Rounds, quartile, seconds_of


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def counted(rounds: Rounds, seconds: float) -> tuple[int, int]:
    """Rounds that warm up, and those that are measured, where each takes so many seconds."""
    clock, found = FakeClock(), []
    for measured in rounds.run(clock):
        found.append(measured)
        clock.now += seconds
    assert found == sorted(found), "warming up comes first"
    return found.count(False), found.count(True)


@pytest.mark.parametrize(
    ("rounds", "seconds", "expected"),
    [
        (Rounds(budget=1.5, least=3, most=100), 0.125, (0, 12)),
        (Rounds(budget=1.5, least=3, most=100), 1e-6, (0, 100)),
        (Rounds(budget=1.5, least=3, most=100), 10.0, (0, 3)),
        (Rounds(budget=1.5, least=3, most=100, long=20.0), 20.0, (0, 1)),
        (Rounds(budget=1.5, least=3, most=100, long=20.0), 19.0, (0, 3)),
        (Rounds(budget=1.0, least=2, most=5, warm=3), 0.25, (3, 4)),
        (Rounds.exactly(4, warm=1), 1e9, (1, 4)),
    ],
)
def test_as_many_as_the_budget_allows(rounds: Rounds, seconds: float, expected: tuple[int, int]) -> None:
    assert counted(rounds, seconds) == expected


def test_a_call_takes_what_its_clock_says() -> None:
    clock = FakeClock()

    def call() -> None:
        clock.now += 3.0

    assert seconds_of(call, clock) == 3.0


def test_the_lower_quartile_forgets_disturbed_times() -> None:
    assert quartile([9.0, 1.0, 2.0, 3.0, 8.0, 7.0, 6.0, 5.0]) == 3.0
    assert quartile([4.0]) == 4.0
