"""Orders of each worker's own: lawful, timed as the simulator times them, never worse than what they began with."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from chains import chain
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.errors import CutError
from fxpipe.planner.links import Links
from fxpipe.planner.setting import Setting
from fxpipe.schedule import check, from_csv, make
from fxpipe.schedule.check import held
from fxpipe.search import Question, Sized, search
from fxpipe.search.own_order import (
    MANNERS,
    ListingManner,
    OwnOrder,
    Rows,
    StageTimes,
    improved,
    listed,
    most_held,
    orders,
    run,
)
from fxpipe.search.own_order_judge import lines_of
from fxpipe.search.reasons import TIE
from fxpipe.simulator import Scenario, WorkerCost, simulate

SECONDS = st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0, 9.0])


@st.composite
def some_times(draw: st.DrawFn) -> StageTimes:
    """Of uneven workers, some of which have room for few microbatches."""
    workers, count = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    return StageTimes(
        count,
        tuple((draw(SECONDS) + 0.5, draw(SECONDS) + 0.5, draw(SECONDS)) for _ in range(workers)),
        tuple(draw(SECONDS) for _ in range(workers)),
        tuple(draw(SECONDS) for _ in range(workers - 1)),
        tuple(draw(SECONDS) for _ in range(workers - 1)),
        tuple(draw(st.integers(1, count)) for _ in range(workers)),
    )


def rows_of(name: str, times: StageTimes) -> Rows:
    """The order of a schedule that has a name."""
    made = make(name, times.workers, times.microbatches)
    return [[(action.phase, action.microbatch) for action in made.until(k, 1)] for k in range(times.workers)]


@given(some_times(), st.sampled_from(MANNERS), st.integers(0, 100))
def test_every_order_is_lawful_and_holds_what_it_may(times: StageTimes, manner: ListingManner, effort: int) -> None:
    for rows in (listed(times, manner), improved(times, [run(times, listed(times, manner))], effort, 2).rows):
        schedule = from_csv("\n".join(lines_of(rows)))
        assert (schedule.workers, schedule.ranks, schedule.microbatches) == (
            times.workers,
            times.workers,
            times.microbatches,
        )
        assert schedule.weights_apart
        check(schedule, 3)
        found = held(schedule)
        assert found == tuple(map(most_held, rows))
        assert all(most <= room for most, room in zip(found, times.held, strict=True))
        assert schedule.lines == lines_of(rows)


@given(some_times(), st.sampled_from(MANNERS))
def test_its_time_is_the_simulators(times: StageTimes, manner: ListingManner) -> None:
    """With one latency for all messages, which both know; the simulator's is the mean of two minibatches."""
    times = replace(times, down=(2.0,) * (times.workers - 1), up=(2.0,) * (times.workers - 1))
    rows = listed(times, manner)
    costs = [WorkerCost(f, b, u, weight=w) for (f, b, w), u in zip(times.spent, times.updates, strict=True)]
    found = simulate(from_csv("\n".join(lines_of(rows))), Scenario(tuple(costs), links=Links(latency=2.0)), 3)
    own = run(times, rows)
    assert sum(max(span.end for span in spans) for spans in found.spans) == pytest.approx(own.later)
    assert own.seconds >= times.bound * (1 - 1e-9)


@given(some_times(), st.integers(0, 200), st.integers(0, 3))
def test_improving_never_makes_it_worse(times: StageTimes, effort: int, shakes: int) -> None:
    times = replace(times, held=(times.microbatches,) * times.workers)
    starts = [order for order, _ in orders(times)[:3]]
    starts += [run(times, rows_of(name, times)) for name in ("zb-h1", "zb-h2")]
    best = improved(times, starts, effort, shakes)
    assert best.seconds <= min(start.seconds for start in starts) * (1 + 1e-9)
    assert run(times, best.rows).seconds == pytest.approx(best.seconds)


def test_listing_finds_what_has_no_bubble() -> None:
    """As ZB-H2 has none where times are even and there is room."""
    even = StageTimes(8, ((1.0, 1.0, 1.0),) * 4, (0.0,) * 4, (0.0,) * 3, (0.0,) * 3, (8,) * 4)
    assert orders(even)[0][0].seconds == pytest.approx(24.0)


def test_what_deadlocks_takes_for_ever() -> None:
    times = StageTimes(2, ((1.0, 1.0, 1.0),) * 2, (0.0,) * 2, (0.0,), (0.0,), (2, 2))
    rows = rows_of("zb-h1", times)
    rows[0] = [("F", 0), ("B", 0), ("W", 0), ("F", 1), ("B", 1), ("W", 1)]
    rows[1] = [("F", 0), ("F", 1), ("B", 0), ("W", 0), ("B", 1), ("W", 1)]
    assert run(times, rows) == OwnOrder(math.inf, math.inf, rows)


def test_weights_of_another_worker_are_waited_for() -> None:
    """A worker that reads what the last one updates begins when that has ended: minibatches do not overlap."""
    times = StageTimes(4, ((1.0, 1.0, 1.0),) * 2, (0.0,) * 2, (0.0,), (0.0,), (4, 4))
    rows = rows_of("zb-h2", times)
    assert run(times, rows).seconds == pytest.approx(12.0)
    assert run(replace(times, weights=((1, 0, "F", 0.5),)), rows).seconds == pytest.approx(13.5)


@settings(max_examples=5, deadline=None)
@given(
    st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=3, max_size=5),
    st.integers(2, 3),
    st.sampled_from([2, 4]),
    st.sampled_from([math.inf, 4.0, 6.0]),
)
def test_in_a_search_it_is_never_worse_than_any_name(
    times: list[tuple[float, float, float]], workers: int, count: int, memory: float
) -> None:
    profile = chain([(f + 0.5, b + 0.5, w) for f, b, w in times], saved=1.0)
    sized = Sized(Setting(microbatches=count, memory=(memory,) * workers), profile, profile)
    try:
        rows = search([sized], Question(workers, ("zb-h1", "zb-h2"), modes=("same",))).rows
    except CutError:  # not even zb-h1 fits
        assert memory < math.inf
        return
    named = min(row.seconds for row in rows if row.schedule != "csv" and row.seconds is not None)
    for row in rows:
        if row.schedule == "csv":
            assert row.seconds is not None
            assert row.seconds <= named * (1 + TIE)
            assert row.memory_bytes <= memory * (1 + 1e-6)
