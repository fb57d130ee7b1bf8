"""Reads a trace file, which appears under its name only when it is whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxpipe.observe.trace import ACTIONS, HEAD, KINDS, REPLICA, TAIL, Event, worker_of
from fxpipe.typed_json import Malformed, convert, parse


@dataclass(frozen=True)
class Trace:
    """What was read from a trace file."""

    events: tuple[Event, ...]  # those of the wanted minibatches, in the file's order; of replicas, the first's
    minibatches: int  # how many the whole file has, wanted or not
    other: dict[str, Any]  # the file's `otherData`: build, schedule, seconds


MOST_TIME = 1e15
"""Microseconds, 30 years: anything later is not a time."""


@dataclass(frozen=True)
class _Arguments:
    minibatch: int
    microbatch: int = 0


@dataclass(frozen=True)
class _SpanJson:
    """A line of the file, as far as it is read."""

    pid: int
    cat: str
    name: str
    ts: float
    dur: float
    args: _Arguments
    tid: int = 0


def read_trace(path: str | Path, minibatches: int | None = None) -> Trace:
    """Read a trace file: all events, or those of so many first minibatches, and then the others take no memory.

    Raises:
        OSError: it cannot be opened.
        Malformed: it is not a trace of fxpipe, or not a whole one.
    """
    events: list[Event] = []
    count = 0
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        if file.readline().strip() != HEAD:
            raise Malformed("it is not a trace of fxpipe")
        for number, line in enumerate(file, start=2):
            if line.startswith(TAIL):
                other = parse(HEAD + line, finite=False).get("otherData")
                return Trace(tuple(events), count, other if isinstance(other, dict) else {})
            body = line.strip().removesuffix(",")
            minibatch = _minibatch(body)
            if minibatches is None or minibatch < minibatches:
                try:
                    event = _event(parse(body, finite=False))
                except Malformed as error:
                    raise Malformed(f"line {number} is not an event") from error
                if event is None:
                    continue
                events.append(event)
                minibatch = event.minibatch
            count = max(count, minibatch + 1)
    raise Malformed("it is cut off")


def _minibatch(line: str) -> int:
    """The minibatch of an event, found without parsing it; -1 if it is not seen."""
    begin = line.rfind('"minibatch":') + 12
    number = line[begin : line.find(",", begin)] if begin >= 12 and line.endswith("}}") else ""
    return int(number) if number.isdecimal() else -1


def _event(found: Any) -> Event | None:
    """An event of the first replica; None for what names rows, and for other replicas'."""
    if not isinstance(found, dict) or found.get("ph") not in ("M", "X"):
        raise Malformed("no event")
    if found["ph"] == "M":
        return None
    span = convert(found, _SpanJson, extra=True)
    if span.pid >= REPLICA:
        return None
    worker, minibatch, microbatch = worker_of(span.pid, span.tid), span.args.minibatch, span.args.microbatch
    numbers = min(worker, minibatch, microbatch) >= 0 and worker < REPLICA
    if span.cat not in KINDS or not numbers or not max(abs(span.ts), abs(span.dur)) < MOST_TIME:
        raise Malformed("no such event")
    begin, length = round(span.ts * 1e3), round(span.dur * 1e3)
    return Event(worker, span.cat, span.name, minibatch, microbatch, begin, begin + max(length, 0))


def flatten(events: Iterable[Event]) -> list[Event]:
    """Nested events as pieces that do not overlap: if several are open, the innermost counts.

    The pieces of a worker are in order, worker after worker. Pieces of no length are left out.
    """
    pieces: list[Event] = []
    by_worker: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        by_worker[event.worker].append(event)
    for _, own in sorted(by_worker.items()):
        own.sort(key=lambda e: (e.begin, -e.end, e.kind not in ACTIONS))
        pieces += _pieces(own)
    return pieces


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
