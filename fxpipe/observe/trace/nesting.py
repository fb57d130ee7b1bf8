"""Flattens nested events: what a worker does at every moment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from fxpipe.observe.trace import ACTIONS, Event


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
