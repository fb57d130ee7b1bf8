"""Random scenarios against a second simulator: one clock for all, and an event queue."""

from __future__ import annotations

import heapq
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, pairwise
from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.plan.cost_records import StageTime
from fxpipe.plan.spec import PHASES, Phase
from fxpipe.plan.urgency import CHUNK, SAVED, URGENT, WEIGHTS
from fxpipe.planner.links import Links
from fxpipe.schedule import SCHEDULES, Action, Schedule, make
from fxpipe.schedule.action import Event
from fxpipe.schedule.order import read
from fxpipe.simulator.scenario import NEVER, Message, Scenario, WeightCopy
from fxpipe.simulator.simulate import Simulation, simulate

Key = tuple[Any, ...]
NAMES = {"F": "forward", "B": "backward", "W": "weight"}
KINDS: list[tuple[Phase, Phase, bool]] = [
    *(("F", "F", True), ("B", "B", False), ("F", "B", True), ("F", "B", False)),
    *(("F", "W", True), ("F", "W", False), ("B", "W", False), ("W", "W", False)),
]


_LAST = object()


@dataclass
class _Posted:
    """A message that was sent, what of it is left, and in how many chunks that will go."""

    key: Key
    src: int
    dst: int
    size: float
    turn: int
    chunks: int


class Events:
    """The reference: processes that sleep until a time or until something has happened."""

    def __init__(self, schedule: Schedule, scenario: Scenario, minibatches: int) -> None:
        self.schedule, self.scenario, self.minibatches = schedule, scenario, minibatches
        self.now = 0.0
        self.happened: set[Key] = set()
        self.sleepers: dict[Key, list[Iterator[Any]]] = defaultdict(list)
        self.queue: list[tuple[float, int, int, Iterator[Any]]] = []
        self.ties = count()
        self.posted: dict[tuple[int, int], deque[_Posted]] = defaultdict(deque)
        self.begun: dict[tuple[int, Action], float] = {}
        self.ended: dict[tuple[int, Action], float] = {}
        self.copied: set[Key] = set()
        tokens = []
        for a, b in pairwise(range(schedule.workers)):
            for src, dst, phase in ((a, b, "F"), (b, a, "B")):
                same = [m for m in scenario.messages if (m.src, m.src_phase, m.dst, m.dst_phase)
                        == (src, phase, dst, phase)]  # fmt: skip
                tokens += [] if same else [Message(src, phase, dst, phase, 0)]  # type: ignore[arg-type]
        self.messages = [*scenario.messages, *tokens]
        rows = read(schedule, minibatches)
        for row in rows:
            self.start(self.work(row))
        for src in range(schedule.ranks):
            for dst in range(schedule.ranks):
                self.start(self.carry(src, dst))
        while self.queue:
            self.now, _, _, process = heapq.heappop(self.queue)
            self.resume(process)
        assert set(self.ended) == {event for row in rows for event in row}

    def links(self, src: int, dst: int) -> Links:
        """Between two workers; within a rank, all is free."""
        place = self.schedule.placement
        return Links() if place[src] == place[dst] else self.scenario.links

    def start(self, process: Iterator[Any]) -> None:
        heapq.heappush(self.queue, (self.now, 0, next(self.ties), process))

    def resume(self, process: Iterator[Any]) -> None:
        for wish in process:
            if isinstance(wish, float):
                heapq.heappush(self.queue, (self.now + wish, 0, next(self.ties), process))
                return
            if wish is _LAST:
                heapq.heappush(self.queue, (self.now, 1, next(self.ties), process))
                return
            if wish not in self.happened:
                self.sleepers[wish].append(process)
                return

    def happen(self, key: Key) -> None:
        self.happened.add(key)
        for process in self.sleepers.pop(key, []):
            self.start(process)

    def carry(self, src: int, dst: int) -> Iterator[Any]:
        """Chunk by chunk: at each time, all that is sent then is there before the next chunk is chosen."""
        posted = self.posted[src, dst]
        begun = set()
        for number in count():
            yield ("posted", src, dst, number)
            while posted:
                if not any(message.turn == URGENT for message in posted):
                    yield _LAST  # what else happens at this time may send something urgent
                message = min(posted, key=lambda message: message.turn)  # the first of those
                links, way = self.links(message.src, message.dst), (message.src, message.dst)
                if message.key not in begun:
                    begun.add(message.key)
                    self.start(self.later(links.latency_of(*way), ("first byte", message.key)))
                size = message.size if message.turn == URGENT else min(CHUNK, message.size)
                message.size -= size
                message.chunks -= 1
                if not message.chunks:
                    posted.remove(message)
                yield float(size / links.bandwidth_of(*way))
                if not message.chunks:
                    self.start(self.later(links.latency_of(*way), ("arrived", message.key)))

    def later(self, seconds: float, key: Key) -> Iterator[Any]:
        yield float(seconds)
        self.happen(key)

    def send(self, src: int, dst: int, key: Key, size: float, turn: int) -> Iterator[Any]:
        if self.schedule.placement[src] == self.schedule.placement[dst]:
            size, turn = 0.0, URGENT
        chunks = 1 if turn == URGENT else max(1, ceil(size / CHUNK))
        ranks = self.schedule.placement[src], self.schedule.placement[dst]
        self.posted[ranks].append(_Posted(key, src, dst, size, turn, chunks))
        done = sum(1 for k in self.happened if k[:3] == ("posted", *ranks))
        self.happen(("posted", *ranks, done))
        yield float(self.links(src, dst).copy * size)

    def receive(self, src: int, dst: int, key: Key, size: float) -> Iterator[Any]:
        yield ("first byte", key)
        if key not in self.copied:
            self.copied.add(key)
            yield float(self.links(src, dst).copy * size)
        yield ("arrived", key)

    def work(self, row: list[Event]) -> Iterator[Any]:
        last, apart = self.schedule.microbatches - 1, self.schedule.weights_apart
        for worker, action in row:
            cost = self.scenario.workers[worker]
            self.begun[worker, action] = self.now
            yield from self.compute(worker, action, action.phase, getattr(cost, NAMES[action.phase]))
            if action.phase == "B" and not apart:
                yield from self.compute(worker, action, "W", cost.weight)
            ends = action.phase == ("W" if apart else "B") and action.microbatch == last
            made = [action.minibatch - self.schedule.late] if ends and action.minibatch >= self.schedule.late else []
            if (worker, action) == row[-1]:
                made += range(self.minibatches - self.schedule.late, self.minibatches)
            for minibatch in made:
                yield float(cost.update)
                for i, r in enumerate(self.scenario.weight_copies):
                    version = minibatch + 1
                    if r.owner == worker and any(
                        version + lag < self.minibatches for _, lags in r.reads for lag in lags if lag != NEVER
                    ):
                        yield from self.send(r.owner, r.reader, ("weights", i, version), r.bytes, r.turn)
            self.ended[worker, action] = self.now

    def compute(self, worker: int, action: Action, phase: Phase, seconds: float) -> Iterator[Any]:
        for i, r in enumerate(self.scenario.weight_copies):
            for reads, lags in r.reads:
                lag = lags[action.microbatch]
                if (worker, phase) == (r.reader, reads) and lag != NEVER and action.minibatch > lag:
                    yield from self.receive(r.owner, worker, ("weights", i, action.minibatch - lag), r.bytes)
        events: list[tuple[float, int, int, bool]] = []
        for i, m in enumerate(self.messages):
            if (worker, phase) == (m.dst, m.dst_phase):
                events.append((m.needed, m.places[1], i, False))
            if (worker, phase) == (m.src, m.src_phase):
                events.append((m.made, m.places[0], i, True))
        done = 0.0
        for share, _, i, sends in sorted(events):
            yield float((share - done) * seconds)
            done = share
            m = self.messages[i]
            key = (i, action.minibatch, action.microbatch)
            ways = m.src, m.dst, key, m.bytes
            yield from self.send(*ways, m.turn) if sends else self.receive(*ways)
        yield float((1 - done) * seconds)


def ends(simulation: Simulation) -> dict[tuple[int, Action], float]:
    """When each action is over, its update included."""
    return {(w, span.action): span.end for w, spans in enumerate(simulation.spans) for span in spans}


@st.composite
def runs(draw: st.DrawFn) -> tuple[Schedule, Scenario, int]:
    """Costs in quarters, so that all sums are exact; every lag is one that the schedule can have."""
    workers = draw(st.integers(1, 4))
    name = draw(st.sampled_from([n for n, kind in SCHEDULES.items() if workers % kind.usual_virtual == 0]))
    microbatches = draw(st.integers(1, 3))
    places = [(), tuple(worker % 2 for worker in range(workers))]
    several = workers > 1 and SCHEDULES[name].usual_virtual == 1 and SCHEDULES[name].synchronous
    schedule = make(name, workers, microbatches, draw(st.sampled_from(places)) if several else ())
    small = st.integers(0, 12).map(lambda v: v / 4)
    share = st.integers(0, 4).map(lambda v: v / 4)
    costs = draw(st.lists(st.builds(StageTime, small, small, small, weight=small), min_size=workers, max_size=workers))
    messages, weight_copies = [], []
    if workers > 1:
        pair = st.tuples(st.integers(0, workers - 1), st.integers(0, workers - 1)).filter(lambda p: p[0] < p[1])
        for low, high in draw(st.lists(pair, max_size=8)):
            source, target, down = draw(st.sampled_from(KINDS))
            src, dst = (low, high) if down else (high, low)
            order = draw(st.sampled_from([(1, 0), (0, 1), (0, 0), (2, 2)]))
            messages.append(Message(src, source, dst, target, draw(small), draw(share), draw(share), order))
        least = 0 if schedule.synchronous else workers - 1 + schedule.late
        lag = st.sampled_from([NEVER, *range(least, 5)])
        lags = st.tuples(*[lag] * microbatches).filter(lambda lags: max(lags) != NEVER)
        reads = st.lists(st.tuples(st.sampled_from(PHASES), lags), min_size=1, max_size=2)
        for low, high in draw(st.lists(pair, max_size=3)):
            owner, reader = (low, high) if draw(st.booleans()) else (high, low)
            weight_copies.append(WeightCopy(owner, reader, tuple(draw(reads)), draw(small)))  # type: ignore[arg-type]
    latency = [[draw(small) for _ in range(schedule.ranks)] for _ in range(schedule.ranks)]
    of_workers = tuple(tuple(latency[a][b] for b in schedule.placement) for a in schedule.placement)
    links = Links(draw(st.sampled_from([0.5, 2.0, float("inf")])), of_workers, draw(st.sampled_from([0.0, 0.25, 1.0])))
    scenario = Scenario(tuple(costs), tuple(messages), tuple(weight_copies), links, schedule.placement)
    return schedule, scenario, draw(st.integers(1, 5))


@st.composite
def waiting(draw: st.DrawFn) -> tuple[Schedule, Scenario, int]:
    """The same with a chunk for each byte; any message may wait its turn, also one of which a forward is made."""
    schedule, scenario, minibatches = draw(runs())
    turn = st.sampled_from([URGENT, URGENT, SAVED, WEIGHTS])
    links = scenario.links
    assert isinstance(links.bandwidth, float)
    scenario = replace(
        scenario,
        messages=tuple(replace(m, bytes=m.bytes * CHUNK, turn=draw(turn)) for m in scenario.messages),
        weight_copies=tuple(replace(r, bytes=r.bytes * CHUNK, turn=draw(turn)) for r in scenario.weight_copies),
        links=replace(links, bandwidth=links.bandwidth * CHUNK, copy=links.copy / CHUNK),
    )
    return schedule, scenario, minibatches


@given(waiting())
def test_what_waits_its_turn_equals_the_event_queue(run: tuple[Schedule, Scenario, int]) -> None:
    assert ends(simulate(*run)) == Events(*run).ended


@given(runs())
def test_it_equals_the_event_queue(run: tuple[Schedule, Scenario, int]) -> None:
    assert ends(simulate(*run)) == Events(*run).ended


@given(runs())
def test_every_worker_is_busy_or_waits(run: tuple[Schedule, Scenario, int]) -> None:
    schedule, scenario, minibatches = run
    found = simulate(*run)
    for worker, spans in enumerate(found.spans):
        assert all(a.end <= b.start for a, b in pairwise(spans))
        assert all(span.start <= span.end for span in spans)
        busy = sum(span.end - span.start for span in spans)
        if not scenario.weight_copies:  # of whose last versions not all are sent
            assert busy == minibatches * scenario.busy(worker, schedule.microbatches)


@given(runs(), st.data())
def test_what_costs_more_ends_no_sooner(run: tuple[Schedule, Scenario, int], data: st.DataObject) -> None:
    schedule, scenario, minibatches = run
    worker = data.draw(st.integers(0, schedule.workers - 1))
    field = data.draw(st.sampled_from(["forward", "backward", "weight", "update"]))
    costs = list(scenario.workers)
    costs[worker] = replace(costs[worker], **{field: getattr(costs[worker], field) + 1})
    slower = [replace(scenario, workers=tuple(costs)), replace(scenario, links=replace(scenario.links, latency=4.0))]
    slower += [replace(scenario, messages=tuple(replace(m, bytes=m.bytes + 1) for m in scenario.messages))]
    before = ends(simulate(*run))
    for other in slower:
        after = ends(simulate(schedule, other, minibatches))
        assert all(after[key] >= before[key] for key in before)


@pytest.mark.parametrize(
    ("name", "microbatches", "minibatches"),
    [("1f1b", 256, 1), ("gpipe", 256, 1), ("async", 1, 256), ("zb-h2", 256, 1)],
)
def test_64_workers_and_256_microbatches_take_seconds(name: str, microbatches: int, minibatches: int) -> None:
    messages = [
        Message(*ends, size, made, needed)
        for k in range(63)
        for ends in ((k, "F", k + 1, "F"), (k + 1, "B", k, "B"), (k, "F", k + 1, "B"))
        for size, made, needed in ((1e6, 1.0, 0.0), (2e6, 0.5, 0.25))
    ]  # fmt: skip
    scenario = Scenario((StageTime(0.01, 0.02, 0.001),) * 64, tuple(messages), (), Links(1e9, 1e-4, 3e-10))
    start = time.perf_counter()
    simulate(make(name, 64, microbatches), scenario, minibatches)
    assert time.perf_counter() - start < 30  # one second here; the limit only catches another order of growth
