"""Flattens nested events: what a worker does at every moment, and how long it does each kind of thing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter

from fxpipe.observe.trace import ACTIONS, KINDS, Event
from fxpipe.observe.trace.reader import Trace


def flatten(events: Iterable[Event]) -> list[Event]:
    """Nested events as pieces that do not overlap: if several are open, the innermost counts.

    The pieces of a worker are in order, worker after worker. Pieces of no length are left out.
    """
    found: list[Event] = []
    by_worker: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        by_worker[event.worker].append(event)
    for _, own in sorted(by_worker.items()):
        own.sort(key=lambda e: (e.begin, -e.end, e.kind not in ACTIONS))
        found += _pieces(own)
    return found


def busy(trace: Trace) -> dict[int, dict[str, float]]:
    """Seconds by worker and kind, exclusive: an event inside another counts only as its own kind."""
    nanoseconds: dict[int, dict[str, int]] = {}
    for worker, own in groupby(flatten(trace.events), key=attrgetter("worker")):
        row = nanoseconds.setdefault(worker, dict.fromkeys(KINDS, 0))
        for piece in own:
            row[piece.kind] = row.get(piece.kind, 0) + piece.end - piece.begin
    return {worker: {kind: value / 1e9 for kind, value in row.items()} for worker, row in nanoseconds.items()}


def _pieces(events: Sequence[Event]) -> Iterator[Event]:
    """Of one worker, sorted by begin, the outer before the inner."""
    stack: list[Event] = []
    now = events[0].begin

    def until(time: int) -> Iterator[Event]:
        """What was open on top of the stack, up to `time`."""
        nonlocal now
        while stack and stack[-1].end <= time:
            top = stack.pop()
            if top.end > now:
                yield top._replace(begin=now, end=top.end)
                now = top.end
        if stack and time > now:
            yield stack[-1]._replace(begin=now, end=time)
        now = max(now, time)

    for event in events:
        yield from until(event.begin)
        if stack and event.end > stack[-1].end:  # not nested: written by another program
            event = event._replace(end=stack[-1].end)
        stack.append(event)
    yield from until(max(event.end for event in events))
