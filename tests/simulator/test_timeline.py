"""Timelines for a terminal."""

from __future__ import annotations

from fxpipe.schedule import make
from fxpipe.simulator import Scenario, Simulation, StageTime, picture, simulate


def small() -> Simulation:
    workers = (StageTime(1, 2, 1), StageTime(1, 2))
    return simulate(make("async", 2), Scenario(workers), 3)


def test_the_picture() -> None:
    assert picture(small(), width=28).splitlines() == [
        "worker 0: 0011....aaaa**22bbbb**cccc**",
        "worker 1: ..00aaaa11bbbb..22cccc",
        "0-9 forward, a-j backward, * update, . waits; a column is 0.5 s",
    ]


def test_weight_gradients_are_capital_letters() -> None:
    workers = (StageTime(1, 1, weight=1),) * 2
    assert picture(simulate(make("zb-h1", 2, 2), Scenario(workers), 1), width=7).splitlines() == [
        "worker 0: 01.aAbB",
        "worker 1: .0a1bAB",
        "0-9 forward, a-j backward, A-J weight gradients, * update, . waits; a column is 1 s",
    ]


def test_a_part_of_the_picture() -> None:
    assert picture(small(), width=4, begin=3, end=5).splitlines()[:2] == ["worker 0: ..aa", "worker 1: aa11"]


def test_a_column_shows_its_middle() -> None:
    assert picture(small(), width=14).splitlines()[0] == "worker 0: 01..aa*2bb*cc*"
    assert picture(small(), width=2).splitlines()[:2] == ["worker 0: .*", "worker 1: ac"]


def test_microbatches_are_counted_through_and_many_workers_align() -> None:
    simulation = simulate(make("gpipe", 11, 6), Scenario((StageTime(1, 1),) * 11), 2)
    lines = picture(simulation, width=round(simulation.seconds)).splitlines()
    assert lines[0] == "worker  0: 012345" + 20 * "." + "abcdef678901" + 20 * "." + "ghijab"
    assert lines[10] == "worker 10: " + 10 * "." + "012345abcdef" + 20 * "." + "678901ghijab"
