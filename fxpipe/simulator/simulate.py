"""Runs a schedule's rows with costs and links; each rank has its own clock.

Ranks depend on each other only through the arrival of messages, and each direction of a link carries the messages of
one worker in that worker's order. So there is no shared clock and no event queue: a rank runs until it needs a message
that has not been sent yet, and continues once it is sent, as in `schedule.order.play`.

If a message waits for its turn, its arrival also depends on what its sender sends later. When a worker sends, all that
its link has carried before is known. When no worker can continue, nothing happens until the first such message for
which a worker waits arrives; so its time is known, too, and that worker continues.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import isclose
from operator import itemgetter
from typing import Literal, NamedTuple

from fxpipe.errors import ScheduleError
from fxpipe.plan.urgency import URGENT
from fxpipe.schedule.action import Action, Event
from fxpipe.schedule.base import Schedule
from fxpipe.schedule.order import play, read
from fxpipe.simulator.channel import Channel, Waiting
from fxpipe.simulator.scenario import NEVER, Scenario
from fxpipe.simulator.script import Script, scripts

Kind = Literal["F", "B", "W", "update"]


class Span(NamedTuple):  # a tuple: a run has tens of thousands
    """A time in which a worker is busy without a break: part of an action between two waits, or the update at its end.

    The last span of an action ends when the action ends, and has no length if the action ends with a wait.
    """

    kind: Kind
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A finished run, from an empty pipeline to an empty pipeline. Times are seconds from its start.

    Attributes:
        spans: by worker, in order. Between them, and before the first, the worker waits.
        finished: when worker 0 ended each minibatch.
        seconds: the whole run.
        seconds_per_minibatch: in the steady state: the slope of `finished` over the second half of the minibatches, or
            over one repetition if they repeat. With separate weight gradients it is the slope of the slowest worker,
            since other workers do not wait for it at once. Without a flush, the last minibatches, while the pipeline
            empties, do not count; if fewer than two are left, as with workers + 1 minibatches for `async`, it is the
            mean of the whole run.
        bubble: the share of the ranks' time in the steady state in which they are idle.
    """

    spans: tuple[tuple[Span, ...], ...]
    finished: tuple[float, ...]
    seconds: float
    seconds_per_minibatch: float
    bubble: float

    def samples_per_second(self, samples_per_minibatch: float) -> float:
        """The throughput of the steady state; `inf` if nothing costs anything."""
        seconds = self.seconds_per_minibatch
        return samples_per_minibatch / seconds if seconds else float("inf")


def simulate(schedule: Schedule, scenario: Scenario, minibatches: int) -> Simulation:
    """Run `minibatches` minibatches, as the real runtime would. Linear in actions and messages.

    Each rank runs its row, the actions of its workers, strictly in order. Messages between workers of a rank cost
    nothing. An action computes up to the point where a message is needed, waits for it, continues, and sends what it
    makes without waiting. A message leaves when its direction of the link is free, occupies it for bytes ÷ bandwidth,
    and arrives after the latency. The processor of each end is busy copying it: the sender's when it is sent; the
    receiver's when it is needed or, if the receiver waits, in the last part of the wait, while the link carries the
    message. An action waits for weights when it begins. A message that waits for its turn leaves in chunks, each when
    its direction is free and nothing urgent has been sent (`fxpipe.plan.urgency`).

    If no message goes from a worker's forward to its neighbour's, or from a backward to the previous worker's, an empty
    message keeps the pipeline's order.

    Raises:
        ScheduleError: the schedule breaks a law, deadlocks, or is for another number of workers.
    """
    workers = len(scenario.workers)
    if schedule.workers != workers:
        raise ScheduleError(f"the schedule has {schedule.workers} workers, the costs are for {workers}")
    if schedule.placement != (scenario.placement or tuple(range(workers))):
        raise ScheduleError(f"the schedule has its workers on ranks {schedule.placement}, the costs on others")
    if minibatches < 1:
        raise ScheduleError(f"a simulation needs at least 1 minibatch, not {minibatches}")
    rows, first = _rows(schedule, minibatches)
    run = _Simulator(scripts(scenario, schedule, minibatches), schedule)
    run.run(rows)
    if len(run.ends) < schedule.ranks:
        play(schedule, rows, lambda worker, action: _needs(schedule, scenario, worker, action))
        raise AssertionError("a run that deadlocks would deadlock with whole actions, too")
    finished = [{span.action.minibatch: span.end for span in spans if span.kind != "F"} for spans in run.spans]
    seconds = max(run.ends.values())
    slow = finished if schedule.weights_apart else finished[:1]  # where no worker waits for W, a later one may lag more
    period = max(_period(schedule, first, list(ends.values()), seconds) for ends in slow)
    working = sum(scenario.busy(worker, schedule.microbatches) for worker in range(workers))
    return Simulation(
        spans=tuple(tuple(spans) for spans in run.spans),
        finished=tuple(finished[0].values()),
        seconds=seconds,
        seconds_per_minibatch=period,
        bubble=max(0.0, 1 - working / (schedule.ranks * period)) if period else 0.0,  # rounding may make it negative
    )


def steady_minibatches(schedule: Schedule) -> int:
    """How many minibatches show a schedule's steady state: four times as many as fill the pipeline, and enough for two
    cycles of four."""
    return 4 if schedule.synchronous else 4 * schedule.filling + 16


@lru_cache(maxsize=32)
def _rows(schedule: Schedule, minibatches: int) -> tuple[list[list[Event]], list[Action]]:
    """The rows of the ranks, and the row of worker 0; cached, for simulations of one schedule with many costs."""
    rows = read(schedule, minibatches)
    return rows, [action for of, action in rows[schedule.placement[0]] if of == 0]


class _Simulator:
    """One running simulation.

    Attributes:
        ends: by rank, when it has finished its row.
    """

    def __init__(self, parts: Sequence[Script], schedule: Schedule) -> None:
        self.parts = parts
        self.schedule = schedule
        self.microbatches = schedule.microbatches
        self.spans: list[list[Span]] = [[] for _ in parts]
        self.ends: dict[int, float] = {}
        self._summed: dict[tuple[int, int], float] = {}  # by worker and minibatch: when its sum is there
        self._awake = list(reversed(range(schedule.ranks)))
        waiting = (channel for part in parts for channel in part.channels if channel.turn != URGENT)
        self._directions = list({id(channel.direction): channel.direction for channel in waiting}.values())

    def run(self, rows: Sequence[Sequence[Event]]) -> None:
        """Run every rank until all have ended or none can continue."""
        walks = [self._walk(rank, row) for rank, row in enumerate(rows)]
        while self._awake or self._arrive():
            next(walks[self._awake.pop()], None)

    def _arrive(self) -> bool:
        """Deliver the first of the messages that wait for their turn and have a waiting receiver; False without one."""
        awaited = [
            (time, place, message)
            for place, direction in enumerate(self._directions)
            for time, message in direction.expected()
            if message.channel.asleep == message.number
        ]
        if not awaited:
            return False
        _, place, message = min(awaited, key=itemgetter(0))
        self._arrived(self._directions[place].carry_all(message))
        return True

    def _walk(self, rank: int, row: Sequence[Event]) -> Iterator[None]:
        """Walk a rank's row; yields when the rank waits for a message that has not been sent."""
        clock = 0.0
        for worker, action in row:
            part, spans = self.parts[worker], self.spans[worker]
            number = action.minibatch * self.microbatches + action.microbatch
            begin = clock
            for seconds, channel, sends, lags in part.actions[action.phase]:
                clock += seconds
                if channel is None:
                    continue
                if sends:
                    clock = self._send(channel, number, clock)
                    continue
                awaited = number
                if lags is not None:
                    if (lag := lags[action.microbatch]) == NEVER:
                        continue
                    awaited = max(0, action.minibatch - lag)
                if channel.ready[awaited] is None:
                    channel.asleep = awaited
                    yield
                ready = channel.ready[awaited]
                assert ready is not None
                copy = 0.0 if channel.copied[awaited] else channel.copy
                channel.copied[awaited] = True
                if ready - copy > clock:
                    if clock > begin:
                        spans.append(Span(action.phase, action, begin, clock))
                    begin = clock = ready - copy
                clock += copy
            spans.append(Span(action.phase, action, begin, clock))  # even without length: the last span of every action
            if self.schedule.ends(action):
                last = self._summed.get((worker, action.minibatch - 1), clock)  # one sum after the other
                self._summed[worker, action.minibatch] = max(clock, last) + part.sums
                if (updated := self.schedule.updated_by(action)) is not None:
                    clock = self._update(worker, action, updated, clock)
        for minibatch in range(row[-1][1].minibatch + 1 - self.schedule.late, row[-1][1].minibatch + 1):
            clock = self._update(*row[-1], minibatch, clock)
        self.ends[rank] = clock

    def _update(self, worker: int, action: Action, minibatch: int, begin: float) -> float:
        """A minibatch's update, after an action, and sending its weights; returns when it is over."""
        begin = max(begin, self._summed[worker, minibatch])
        clock = begin + self.parts[worker].update
        for weights in self.parts[worker].outgoing:
            if minibatch < weights.last:
                clock = self._send(weights.channel, minibatch + 1, clock)
        if clock > begin:
            self.spans[worker].append(Span("update", action, begin, clock))
        return clock

    def _send(self, channel: Channel, number: int, clock: float) -> float:
        """Send a message, and wake its receiver if it is urgent; returns when the sender can continue."""
        direction = channel.direction
        if direction.waiting:
            self._arrived(direction.carry(clock))
        if channel.turn != URGENT:
            channel.wait(number, clock)
            return clock + channel.copy
        channel.send(number, clock)
        self._wake(channel, number)
        return clock + channel.copy

    def _arrived(self, messages: Iterable[Waiting]) -> None:
        for message in messages:
            self._wake(message.channel, message.number)

    def _wake(self, channel: Channel, number: int) -> None:
        if channel.asleep == number:
            channel.asleep = -1
            self._awake.append(self.schedule.placement[channel.dst])


def _needs(schedule: Schedule, scenario: Scenario, worker: int, action: Action) -> Iterator[Event]:
    """Whole actions that an action waits for, in addition to the pipeline's own order."""
    for m in scenario.messages:
        if (m.dst, schedule.runs_in(m.dst_phase)) == (worker, action.phase):
            yield m.src, Action(schedule.runs_in(m.src_phase), action.minibatch, action.microbatch)
    for copy in scenario.weight_copies:
        for phase, lags in copy.reads:
            lag = lags[action.microbatch]
            if (
                (copy.reader, schedule.runs_in(phase)) == (worker, action.phase)
                and lag != NEVER
                and action.minibatch > lag
            ):
                yield copy.owner, schedule.update_of(action.minibatch - lag - 1)


def _period(schedule: Schedule, row: Sequence[Action], finished: Sequence[float], seconds: float) -> float:
    """`Simulation.seconds_per_minibatch`, from worker 0's row and the ends of its minibatches."""
    last = len(finished) - 1
    if not schedule.synchronous:  # when no minibatch enters any more, the last ones are faster or slower
        entered = max(place for place, action in enumerate(row) if action.phase == "F")
        last = sum(schedule.ends(action) for action in row[:entered]) - 1
    gaps = [b - a for a, b in pairwise(finished[last // 2 : last + 1])] if last > 0 else [seconds / len(finished)]
    for length in range(1, len(gaps) // 2 + 1):  # a cycle over several workers repeats after that many minibatches
        if all(isclose(a, b, rel_tol=1e-6) for a, b in zip(gaps, gaps[length:], strict=False)):
            return sum(gaps[:length]) / length
    return sum(gaps) / len(gaps)
