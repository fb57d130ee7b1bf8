"""Workers that are no chain: their graph, the rows that follow from it, and what workers know of each other."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.plan.spec import EdgeKind, EdgeSpec, Phase, TensorSpec
from fxpipe.schedule import SCHEDULES, Action, Async, Schedule, Versions, check, grid, make
from fxpipe.schedule.check import held, unreceived
from fxpipe.schedule.graph import Graph, chain, graph_of, graph_of_edges, graph_text, handed_on_by, reach_of
from fxpipe.schedule.order import TimedAction, play, read

TOWERS: Graph = ((), (0,), (), (1, 2))
"""A tower on workers 0 and 1, another on worker 2, and the head."""

KNOWING = ["gpipe", "1f1b", "zb-h1", "zb-h2", "async", "async-late", "nf1b"]
"""Schedules whose rows follow the graph."""


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Any graph of up to seven workers."""
    workers = draw(st.integers(2, 7))
    pairs = [(a, b) for b in range(workers) for a in range(b)]
    return graph_of(draw(st.sets(st.sampled_from(pairs))), draw(st.sets(st.integers(1, workers - 1))), workers)


@pytest.mark.parametrize(
    ("orders", "fed", "found"),
    [
        ({(0, 1), (1, 3), (2, 3)}, {2}, TOWERS),
        ({(0, 1), (1, 2), (2, 3)}, {1, 3}, ()),
        ({(0, 1), (1, 2), (0, 2), (2, 3), (0, 3)}, set(), ()),  # skips
        ({(0, 3)}, set(), ()),  # workers with nothing to do keep their place
        ({(0, 2), (0, 3), (2, 3)}, {1, 2}, ((), (), (0, 1), (2,))),  # on worker 1 no other depends
        ({(0, 3), (1, 3), (2, 3)}, {1, 2}, ((), (), (), (0, 1, 2))),
    ],
)
def test_what_waits_for_what(orders: set[tuple[int, int]], fed: set[int], found: Graph) -> None:
    assert graph_of(orders, fed, 4) == found


def test_the_edges_of_a_plan_are_its_graph() -> None:
    """Saved values, which forwards send to backwards, order nothing; a backward's gradients and tokens do."""

    def edge(kind: EdgeKind, src: int, src_phase: Phase, dst: int, dst_phase: Phase) -> EdgeSpec:
        return EdgeSpec(f"{kind}{src}{dst}", kind, src, src_phase, dst, dst_phase, TensorSpec((), (), "float32"))

    edges = [
        edge("activation", 0, "F", 1, "F"),
        edge("input", 0, "F", 2, "F"),
        edge("input", 2, "F", 3, "F"),
        edge("saved", 0, "F", 2, "B"),
        edge("gradient", 3, "B", 1, "W"),
        edge("token", 3, "B", 2, "B"),
    ]
    assert graph_of_edges(edges, 4) == TOWERS
    assert graph_text(TOWERS) == "side by side: workers 0 → 1 → 3, 2 → 3"
    assert graph_text(()) == ""


def test_only_those_hand_a_value_on_for_whom_its_reader_waits() -> None:
    reach = reach_of(TOWERS)
    assert handed_on_by(0, [1, 2, 3], reach, of_batch=True) == [None, None, 1]
    assert handed_on_by(0, [1, 2, 3], reach) == [None, None, 0], "worker 2 has the batch alone of worker 0's"
    assert handed_on_by(3, [2, 1, 0], reach) == [None, None, 1]
    assert handed_on_by(2, [3], reach) == [None]
    assert handed_on_by(1, [2, 3], reach) == [None, None], "worker 2 does not wait for worker 1, so it has nothing yet"
    assert handed_on_by(0, [1, 2, 3], reach_of(chain(4))) == [None, 0, 1]


def test_async_on_two_towers() -> None:
    """Its picture is in docs/concepts/schedules.md. It is as deep as a chain of three workers."""
    assert grid(make("async", 4).along(TOWERS), 5) == PICTURE
    lags = [Versions(make("async", 4).along(TOWERS)).lag("F", worker, worker) for worker in range(4)]
    assert lags == [2, 1, 1, 0]


PICTURE = """\
worker 0: F0 F1 F2 .. .. B0 F3 B1 F4 B2 .. B3 .. B4
worker 1: .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 .. B4
worker 2: F0 F1 .. .. B0 F2 B1 F3 B2 F4 B3 .. B4
worker 3: .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"""


def test_1f1b_on_four_branches_fills_and_drains_as_fast_as_on_two_workers() -> None:
    branches = make("1f1b", 4, 3).along(((), (), (), (0, 1, 2)))
    of_two = grid(make("1f1b", 2, 3), 1).splitlines()
    assert [line[10:] for line in grid(branches, 1).splitlines()] == [
        line[10:] for line in [of_two[0]] * 3 + of_two[1:]
    ]
    assert held(branches) == (2, 2, 2, 1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_chain_that_is_written_out_is_the_chain(name: str) -> None:
    schedule = make(name, 4, 4)
    assert schedule.along(()) is schedule
    out = dataclasses.replace(schedule, after=chain(4))
    assert grid(out, 2) == grid(schedule, 2)


@given(graphs(), st.sampled_from(KNOWING), st.integers(1, 4))
def test_every_graph_is_lawful_and_no_worker_holds_more_than_in_a_chain(graph: Graph, name: str, count: int) -> None:
    plain = make(name, len(graph or chain(0)) or 2, count)
    schedule = plain.along(graph)
    check(schedule, 4)
    assert all(own <= chained for own, chained in zip(held(schedule), held(plain), strict=True))
    for worker, phase, j in product(range(schedule.workers), schedule.phases, range(count)):
        least = schedule.late if phase == "F" and schedule.depths[worker] == 0 else 0
        assert Versions(schedule).lag(phase, worker, worker, j) >= least


class ChainRows(Async):
    """The rows of a chain, whatever the graph."""

    name = "chain-rows"

    def ahead(self, worker: int) -> int:
        return self.workers - 1 - worker


@given(graphs(), st.sampled_from([*(SCHEDULES[name] for name in KNOWING), ChainRows]), st.integers(1, 3))
def test_what_a_worker_knows_to_be_received(graph: Graph, kind: type[Schedule], microbatches: int) -> None:
    """By the order of actions alone, all that has happened to a microbatch before an action of a later one."""
    workers = len(graph) or 2
    schedule = kind(workers, microbatches).along(graph)
    most = unreceived(schedule)
    minibatches = 2 * most // microbatches + 4
    steps = play(schedule, read(schedule, minibatches))
    known = _knowledge(schedule, steps)
    last = minibatches * microbatches - 1
    for worker, q in product(range(workers), range(last - most)):
        later = Action("F", *divmod(q + most, microbatches))
        assert min(known[worker, later]) > q, f"worker {worker} at {later}"


def _knowledge(schedule: Schedule, steps: list[TimedAction]) -> dict[tuple[int, Action], tuple[int, ...]]:
    """After each action: of how many microbatches each worker is known to have ended all actions."""
    now = [(0,) * schedule.workers] * schedule.workers
    known: dict[tuple[int, Action], tuple[int, ...]] = {}
    for step in steps:
        clock = now[step.worker]
        for event in step.after:
            clock = tuple(map(max, clock, known[event]))
        ended = step.action.phase == schedule.last_phase
        clock = tuple(count + (ended and worker == step.worker) for worker, count in enumerate(clock))
        now[step.worker] = known[step.worker, step.action] = clock
    return known


@given(graphs())
def test_workers_are_as_far_ahead_as_their_longest_way(graph: Graph) -> None:
    workers = len(graph) or 2
    schedule = make("1f1b", workers).along(graph)

    def longest(worker: int) -> int:
        return max((1 + longest(later) for later in range(workers) if worker in schedule.graph[later]), default=0)

    assert [schedule.ahead(worker) for worker in range(1, workers)] == [longest(worker) for worker in range(1, workers)]
    assert schedule.ahead(0) == max(longest(worker) for worker in range(workers))
    assert [schedule.depths[worker] for worker in (0, workers - 1)] == [schedule.filled_by - 1, 0]
    without = make("async", workers).along(graph)
    assert without.depths == tuple(max(schedule.depths[worker:]) for worker in range(workers))


def test_without_a_flush_no_worker_is_less_far_ahead_than_the_next() -> None:
    """Else one would wait for a note of the other's backward, and that one for a note of its forward."""
    graph: Graph = ((), (0,), (), (2,), (1, 3))
    assert [make("1f1b", 5).along(graph).ahead(worker) for worker in range(5)] == [2, 1, 2, 1, 0]
    assert [make("async", 5).along(graph).ahead(worker) for worker in range(5)] == [2, 2, 2, 1, 0]


@given(graphs(), st.sampled_from(KNOWING), st.integers(1, 3))
def test_notes_from_worker_to_worker_do_not_deadlock(graph: Graph, name: str, microbatches: int) -> None:
    """Notes go through all workers in their order, whatever the graph. With a flush, a worker goes on after a minibatch
    when all have ended it. Without one, a note goes up after a minibatch's backwards, and another one down with its
    first forward."""
    schedule = make(name, len(graph) or 2, microbatches).along(graph)
    rows = read(schedule, 6)
    previous = {(of, action): row[place - 1][1] for row in rows for place, (of, action) in enumerate(row) if place}

    def needs(worker: int, action: Action) -> list[tuple[int, Action]]:
        found, before = [], previous.get((worker, action))
        if before is not None and schedule.ends(before):
            others = range(schedule.workers) if schedule.synchronous else range(worker + 1, schedule.workers)
            found += [(other, before) for other in others]
        if worker and not schedule.synchronous and (action.phase, action.microbatch) == ("F", 0):
            found.append((worker - 1, action))
        return found

    assert len(play(schedule, rows, needs)) == sum(map(len, rows))
