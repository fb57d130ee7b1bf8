"""Small runs and closed forms, worked out by hand; `test_random` has a second simulator."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
from written_schedule import Written

from fxpipe.errors import ScheduleError
from fxpipe.plan.cost_records import StageTime
from fxpipe.planner.links import Links
from fxpipe.schedule import make
from fxpipe.schedule.order import play, read
from fxpipe.simulator.scenario import Message, Scenario, WeightCopy
from fxpipe.simulator.simulate import Simulation, simulate


def shown(simulation: Simulation) -> list[str]:
    """Each worker's spans: `F0 0-1, B0 3-4`."""
    rows = []
    for spans in simulation.spans:
        named = [("update" if s.kind == "update" else str(s.action), s.start, s.end) for s in spans]
        rows.append(", ".join(f"{name} {start:g}-{end:g}" for name, start, end in named))
    return rows


def busy(simulation: Simulation) -> list[float]:
    """Each worker's seconds of compute, updates and copying."""
    return [sum(span.end - span.start for span in spans) for spans in simulation.spans]


def of(workers: Sequence[StageTime], *messages: Message, **fields: object) -> Scenario:
    return Scenario(tuple(workers), messages, **fields)  # type: ignore[arg-type]


UNEQUAL = (StageTime(2, 4), StageTime(3, 5))
ONES = (StageTime(1, 1), StageTime(1, 1))


def test_free_links() -> None:
    found = simulate(make("gpipe", 2, 2), of(UNEQUAL), 1)
    assert shown(found) == [
        "F0 0-2, F0.1 2-4, B0 13-17, B0.1 18-22",
        "F0 2-5, F0.1 5-8, B0 8-13, B0.1 13-18",
    ]
    assert found.seconds == found.seconds_per_minibatch == 22
    assert busy(found) == [12, 16]
    assert found.bubble == pytest.approx(1 - 28 / 44)
    assert found.samples_per_second(11) == 0.5


def test_each_link_has_its_own_matrix_entry() -> None:
    links = Links(bandwidth=((1, 1), (4, 1)), latency=((0, 3), (5, 0)))
    messages = (Message(0, "F", 1, "F", 2), Message(1, "B", 0, "B", 2))
    found = simulate(make("1f1b", 2), of(ONES, *messages, links=links), 1)
    assert shown(found) == ["F0 0-1, B0 13.5-14.5", "F0 6-7, B0 7-8"]


def test_one_direction_carries_one_message_at_a_time_in_the_order_of_sending() -> None:
    activation, saved = Message(0, "F", 1, "F", 3), Message(0, "F", 1, "B", 2)
    links = Links(bandwidth=1)
    found = simulate(make("1f1b", 2), of(ONES, activation, saved, links=links), 1)
    assert shown(found)[1] == "F0 4-5, B0 6-7"
    found = simulate(make("1f1b", 2), of(ONES, saved, activation, links=links), 1)
    assert shown(found)[1] == "F0 6-7, B0 7-8"
    found = simulate(make("1f1b", 2), of(ONES, activation, replace(saved, made=0.5), links=links), 1)
    assert shown(found)[1] == "F0 5.5-6.5, B0 6.5-7.5"


def test_where_one_value_arrives_and_another_is_sent_the_first_comes_first() -> None:
    messages = (Message(0, "F", 1, "F", 0, needed=0.5), Message(1, "F", 2, "F", 0, made=0.5))
    found = simulate(make("1f1b", 3), of([StageTime(4, 1)] * 3, *messages, links=Links(latency=3)), 1)
    assert shown(found)[1:] == ["F0 0-2, F0 7-9, B0 18-19", "F0 10-14, B0 14-15"]


def test_both_ends_copy() -> None:
    message, workers = Message(0, "F", 1, "F", 10), (StageTime(2, 1), StageTime(2, 1))
    links = Links(bandwidth=5, latency=0.5, copy=0.1)
    found = simulate(make("1f1b", 2), of(workers, message, links=links), 1)
    assert shown(found) == ["F0 0-3, B0 8-9", "F0 3.5-6.5, B0 6.5-7.5"]  # the copy ends as the message arrives
    assert busy(found) == [4, 4]
    slow = simulate(make("1f1b", 2), of(workers, message, links=replace(links, bandwidth=100)), 1)
    assert shown(slow)[1] == "F0 2.5-5.5, B0 5.5-6.5"  # copying takes longer than the link
    late = simulate(make("1f1b", 2), of((workers[0], StageTime(20, 1)), replace(message, needed=0.5), links=links), 1)
    assert shown(late)[1] == "F0 0-21, B0 21-22"  # long there: copied when it is needed
    partly = simulate(make("1f1b", 2), of((workers[0], StageTime(8, 1)), replace(message, needed=0.5), links=links), 1)
    assert shown(partly)[1] == "F0 0-9, B0 9-10"  # half a second of the copy is behind the arrival
    assert found.bubble == pytest.approx(1 - 8 / 18)


def test_a_worker_sends_weights_in_the_order_of_the_scenario() -> None:
    pair = (WeightCopy(1, 0, (("F", (0,)),), 2), WeightCopy(1, 0, (("F", (0,)),), 3))
    found = simulate(make("1f1b", 2), of(ONES, weight_copies=pair, links=Links(bandwidth=1)), 2)
    first = simulate(make("1f1b", 2), of(ONES, weight_copies=pair[:1], links=Links(bandwidth=1)), 2)
    begin = [next(s.start for s in each.spans[0] if str(s.action) == "F1") for each in (first, found)]
    assert begin == [begin[0], begin[0] + 3]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "async"])
@pytest.mark.parametrize(("workers", "microbatches"), [(1, 1), (1, 3), (2, 1), (3, 2), (4, 4), (4, 7), (5, 3)])
def test_at_unit_cost_it_is_the_picture_of_the_schedule(name: str, workers: int, microbatches: int) -> None:
    schedule = make(name, workers, microbatches)
    steps = play(schedule, read(schedule, 6))
    found = simulate(schedule, of([StageTime(1, 1)] * workers), 6)
    started = {(w, span.action): span.start for w, spans in enumerate(found.spans) for span in spans}
    assert started == {(step.worker, step.action): step.time for step in steps}


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("workers", "microbatches"), [(1, 1), (2, 1), (4, 2), (4, 4), (4, 32), (7, 10)])
def test_the_bubble_of_a_flush(name: str, workers: int, microbatches: int) -> None:
    found = simulate(make(name, workers, microbatches), of([StageTime(1.5, 2.75)] * workers), 5)
    assert found.bubble == pytest.approx((workers - 1) / (microbatches + workers - 1))
    assert found.seconds_per_minibatch == pytest.approx((microbatches + workers - 1) * 4.25)


THIRDS = [(1, 1, 1), (2, 2, 1), (1, 2, 1), (2, 3, 1), (3, 4, 2), (4, 4, 3), (2, 1, 1), (2, 0.5, 2), (1, 1, 0)]


@pytest.mark.parametrize("times", THIRDS, ids=str)
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_zero_bubble_in_closed_form(times: tuple[float, float, float], workers: int) -> None:
    """Table 1 of the paper: what a minibatch takes beyond its work, with as many microbatches as H2 has in flight."""
    forward, backward, weight = times
    microbatches = 2 * workers - 1
    whole = of([StageTime(forward, backward + weight)] * workers)
    apart = of([StageTime(forward, backward, weight=weight)] * workers)
    bubbles = {
        name: simulate(make(name, workers, microbatches), scenario, 4).seconds_per_minibatch - microbatches * sum(times)
        for name, scenario in (("1f1b", whole), ("zb-h1", apart), ("zb-h2", apart))
    }
    assert bubbles["1f1b"] == pytest.approx((workers - 1) * sum(times))
    assert bubbles["zb-h1"] == pytest.approx((workers - 1) * (forward + backward - weight))
    assert bubbles["zb-h2"] == pytest.approx(max(0, (workers - 1) * (forward + backward - 2 * weight)))


@pytest.mark.parametrize(("workers", "microbatches"), [(2, 2), (4, 4), (4, 8), (8, 14), (8, 32)])
@pytest.mark.parametrize(("forward", "backward"), [(2, 1), (1, 1), (1, 2), (2, 3)])
def test_nf1b_waits_for_what_a_backward_takes_longer(
    workers: int, microbatches: int, forward: float, backward: float
) -> None:
    """Not at all if it takes as long as a forward; else at most once in a minibatch for each hop of the pipeline."""
    found = simulate(make("nf1b", workers, microbatches), of([StageTime(forward, backward)] * workers), 40)
    waited = (found.finished[25] - found.finished[10]) / 15 - microbatches * (forward + backward)
    assert 0 <= waited <= (workers - 1) * max(0, backward - forward)
    assert backward <= forward or microbatches < 2 * workers or waited == (workers - 1) * (backward - forward)


def test_nothing_costs_anything() -> None:
    found = simulate(make("async", 2), of([StageTime(0, 0)] * 2), 3)
    assert found.seconds == found.bubble == 0
    assert found.samples_per_second(1) == float("inf")
    assert [len(spans) for spans in found.spans] == [6, 6]  # every action is there all the same


def test_it_needs_no_torch() -> None:
    code = "import sys, fxpipe.simulator.simulate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_short_run_of_async_is_its_own_mean() -> None:
    found = simulate(make("async", 3), of([StageTime(1, 1)] * 3), 4)
    assert found.seconds_per_minibatch == found.seconds / 4


def test_the_end_of_async_is_no_steady_state() -> None:
    """Worker 1 is slow in F: once the last F is in, the B follow each other faster."""
    found = simulate(make("async", 2), of((StageTime(0, 0), StageTime(10, 1))), 20)
    assert found.seconds_per_minibatch == 11


def test_a_deadlock_of_the_rows_is_told_as_check_tells_it() -> None:
    with pytest.raises(ScheduleError) as caught:
        simulate(Written(2, rows=("F0 B0 F1 B1", "F0 F1 B0 B1")), of(ONES), 2)
    assert str(caught.value).splitlines() == [
        "schedule 'written' deadlocks: "
        "worker 0 waits at B0 for B0 of worker 1; worker 1 waits at F1 for F1 of worker 0",
        "  worker 0: F0   >B0<",
        "  worker 1: ..   F0   >F1<",
    ]


def test_a_deadlock_for_weights() -> None:
    too_new = WeightCopy(0, 1, (("F", (0,)),), 1)
    with pytest.raises(ScheduleError, match=r"worker 1 waits at F1 for B0 of worker 0"):
        simulate(make("async", 3), of([StageTime(1, 1)] * 3, weight_copies=(too_new,)), 4)


def test_a_deadlock_for_a_message() -> None:
    """Worker 1's B0 stands behind its F1; without the pipeline's token it is the message that is missed."""
    rows = ("F0 B0 F1 B1", "F0 B0 F1 B1", "F0 F1 B0 B1")
    messages = (Message(0, "F", 2, "F", 1), Message(2, "B", 0, "B", 1))
    with pytest.raises(ScheduleError, match=r"worker 2 waits at F1 for F1 of worker 1"):
        simulate(Written(3, rows=rows), of([StageTime(1, 1)] * 3, *messages), 2)


def test_an_unlawful_schedule() -> None:
    with pytest.raises(ScheduleError, match="worker 0 does B0 before F0"):
        simulate(Written(1, rows=("B0 F0",)), of(ONES[:1]), 1)


def test_schedule_and_costs_must_fit() -> None:
    with pytest.raises(ScheduleError, match="has 3 workers, the costs are for 2"):
        simulate(make("async", 3), of(ONES), 1)
    with pytest.raises(ScheduleError, match="at least 1 minibatch, not 0"):
        simulate(make("async", 2), of(ONES), 0)
