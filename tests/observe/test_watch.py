"""Own times never count twice, and add up to all the time there was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fxpipe.observe import watch as watch_module
from fxpipe.observe.trace import KINDS
from fxpipe.observe.watch import Cause, Watch
from fxpipe.schedule.action import Action

SECOND = 10**9


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 5 * SECOND

    def __call__(self) -> int:
        return self.now

    def pass_seconds(self, seconds: float) -> None:
        self.now += round(seconds * SECOND)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(watch_module, "perf_counter_ns", made)
    return made


def spend(clock: Clock, watch: Watch) -> None:
    """4 s of data; a forward of 7 s that waits for 2; a backward of 6 s, 3 of them its update, which predicts for 1."""
    watch.at(Action("F", 0))
    watch.open("data")
    clock.pass_seconds(4)
    watch.close()
    clock.pass_seconds(0.5)
    watch.open("F")
    clock.pass_seconds(1)
    watch.open("receive", Cause("activation", "x", 0))
    watch.open("wait", Cause("activation", "x", 0))
    clock.pass_seconds(2)
    watch.close()
    clock.pass_seconds(0.25)
    watch.close()
    clock.pass_seconds(3.75)
    watch.close()
    watch.at(Action("B", 0))
    watch.open("B")
    clock.pass_seconds(3)
    watch.open("update")
    watch.open("predict")
    clock.pass_seconds(1)
    watch.close()
    clock.pass_seconds(2)
    watch.close()
    watch.close()


def test_own_times(clock: Clock) -> None:
    watch = Watch()
    clock.pass_seconds(100)  # before the run
    watch.begin()
    spend(clock, watch)
    clock.pass_seconds(1)
    watch.end()
    assert watch.elapsed == 18.5
    assert watch.spent == {
        "F": 4.75,
        "B": 3.0,
        "W": 0.0,
        "predict": 1.0,
        "update": 2.0,
        "send": 0.0,
        "receive": 0.25,
        "wait": 2.0,
        "data": 4.0,
        "save": 0.0,
        "other": 1.5,
    }
    assert watch.busy == 11.0
    assert watch.seconds("wait", within="F") == 2.0
    assert watch.seconds("wait", within="B") == 0.0
    assert watch.seconds("B", "update", "predict", within="B") == 3.0, "the update is a whole of its own"
    assert watch.seconds("B", "update", "predict", within="update") == 3.0
    assert watch.waits == [{"what": "activation", "from": 0, "seconds": 2.0}]
    assert watch.fill == 2.0
    assert (watch.count("F"), watch.count("B"), watch.count("update")) == (1, 1, 1)


def test_what_a_checkpoint_copies_in_an_update_is_no_part_of_it(clock: Clock) -> None:
    watch = Watch()
    for kind in ("B", "update", "save"):
        watch.open(kind)
        clock.pass_seconds(1)
    for _ in range(3):
        watch.close()
    watch.end()
    assert (watch.spent["B"], watch.spent["update"], watch.spent["save"]) == (1.0, 1.0, 1.0)
    assert watch.seconds("update", "save", within="update") == 1.0
    assert watch.busy == 2.0


def test_weight_gradients_are_a_whole_without_their_update(clock: Clock) -> None:
    watch = Watch()
    watch.at(Action("W", 0))
    for kind in ("W", "send", "update"):
        watch.open(kind)  # type: ignore[arg-type]
        clock.pass_seconds(1)
    for _ in range(3):
        watch.close()
    assert watch.seconds("W", "send", "update", within="W") == 2.0
    assert watch.seconds("update", within="update") == 1.0
    assert (watch.count("W"), watch.count("B")) == (1, 0)


def test_the_waits_before_the_first_backward_fill(clock: Clock) -> None:
    watch = Watch()
    for kind in ("F", "F", "B", "F", "B"):
        watch.open(kind)
        watch.open("wait", Cause("activation", "x", 0))
        clock.pass_seconds(1)
        watch.close()
        watch.close()
    assert watch.fill == 3.0
    assert watch.seconds("wait") == 5.0


class Event:
    """A CUDA event of a device that works off its stream when it is told to, by a clock that is 1% fast."""

    device = Clock()
    passed = 0
    made = 0

    def __init__(self, enable_timing: bool) -> None:
        Event.made += 1
        self.at = 0

    def record(self) -> None:
        self.at = round(1.01 * Event.device.now)

    def query(self) -> bool:
        return self.at <= Event.passed

    def synchronize(self) -> None:
        Event.passed = round(1.01 * Event.device.now)

    def elapsed_time(self, end: Event) -> float:
        assert end.query()
        return (end.at - self.at) / 1e6


def test_on_cuda_events_are_read_when_they_have_passed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "device", clock)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: Event.synchronize(Event(True)))
    watch = Watch("cuda")
    watch.record()
    watch.begin()
    begin = clock.now
    for _ in range(50):
        spend(clock, watch)
    assert watch.count("B") == 0, "nothing has passed"
    watch.end()
    assert watch.count("B") == 50
    assert watch.seconds("update") == pytest.approx(100 * 1.01)
    made = Event.made
    spans = watch.spans
    assert spans.ends[-1] == pytest.approx(begin + 50 * 17.5 * SECOND, abs=2000), "told by the CPU's clock"
    for _ in range(50):
        spend(clock, watch)
        Event.passed = round(1.01 * clock.now)
    watch.end()
    assert Event.made < made + 20, "events are used again"


def test_the_status_counts_what_is_open(clock: Clock) -> None:
    watch = Watch()
    watch.open("F")
    clock.pass_seconds(1)
    watch.close()
    watch.open("F")
    clock.pass_seconds(2)
    assert watch.status == (3 * SECOND, 3 * SECOND, 0, 1)
    watch.open("wait")
    clock.pass_seconds(4)
    assert watch.status == (7 * SECOND, 3 * SECOND, 4 * SECOND, 1)
    watch.close()
    watch.close()
    assert watch.status == (7 * SECOND, 3 * SECOND, 4 * SECOND, 2)


def test_spans_are_kept_when_asked_for(clock: Clock) -> None:
    watch = Watch()
    spend(clock, watch)
    assert len(watch.spans.kinds) == 0
    watch.record()
    watch.begin()
    begin = clock.now
    spend(clock, watch)
    spans = watch.spans
    kinds = [KINDS[kind] for kind in spans.kinds]
    assert kinds == ["data", "wait", "receive", "F", "predict", "update", "B"]
    causes = list(spans.table)
    assert [causes[c] for c in spans.causes][:3] == [None, Cause("activation", "x", 0), Cause("activation", "x", 0)]
    forward = kinds.index("F")
    assert (spans.begins[forward] - begin, spans.ends[forward] - begin) == (4.5 * SECOND, 11.5 * SECOND)
    watch.begin()
    assert len(watch.spans.kinds) == 0


def test_evaluation_is_no_part_of_training(clock: Clock) -> None:
    """Nor is what a worker waits after it until its first backward, where the pipeline did not empty before it."""
    for refills in (False, True):
        watch = Watch()
        watch.refills = refills
        watch.begin()
        for kind, seconds in (("F", 1.0), ("B", 2.0), ("evaluate", 10.0), ("F", 1.0), ("B", 2.0), ("B", 2.0)):
            watch.open(kind)  # type: ignore[arg-type]
            clock.pass_seconds(seconds)
            if kind == "B":
                watch.open("wait", Cause("gradient", "g", 1))
                clock.pass_seconds(0.5)
                watch.close()
            watch.close()
        watch.end()
        waited = 1.0 if refills else 1.5
        assert watch.elapsed == pytest.approx(19.5)
        assert watch.seconds("evaluate") == pytest.approx(11.5 - waited)
        assert watch.training == pytest.approx(8 + waited)
        assert watch.busy == pytest.approx(8)
        assert watch.spent["wait"] == pytest.approx(waited)
        assert "evaluate" not in watch.spent
        assert sum(watch.spent.values()) == pytest.approx(watch.training)
        assert watch.waits == [{"what": "gradient", "from": 1, "seconds": pytest.approx(waited)}]
        assert watch.status.busy == 8 * SECOND
        assert watch.status.waiting == round(waited * SECOND)
