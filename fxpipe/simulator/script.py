"""The steps of a worker within an action: points, each with compute before it and a message at it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from fxpipe.plan.spec import PHASES, Phase
from fxpipe.plan.urgency import URGENT
from fxpipe.planner.links import Links
from fxpipe.schedule.base import Schedule
from fxpipe.simulator.channel import Channel, Direction
from fxpipe.simulator.scenario import NEVER, Message, Scenario

BEFORE_ALL = -1
"""The place of weights that an action reads: it waits for them when it begins."""


class Point(NamedTuple):  # a tuple: read millions of times
    """`seconds` of compute, then a message to send or to wait for, or the end of the action.

    `lags` are those of a weight copy, by microbatch; None for a message of the microbatch itself.
    """

    seconds: float
    channel: Channel | None = None
    sends: bool = False
    lags: tuple[int, ...] | None = None


_Placed = tuple[float, int, Point]
"""A point, after the share and the place of the action at which it is."""


class Outgoing(NamedTuple):
    """Weights that a worker sends after its updates, up to the last version that any worker will read."""

    channel: Channel
    last: int


@dataclass(frozen=True)
class Script:
    """What one worker does: its actions by phase, the seconds of its update, what it sends after that, and the seconds
    that sums over replicas take."""

    actions: Mapping[Phase, tuple[Point, ...]]
    update: float
    outgoing: tuple[Outgoing, ...]
    sums: float

    @property
    def channels(self) -> Iterator[Channel]:
        """All channels on which the worker sends."""
        points = (point for points in self.actions.values() for point in points)
        yield from (point.channel for point in points if point.sends and point.channel is not None)
        yield from (weights.channel for weights in self.outgoing)


def scripts(scenario: Scenario, schedule: Schedule, minibatches: int) -> list[Script]:
    """Every worker's script for one run, with empty channels."""
    directions: dict[tuple[int, int], Direction] = {}
    steps: dict[tuple[int, Phase], list[_Placed]] = {}
    outgoing: list[list[Outgoing]] = [[] for _ in scenario.workers]

    def channel(src: int, dst: int, size: float, count: int, turn: int) -> Channel:
        if scenario.within(src, dst):  # arrives at once
            return Channel(src, dst, 0.0, Links(), Direction(), count, URGENT)
        ranks = schedule.placement[src], schedule.placement[dst]
        direction = directions.setdefault(ranks, Direction())
        return Channel(src, dst, size, scenario.links, direction, count, turn)

    for copy in scenario.weight_copies:
        weights = channel(copy.owner, copy.reader, copy.bytes, minibatches, copy.turn)
        weights.ready[0], weights.copied[0] = 0.0, True
        newest = min(lag for _, lags in copy.reads for lag in lags if lag != NEVER)
        outgoing[copy.owner].append(Outgoing(weights, minibatches - 1 - newest))
        for phase, lags in copy.reads:
            steps.setdefault((copy.reader, phase), []).append((0.0, BEFORE_ALL, Point(0.0, weights, False, lags)))
    for m in (*scenario.messages, *tokens(scenario, schedule)):
        value = channel(m.src, m.dst, m.bytes, schedule.microbatches * minibatches, m.turn)
        steps.setdefault((m.dst, m.dst_phase), []).append((m.needed, m.places[1], Point(0.0, value)))
        steps.setdefault((m.src, m.src_phase), []).append((m.made, m.places[0], Point(0.0, value, True)))
    return [
        Script(
            {
                action: tuple(
                    point
                    for phase in PHASES
                    if schedule.runs_in(phase) == action
                    for point in _walk(steps.get((worker, phase), []), time.of(phase))
                )
                for action in schedule.phases
            },
            time.update,
            tuple(outgoing[worker]),
            scenario.sums[worker] if scenario.sums else 0.0,
        )
        for worker, time in enumerate(scenario.workers)
    ]


def tokens(scenario: Scenario, schedule: Schedule) -> Iterator[Message]:
    """Empty messages that keep the pipeline's order between workers that exchange no others.

    A worker that begins with the batch gets it at the beginning of worker 0's forward, which costs nothing here.
    """
    ordered = {(m.src, m.dst) for m in scenario.messages if m.src_phase == m.dst_phase != "W"}
    for worker, firsts in enumerate(schedule.graph):
        if worker and not firsts and (0, worker) not in ordered:
            yield Message(0, "F", worker, "F", 0.0, made=0.0)
        for before in firsts:
            if (before, worker) not in ordered:
                yield Message(before, "F", worker, "F", 0.0)
            if (worker, before) not in ordered:
                yield Message(worker, "B", before, "B", 0.0)


def _walk(steps: list[_Placed], seconds: float) -> Iterator[Point]:
    """The points in order of share, then place."""
    done = 0.0
    for share, _, point in sorted(steps, key=itemgetter(0, 1)):
        yield point._replace(seconds=(share - done) * seconds)
        done = share
    yield Point((1 - done) * seconds)
