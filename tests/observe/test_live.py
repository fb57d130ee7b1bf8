"""What the display says about the workers."""

from __future__ import annotations

import io
import itertools
import re
import time
from typing import Any

import pytest

from fxpipe.observe import progress as progress_module
from fxpipe.observe.progress import BarProgress, LineProgress, _clock, _table, starting_text
from fxpipe.observe.pulse import Live, Phase, PostedPulses, Pulse, Signs, Status, WorkerState
from fxpipe.observe.watch import Watch
from fxpipe.runtime.wires.board import DictBoard

RATES = {"samples_per_second": 64.0, "tokens_per_second": 4096.0, "tflops_per_device": 0.125, "mfu": 0.4}


def steady(*states: WorkerState) -> Live:
    """Workers that always do the same, an hour later at every look."""
    hours = itertools.count(3600 * 10**9, 3600 * 10**9)

    def read() -> list[Status]:
        now = next(hours)
        return [Status(now, round(s.busy * now), round(s.waiting * now), s.in_flight) for s in states]

    return Live(read)


def rendered(thing: Any, width: int = 80) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width)
    console.print(thing)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_shares_are_of_the_time_since_the_last_look() -> None:
    told = iter([
        [Status(100, 50, 10, 1), Status(100, 100, 0, 2)],
        [Status(200, 60, 90, 3), Status(100, 100, 0, 2)],
        [],
    ])  # fmt: skip
    workers = Live(lambda: next(told), period=0.0)
    assert workers.look() == [
        WorkerState(0.5, 0.1, 1),
        WorkerState(1.0, 0.0, 2),
    ]
    # Worker 1 has not said anything since: what it said last still stands.
    assert workers.look() == [
        WorkerState(0.1, 0.8, 3),
        WorkerState(1.0, 0.0, 2),
    ]
    assert workers.look() == []


def test_a_log_file_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress_module, "perf_counter", lambda: now[0])
    stream = io.StringIO()
    progress = LineProgress(stream, pause=5.0)
    progress.watch(steady(WorkerState(0.934, 0.05, 2), WorkerState(0.71, 0.29, 1)))
    for step in range(1, 101):
        now[0] += 0.5
        progress(step, 100, 2.0, RATES)
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 11
    rates = "64.0 samples/s  4096 tokens/s  MFU 40.0%"
    assert lines[0] == f"step 1/100  loss 2.0000  {rates}  0:50 left  busy 93 71 %"
    assert lines[1] == f"step 11/100  loss 2.0000  {rates}  0:44 left  busy 93 71 %"
    assert lines[-1] == f"step 100/100  loss 2.0000  {rates}  busy 93 71 %"


def test_many_workers_stay_one_line() -> None:
    stream = io.StringIO()
    progress = LineProgress(stream)
    progress.watch(steady(*[WorkerState(worker / 100, 0.1, 1) for worker in range(64)]))
    progress(1, 1, 2.0, RATES)
    assert stream.getvalue().endswith("busy 0 to 63 %\n")


def test_a_terminal_shows_every_worker() -> None:
    text = rendered(_table([WorkerState(0.934, 0.05, 2), WorkerState(0.71, 0.29, 1)], "worker"))
    assert [re.sub(" +", " ", line.strip()) for line in text.splitlines()] == [
        "worker 0 busy 93 % waiting 5 % 2 in flight",
        "worker 1 busy 71 % waiting 29 % 1 in flight",
    ]


def test_a_terminal_shows_of_many_workers_those_that_wait_most() -> None:
    text = rendered(_table([WorkerState(0.5, worker / 100, 1) for worker in range(64)], "worker"))
    lines = text.splitlines()
    assert len(lines) == 16
    assert lines[0].split()[:2] == ["worker", "49"]
    assert lines[-1].strip() == "49 others wait less"


def test_the_bar_draws_the_workers_beneath_itself() -> None:
    progress = BarProgress()
    try:
        progress.watch(steady(WorkerState(0.93, 0.05, 2)))
        progress(3, 10, 2.0, {"samples_per_second": 64.0})
        text = rendered(progress._bar.get_renderable(), 90)
    finally:
        progress.close()
    assert "3/10" in text
    assert "loss 2.0000  64.0 samples/s" in text
    assert "worker 0" in text
    assert "2 in flight" in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 90


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0:00"), (59.6, "1:00"), (3599, "59:59"), (7322, "2:02:02")])
def test_time_left(seconds: float, text: str) -> None:
    assert _clock(seconds) == text


def test_workers_do_what_their_pulses_say() -> None:
    store = PostedPulses(DictBoard(), 2)

    def read() -> list[Status]:
        return [signs.status for signs in store.read()]

    assert Live(read).look() == [], "nobody has said anything"
    watch, pulse = Watch(), Pulse()
    pulse.follow([watch])
    store.put(0, pulse.numbers)
    watch.open("F")
    pulse.after_beat.append(lambda: store.put(1, pulse.numbers))
    pulse.beat()
    first, second = read()
    assert first == Status(0, 0, 0, 0)
    assert 0 < second.busy <= second.now


def sign(phase: Phase, doing: str | None = None) -> Signs:
    pulse = Pulse()
    pulse.phase = phase
    return Signs.of(pulse.numbers)._replace(doing=doing)


@pytest.mark.parametrize(
    ("signs", "text"),
    [
        ([sign("importing"), sign("starting")], "importing torch"),
        ([sign("loading"), sign("loading")], "loading the build, the model and the data"),
        (
            [sign("training", "data"), sign("training", "wait"), sign("training", "wait")],
            "worker 0: reading the first batch; workers 1, 2: waiting for the first batch",
        ),
        ([sign("training"), sign("loading")], "worker 0: computing the first batch; worker 1: loading the build, the "
         "model and the data"),
        ([sign("compiling a shape")], "compiling a shape"),
    ],
)  # fmt: skip
def test_what_processes_do_before_the_first_step(signs: list[Signs], text: str) -> None:
    assert starting_text(signs, "worker") == text


def test_a_log_says_what_is_done_until_the_first_step_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "SOON", 0.01)
    stream = io.StringIO()
    progress = LineProgress(stream, pause=0.01)
    progress.starting(lambda: "loading")
    deadline = time.monotonic() + 30
    while stream.getvalue().count("loading (0 s)\n") < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    progress(1, 1, 2.0, RATES)
    before = stream.getvalue()
    assert before.count("loading (0 s)\n") >= 2
    assert "step 1/1" in before
    time.sleep(0.1)
    assert stream.getvalue()[len(before) :].count("loading") <= 1, "one that was about to be written"


def test_the_bar_says_what_is_done_until_the_first_step_is_over() -> None:
    progress = BarProgress()
    try:
        progress.starting(lambda: "reading the first batch")
        assert "reading the first batch" in rendered(progress._bar.get_renderable(), 90)
        progress(1, 2, 2.0, RATES)
        assert "loss 2.0000" in rendered(progress._bar.get_renderable(), 90)
    finally:
        progress.close()
