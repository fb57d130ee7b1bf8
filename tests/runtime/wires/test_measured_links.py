"""Speeds of links, from the times of a run's own messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fxpipe.planner.links import Links
from fxpipe.runtime.wires import measured_links
from fxpipe.runtime.wires.measured_links import (
    AWAITED,
    NOTED_A_SECOND,
    SECOND,
    Measured,
    MeasuredLinks,
    MessageTimes,
    replaced,
)
from fxpipe.runtime.wires.throttled import SlowDirection

BUILD = Links(1e8, 0.001)
SIZE = 1_000_000


class Ends:
    """Two processes, whose clocks differ, and the link between them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ahead: float = 0.0, known: float = 0.0) -> None:
        self._ahead = [0.0, -ahead]  # of worker 0's clock
        self._times = MessageTimes(0), MessageTimes(int(SECOND * known))
        self._now = 0
        monkeypatch.setattr(measured_links, "perf_counter_ns", lambda: self._now)

    def _at(self, rank: int, time: float) -> int:
        self._now = int(SECOND * (time + self._ahead[rank] + 1000))
        return self._now

    def carry(
        self,
        bandwidth: float,
        sent: Sequence[float],
        way: tuple[int, int] = (0, 1),
        late: float = 0.0,
        size: int = SIZE,
    ) -> None:
        """Messages that leave at these times; `late` seconds later than it came, each is asked for."""
        (source, target), link = way, SlowDirection(bandwidth, 0.001)
        came: list[float] = []
        for time in sent:
            link.put(came.append, size, 0, time)
            self._at(source, time)
            self._times[source].sent(target, 7, size)
        for time in came:
            self._at(target, 0.0)
            received = self._times[target].expected(source, 7)
            end = self._at(target, time + late)
            received(end - (0 if late else 2 * AWAITED), end)

    def measured(self, links: Links = BUILD) -> dict[Any, Measured]:
        found = MeasuredLinks(links)
        for rank, times in enumerate(self._times):
            texts: list[str] = []
            times.put(texts.append)
            for text in 2 * texts:
                found.add(rank, text)
        return found.measured()


def every(seconds: float, count: int) -> list[float]:
    return [seconds * k for k in range(count)]


@pytest.mark.parametrize("spacing", [0.1, 0.04, 0.001])
def test_a_link_is_measured_in_use_or_not(spacing: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that wait for each other, or do not, are as long on the link."""
    ends = Ends(monkeypatch)
    ends.carry(2e7, every(spacing, 100))
    (found,) = ends.measured().values()
    assert 1 / found.pace == pytest.approx(2e7, rel=0.02)
    assert found.load == pytest.approx(SIZE / spacing, rel=0.1)


def test_a_message_that_is_not_awaited_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(monkeypatch)
    ends.carry(2e7, every(0.1, 100), late=0.02)
    assert ends.measured() == {}


def test_a_hiccup_is_no_slower_link(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(monkeypatch)
    ends.carry(BUILD.bandwidth_of(0, 1), every(0.1, 30))
    ends._now = 0
    ends.carry(2e5, [3.05])
    (found,) = ends.measured().values()
    assert 1 / found.pace == pytest.approx(1e8, rel=0.02)


@pytest.mark.parametrize(("ahead", "known"), [(50.0, 50.0), (50.0, 49.97), (50.0, 50.03)])
@pytest.mark.parametrize("way", [(0, 1), (1, 0)])
def test_clocks_that_drift_make_no_link_slower(
    ahead: float, known: float, way: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = Ends(monkeypatch, ahead, known)
    for each in ((0, 1), (1, 0)):
        ends.carry(1e8, every(0.1, 100), each)
    for found in ends.measured().values():
        assert 1 / found.pace == pytest.approx(1e8, rel=0.02)
    ends = Ends(monkeypatch, ahead, known)
    ends.carry(1e7, every(0.2, 100), way)
    ends.carry(1e8, every(0.2, 100), way[::-1])
    measured = ends.measured()
    assert sum(found.pace for found in measured.values()) == pytest.approx(1.1e-7, rel=0.02)


def test_small_messages_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(monkeypatch)
    ends.carry(1e3, every(0.1, 100), size=4)
    assert ends.measured() == {}


def test_of_many_messages_some_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(monkeypatch)
    ends.carry(5e8, every(0.002, 2500), size=SIZE // 10)
    assert len(ends._times[0]._rows["sent"]) == 5 * NOTED_A_SECOND
    (found,) = ends.measured(Links(1e9, 0.001)).values()
    assert 1 / found.pace == pytest.approx(5e8, rel=0.02)


def test_only_what_matters_is_replaced() -> None:
    links, most = replaced(BUILD, BUILD, 3, {(0, 1): Measured(4e-8, 1e7), (1, 0): Measured(4e-8, 1e5)})
    assert [links.bandwidth_of(*way) for way in ((0, 1), (1, 0), (1, 2))] == [pytest.approx(2.5e7), 1e8, 1e8]
    assert most == pytest.approx(0.3)
    assert links.latency == BUILD.latency
    assert replaced(BUILD, BUILD, 3, {(0, 1): Measured(1.04e-8, 1e8)}) == (BUILD, 0.0)
    back, most = replaced(links, BUILD, 3, {(0, 1): Measured(0.5e-8, 1e7)})
    assert (back.bandwidth_of(0, 1), most) == (1e8, 0.0), "a link recovers, and is no faster than known"
