"""Reads a trace file, even if it is cut off: its events, and a sentence for what is missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fxpipe.observe.trace import HEAD, KINDS, REPLICA, TAIL, Event, worker_of
from fxpipe.typed_json import Malformed, convert, parse


@dataclass(frozen=True)
class Trace:
    """What could be read from a trace file.

    Attributes:
        events: those of the wanted minibatches, in the file's order; of replicas, the first's.
        workers: how many it is of, if that can be seen.
        minibatches: how many the whole file has, wanted or not.
        other: the file's `otherData`: build, schedule, seconds; empty if the file is cut off.
        problems: what is missing or wrong, a sentence each.
    """

    events: tuple[Event, ...]
    workers: int
    minibatches: int
    other: dict[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def read_trace(path: str | Path, minibatches: int | None = None) -> Trace:
    """Read a trace file, even if it is cut off.

    Args:
        minibatches: only the events of this many first minibatches; None means all. The others take no memory.

    Raises:
        OSError: it cannot be opened.
    """
    path = Path(path)
    with path.open(encoding="utf-8", errors="replace") as file:
        if file.readline().strip() != HEAD:
            return Trace((), 0, 0, problems=(f"{path.name} is not a trace of fxpipe: its timeline is missing",))
        return _read_lines(path.name, file, minibatches)


def trace_workers(path: str | Path) -> int:
    """How many workers the first lines of a trace file name: 0 if it is not one of ours."""
    workers = 0
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        if file.readline().strip() != HEAD:
            return 0
        for line in file:
            if not line.startswith('{"ph":"M"'):
                break
            named = _PROCESS.search(line)
            workers += named is not None and int(named[1]) < REPLICA
    return workers


MOST_WORKERS = REPLICA
_PROCESS = re.compile(r'"name":"process_name","pid":(\d+),')
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


class _TraceEvents:
    """Events as they are read, counted and kept."""

    def __init__(self, minibatches: int | None) -> None:
        self.limit = minibatches
        self.events: list[Event] = []
        self.workers = 0
        self.minibatches = 0
        self.shown = 0

    def passes(self, line: str) -> bool:
        """Whether a line is of a minibatch that is not wanted, found without parsing it."""
        if self.limit is None:
            return False
        begin = line.rfind('"minibatch":') + 12
        end = line.find(",", begin)
        if begin < 12 or end < 0 or not line.endswith("}}"):
            return False
        number = line[begin:end]
        if not number.isdigit() or int(number) < self.limit:
            return False
        self.minibatches = max(self.minibatches, int(number) + 1)
        self.shown += 1
        return True

    def take(self, event: Any) -> None:
        """Keep an event if it is one of ours; ignore any other.

        Raises:
            Malformed: it is not an event at all.
        """
        if not isinstance(event, dict):
            raise Malformed("no event")
        process, row = event.get("pid"), event.get("tid", 0)
        if isinstance(process, int) and isinstance(row, int) and (worker := worker_of(process, row)) < MOST_WORKERS:
            self.workers = max(self.workers, worker + 1)
        if isinstance(process, int) and process >= REPLICA:
            return
        if event.get("ph") != "X" or event.get("cat") not in KINDS or not isinstance(event.get("args"), dict):
            return
        found = convert(event, _SpanJson, extra=True)
        minibatch, microbatch = found.args.minibatch, found.args.microbatch
        worker = worker_of(found.pid, found.tid)
        if not 0 <= worker < MOST_WORKERS or min(minibatch, microbatch) < 0:
            raise Malformed("no worker, minibatch or microbatch has this number")
        if not (abs(found.ts) < MOST_TIME and abs(found.dur) < MOST_TIME):
            raise Malformed("no time")
        self.minibatches = max(self.minibatches, minibatch + 1)
        self.shown += 1
        if self.limit is None or minibatch < self.limit:
            begin, length = round(found.ts * 1e3), round(found.dur * 1e3)
            end = begin + max(length, 0)
            self.events.append(Event(worker, found.cat, found.name, minibatch, microbatch, begin, end))

    def trace(self, other: dict[str, Any], problems: Sequence[str]) -> Trace:
        return Trace(tuple(self.events), self.workers, self.minibatches, other, tuple(problems))


def _read_lines(name: str, file: Iterable[str], minibatches: int | None) -> Trace:
    """The lines after the first, up to the one that ends the list of events."""
    reading = _TraceEvents(minibatches)
    wrong: list[int] = []
    number = 1
    for number, line in enumerate(file, start=2):
        line = line.strip()
        if line.startswith(TAIL):
            problems = _wrong_lines(name, wrong)
            try:
                other = parse(HEAD + line, finite=False).get("otherData", {})
            except Malformed:
                return reading.trace({}, [*problems, f"{name} ends in the middle of line {number}, after all events"])
            return reading.trace(other if isinstance(other, dict) else {}, problems)
        body = line.removesuffix(",")
        if not body or reading.passes(body):
            continue
        try:
            reading.take(parse(body, finite=False))
        except Malformed:
            wrong.append(number)
    cut = bool(wrong) and wrong[-1] == number
    end = f"in the middle of line {number}" if cut else f"after line {number}"
    events = f"{reading.shown} event{'s' if reading.shown != 1 else ''}"
    problems = _wrong_lines(name, wrong[:-1] if cut else wrong)
    return reading.trace({}, [*problems, f"{name} ends {end}: what follows its first {events} is missing"])


def _wrong_lines(name: str, wrong: Sequence[int]) -> list[str]:
    if not wrong:
        return []
    more = f", nor {'are' if len(wrong) > 2 else 'is'} {len(wrong) - 1} after it" if len(wrong) > 1 else ""
    return [f"{name}: line {wrong[0]} is not an event{more}: left out"]
