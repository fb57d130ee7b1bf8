"""The steady state of `async` is known: its period is the worst mean over the cycles of what waits for what.

Worker k does F of microbatch q + N−1−k, then B of q. So a cycle goes with F from worker i to j, turns round there to
the B that follows, goes back to i, and turns round to the F that follows: j − i + 1 minibatches later than it began.
What each B sends has left before the update, so only worker i's update is part of it. No other cycle passes a worker's
F and B once at most, but for one of a direction of a link, which carries one message at a time.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fxpipe.plan.cost_records import StageTime
from fxpipe.planner.links import Links
from fxpipe.schedule import make
from fxpipe.simulator.scenario import Message, Scenario
from fxpipe.simulator.simulate import simulate, steady_minibatches


def period(scenario: Scenario) -> float:
    """The closed form, for one message each way between neighbours."""
    count, links = len(scenario.workers), scenario.links
    compute = [cost.forward + cost.backward for cost in scenario.workers]
    update = [cost.update for cost in scenario.workers]
    occupied = {(m.src, m.dst): links.seconds(m.src, m.dst, m.bytes) for m in scenario.messages}
    way = {ends: seconds + links.latency_of(*ends) for ends, seconds in occupied.items()}
    both = [way[k, k + 1] + way[k + 1, k] for k in range(count - 1)]
    ranges = [(i, j) for i in range(count) for j in range(i, count)]
    cycles = [(sum(compute[i : j + 1]) + update[i] + sum(both[i:j])) / (j - i + 1) for i, j in ranges]
    return max([*cycles, *occupied.values()])


def line(
    costs: list[tuple[int, int, int]], sizes: list[tuple[int, int]], latency: tuple[tuple[int, ...], ...]
) -> Scenario:
    """Workers in a row; `sizes` of the messages forward and back between neighbours, in seconds on their link."""
    messages = [
        m
        for k, (forth, back) in enumerate(sizes)
        for m in (Message(k, "F", k + 1, "F", forth), Message(k + 1, "B", k, "B", back))
    ]
    return Scenario(tuple(StageTime(*c) for c in costs), tuple(messages), (), Links(1.0, latency))


@st.composite
def lines(draw: st.DrawFn) -> Scenario:
    count = draw(st.integers(1, 4))
    number = st.integers(0, 6)
    costs = draw(st.lists(st.tuples(number, number, st.integers(0, 3)), min_size=count, max_size=count))
    sizes = draw(st.lists(st.tuples(number, number), min_size=count - 1, max_size=count - 1))
    return line(costs, sizes, tuple(tuple(draw(st.integers(0, 2)) for _ in costs) for _ in costs))


@given(lines())
def test_async_has_the_closed_forms_period(scenario: Scenario) -> None:
    """The costs are small whole numbers, so that only the worst cycle is left by the second half."""
    found = simulate(make("async", len(scenario.workers)), scenario, 400)
    assert found.seconds_per_minibatch == pytest.approx(period(scenario))


AWAY = ((0, 0, 0, 0), (2, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0))


@given(lines(), st.integers(1, 8))
@example(line([(0, 1, 0), (0, 1, 0), (0, 2, 0), (0, 0, 0)], [(0, 0), (0, 1), (0, 0)], AWAY), 5)  # repeats after three
def test_few_minibatches_show_the_steady_state(scenario: Scenario, microbatches: int) -> None:
    schedule = make("async", len(scenario.workers), microbatches)
    few, many = (simulate(schedule, scenario, count) for count in (steady_minibatches(schedule), 100))
    assert few.seconds_per_minibatch == pytest.approx(many.seconds_per_minibatch, rel=0.01)


def test_a_balanced_pipeline_cannot_hide_its_round_trip() -> None:
    scenario = line([(1, 2, 0)] * 4, [(1, 1)] * 3, ((0,) * 4,) * 4)
    found = simulate(make("async", 4), scenario, 100)
    assert found.seconds_per_minibatch == period(scenario) == 3 + 2 * 3 / 4
    assert found.bubble == pytest.approx(1 - 3 / 4.5)


def test_a_slow_worker_among_fast_ones_hides_it() -> None:
    scenario = line([(1, 1, 0), (3, 6, 0), (1, 1, 0)], [(1, 1)] * 2, ((0,) * 3,) * 3)
    found = simulate(make("async", 3), scenario, 100)
    assert found.seconds_per_minibatch == period(scenario) == 9


def test_a_full_link_is_a_bottleneck_of_its_own() -> None:
    """The round trip takes 13 seconds for two minibatches, the link forward 9 for each."""
    scenario = line([(1, 1, 0), (1, 1, 0)], [(9, 0)], ((0, 0), (0, 0)))
    found = simulate(make("async", 2), scenario, 100)
    assert found.seconds_per_minibatch == period(scenario) == 9


def test_latency_counts_in_the_round_trip_but_occupies_no_link() -> None:
    scenario = line([(1, 1, 0), (1, 1, 0)], [(0, 0)], ((0, 9), (0, 0)))
    found = simulate(make("async", 2), scenario, 100)
    assert found.seconds_per_minibatch == period(scenario) == 6.5


def test_the_period_with_a_flush_is_a_minibatch_from_end_to_end() -> None:
    scenario = line([(1, 2, 1), (2, 3, 0)], [(1, 2)], ((0, 1), (1, 0)))
    schedule = make("1f1b", 2, 3)
    one = simulate(schedule, scenario, 1)
    assert simulate(schedule, scenario, 7).seconds_per_minibatch == one.seconds == one.seconds_per_minibatch
    assert one.seconds == 27  # worker 1's last F waits for worker 0's, and that for its first B


def test_weights_apart_go_at_the_pace_of_the_worker_that_falls_behind() -> None:
    """Worker 0 waits for no W of worker 1, and so is ahead of its pace for the first minibatches."""
    costs = ((12, 20, 1), (12, 2, 20))
    scenario = Scenario(tuple(StageTime(forward, backward, weight=weight) for forward, backward, weight in costs))
    schedule = make("zb-h2", 2, 3)
    long = simulate(schedule, scenario, 64)
    steady = long.finished[-1] - long.finished[-2]
    few = simulate(schedule, scenario, steady_minibatches(schedule))
    assert few.finished[-1] - few.finished[-2] < steady == 102
    assert few.seconds_per_minibatch == steady
    assert few.bubble == long.bubble
