"""Measures where one worker's time goes: always in sums, and span by span for `fxpipe run --trace`.

Everything that a worker does for a run opens a span and closes it: an action, and within it waits, sends, receives,
predictions and updates. A span's own time excludes the spans inside it, so that own times never count twice.

On a CPU a span begins and ends when the code does. On CUDA the code only launches work; there a span is what the
device's stream does between two events, and the events are read once they have passed: nothing waits for the device.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableSequence
from contextlib import AbstractContextManager
from time import perf_counter_ns, thread_time_ns
from typing import NamedTuple

import torch

from fxpipe.observe.pulse import MOVES, STEP, Status, no_numbers
from fxpipe.observe.run_json import WaitJson
from fxpipe.observe.trace import KINDS, OF_TRAINING, Kind
from fxpipe.schedule.action import Action

_NUMBER = {kind: number for number, kind in enumerate(KINDS)}
_SIZE = len(KINDS)
_WAIT, _BACKWARD, _EVALUATE = _NUMBER["wait"], _NUMBER["B"], _NUMBER["evaluate"]
_IDLE: tuple[Kind, ...] = ("wait", "data", "save", "evaluate")
_WHOLES = ("F", "B", "W", "update", "data", "save", "evaluate")
"""Kinds that also count what is inside them; but an update is not part of the backward in which it is made, nor is
what a checkpoint copies in an update part of it."""

_REBASE = 10**9
"""Nanoseconds after which CUDA's clock is compared with a newer event: it measures distances in 32 bits."""


class Cause(NamedTuple):
    """What a span waits for, sends or receives: the kind (an edge's kind, 'weights', 'loss', 'sum', or
    'up' and 'down' for the notes of an update), its name, and the other worker."""

    what: str
    name: str
    worker: int


def span_name(kind: Kind, cause: Cause | None, minibatch: int, microbatch: int) -> str:
    """A span's name for people: `F3.1`, `send x to worker 1`, `update 3`."""
    if cause is not None and cause.what == "sum":
        return f"wait for the sum of {cause.name}"
    if cause is not None:
        joint = {"send": "send {} to worker {}", "receive": "receive {} from worker {}"}
        return joint.get(kind, "wait for {} from worker {}").format(cause.name, cause.worker)
    if kind == "F" or kind == "B" or kind == "W":
        return str(Action(kind, minibatch, microbatch))
    return f"update {minibatch}" if kind == "update" else kind


class _OpenSpan(NamedTuple):
    """The beginning of a span; None marks its end. Its own time counts in a `place` of its kind and its whole."""

    kind: int
    place: int
    cause: Cause | None
    minibatch: int
    microbatch: int


class Watch:
    """Measures one worker. It belongs to one thread, but any thread may ask for `status`.

    Evaluation is not part of training: `busy`, `spent` and `waits` leave it out, and `training` is the time without it.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._clock: _CudaClock | None = None
        self._minibatch = self._microbatch = 0
        self._open: list[_OpenSpan] = []  # as the code has it; `_sums` has what the device has reached
        # the numbers that others read (see `fxpipe.observe.pulse`): the step, and every span that ends
        self.pulse: MutableSequence[int] = no_numbers()
        # of a message that should have been received by now, what it is and its receiver; else None
        self.sends: Cause | None = None
        self.ranges: Ranges | None = None  # where a profiler shows the spans, if one does
        # an evaluation gets the workers out of step, because their pipeline does not empty before it. What a worker
        # then waits, until its first backward is over, counts as evaluation
        self.refills = False
        self._spans: Spans | None = None
        self.begin()

    def begin(self) -> None:
        """Training begins now: all sums are 0."""
        if self._device.type == "cuda":
            self._clock = _CudaClock()
        self._sums = _Sums()
        self.began = self.ended = perf_counter_ns()
        self._cpu_began = self._cpu_ended = thread_time_ns()
        if self._spans is not None:
            self._spans = Spans()

    def record(self) -> None:
        """Keep every span from now on, some 30 bytes each."""
        self._spans = Spans()

    def end(self) -> None:
        """Training is over on this worker."""
        if self._clock is not None:
            drift = self._clock.end()
            self._read()
            if self._spans is not None:
                self._spans.stretch(self.began, *drift)
        self.ended, self._cpu_ended = perf_counter_ns(), thread_time_ns()

    def at(self, action: Action) -> None:
        """Spans that are opened from now on belong to this action."""
        self._minibatch, self._microbatch = action.minibatch, action.microbatch
        self.pulse[STEP] = action.minibatch + 1

    def open(self, kind: Kind, cause: Cause | None = None) -> None:
        """Begin a span inside the one that is open."""
        number, opened = _NUMBER[kind], self._open
        whole = number if kind in _WHOLES or not opened else opened[-1].place // _SIZE
        mark = _OpenSpan(number, whole * _SIZE + number, cause, self._minibatch, self._microbatch)
        opened.append(mark)
        if self.ranges is not None:
            self.ranges.push(span_name(kind, cause, self._minibatch, self._microbatch))
        if self._clock is None:
            self._apply(perf_counter_ns(), mark)
        else:
            self._clock.record(mark)

    def close(self) -> None:
        """End the innermost open span."""
        self._open.pop()
        if self.ranges is not None:
            self.ranges.pop()
        self.pulse[MOVES] += 1
        if self._clock is None:
            self._apply(perf_counter_ns(), None)
            return
        self._clock.record(None)
        if not self._open:
            self._read()

    def seconds(self, *kinds: Kind, within: Kind | None = None) -> float:
        """Own time of all spans of these kinds: all, or what belongs to F, to B or W without its update, to updates."""
        if self._clock is not None and not self._open:
            self._read()
        wholes = range(_SIZE) if within is None else (_NUMBER[within],)
        return sum(self._sums.own[whole * _SIZE + _NUMBER[kind]] for whole in wholes for kind in kinds) / 1e9

    def count(self, kind: Kind) -> int:
        """How many spans of a kind are closed."""
        return self._sums.closed[_NUMBER[kind]]

    @property
    def elapsed(self) -> float:
        """Seconds from `begin` to `end`."""
        return (self.ended - self.began) / 1e9

    @property
    def cpu(self) -> float:
        """Seconds for which its thread ran on a core, from `begin` to `end`."""
        return (self._cpu_ended - self._cpu_began) / 1e9

    @property
    def training(self) -> float:
        """Seconds from `begin` to `end` without evaluations."""
        return max(self.elapsed - self.seconds("evaluate"), 0.0)

    @property
    def busy(self) -> float:
        """Seconds spent in spans, except waiting, feeding data, saving and evaluating."""
        return self.seconds(*(kind for kind in KINDS if kind not in _IDLE))

    @property
    def spent(self) -> dict[str, float]:
        """Seconds of training by kind, with the time between all spans as 'other': they add up to `training`."""
        found: dict[str, float] = {kind: self.seconds(kind) for kind in OF_TRAINING}
        return {**found, "other": max(self.training - sum(found.values()), 0.0)}

    @property
    def waits(self) -> list[WaitJson]:
        """Seconds of waiting, by the value and the worker that was waited for."""
        waits = sorted(self._sums.waits.items())
        return [{"what": what, "from": worker, "seconds": t / 1e9} for (what, worker), t in waits]

    @property
    def fill(self) -> float:
        """The seconds of waiting before its first backward without a flush could run: the pipeline fills."""
        return self._sums.fill / 1e9

    @property
    def doing(self) -> tuple[Kind, Cause | None] | None:
        """The innermost open span, or the send that has not been received; None between two. Any thread may ask."""
        if (late := self.sends) is not None:
            return "wait", late
        return next(((KINDS[mark.kind], mark.cause) for mark in self._open[-1:]), None)

    @property
    def status(self) -> Status:
        """The status now; open spans count up to now, or on CUDA up to what was read last."""
        sums = self._sums
        own = [sum(sums.own[kind::_SIZE]) for kind in range(_SIZE)]
        now = perf_counter_ns()
        if self._clock is None and (stack := sums.stack[-1:]):
            own[stack[0][0].kind] += max(now - sums.since, 0)
        waiting = own[_WAIT]
        busy = sum(own) - sum(own[_NUMBER[kind]] for kind in _IDLE)
        return Status(now - self.began, busy, waiting, self.count("F") - self.count("B"))

    @property
    def spans(self) -> Spans:
        """What was recorded, ordered by the ends of spans; empty unless `record` was called."""
        return Spans() if self._spans is None else self._spans

    def _read(self) -> None:
        assert self._clock is not None
        for now, mark in self._clock.passed():
            self._apply(now, mark)

    def _apply(self, now: int, mark: _OpenSpan | None) -> None:
        ended = self._sums.reach(now, mark, self.refills)
        if ended is not None and self._spans is not None:
            self._spans.add(*ended, now)


class _Sums:
    """What the device has reached, in nanoseconds."""

    def __init__(self) -> None:
        # the open spans, with their beginnings; what came before `since` is already counted
        self.stack: list[tuple[_OpenSpan, int]] = []
        self.since = 0
        self.fill = 0  # the waits before the first backward without a flush could run
        self.own = [0] * (_SIZE * _SIZE)  # own times by whole and kind
        self.closed = [0] * _SIZE  # how many spans of each kind are closed
        self.waits: dict[tuple[str, int], int] = {}  # by the value and the worker that was waited for
        self.refilling = False  # whether an evaluation got the workers out of step

    def reach(self, now: int, mark: _OpenSpan | None, refills: bool) -> tuple[_OpenSpan, int] | None:
        """Reach the beginning of a span, or the end of the innermost one; returns that one and its beginning."""
        stack = self.stack
        if stack:
            inner = stack[-1][0]
            evaluates = self.refilling and inner.kind == _WAIT
            self.own[_EVALUATE * (_SIZE + 1) if evaluates else inner.place] += now - self.since
        self.since = now
        if mark is not None:
            stack.append((mark, now))
            return None
        mark, begin = ended = stack.pop()
        kind = mark.kind
        if kind == _EVALUATE:
            self.refilling = refills
        elif kind == _BACKWARD:
            self.refilling = False
        elif kind == _WAIT and mark.cause is not None and not self.refilling:
            key = (mark.cause.what, mark.cause.worker)
            self.waits[key] = self.waits.get(key, 0) + now - begin
            if not self.closed[_BACKWARD]:
                self.fill += now - begin
        self.closed[kind] += 1
        return ended


class Spans:
    """Closed spans by column, because a long run has millions; times are nanoseconds of `perf_counter_ns`."""

    def __init__(self) -> None:
        self.table: dict[Cause | None, int] = {None: 0}
        self.kinds, self.causes = array("b"), array("i")  # places in `KINDS`, and in `table`
        self.minibatches, self.microbatches = array("i"), array("i")
        self.begins, self.ends = array("q"), array("q")

    def add(self, mark: _OpenSpan, begin: int, end: int) -> None:
        self.kinds.append(mark.kind)
        self.causes.append(self.table.setdefault(mark.cause, len(self.table)))
        self.minibatches.append(mark.minibatch)
        self.microbatches.append(mark.microbatch)
        self.begins.append(begin)
        self.ends.append(end)

    def stretch(self, begin: int, end: int, true_end: int) -> None:
        """Stretch times so that `begin` stays and `end` becomes `true_end`, for a clock that drifts steadily."""
        length, drift = max(end - begin, 1), true_end - end
        for times in (self.begins, self.ends):
            for i, time in enumerate(times):
                times[i] = time + drift * (time - begin) // length


class _CudaClock:
    """Marks in the device's stream, read in the time of `perf_counter_ns` once the device has passed them.

    The device's clock is set by `perf_counter_ns` once, at the beginning; `end` shows its drift.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[torch.cuda.Event, _OpenSpan | None]] = deque()
        self._free: list[torch.cuda.Event] = []
        self._base = self._event()
        self._base.record()
        # Not the device: over NCCL, what was sent before may wait for a receiver that waits for us.
        self._base.synchronize()
        self._base_ns = perf_counter_ns()

    def record(self, mark: _OpenSpan | None) -> None:
        event = self._event()
        event.record()
        self._pending.append((event, mark))

    def end(self) -> tuple[int, int]:
        """Wait for the device, so that all marks have passed; return one moment by its clock and by
        `perf_counter_ns`."""
        event = self._event()
        event.record()
        event.synchronize()
        now = perf_counter_ns()
        return self._time(event), now

    def passed(self) -> Iterator[tuple[int, _OpenSpan | None]]:
        while self._pending and self._pending[0][0].query():
            event, mark = self._pending.popleft()
            now = self._time(event)
            if now - self._base_ns > _REBASE:
                self._base, self._base_ns, event = event, now, self._base
            self._free.append(event)
            yield now, mark

    def _time(self, event: torch.cuda.Event) -> int:
        return self._base_ns + round(1e6 * self._base.elapsed_time(event))

    def _event(self) -> torch.cuda.Event:
        return self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)


class Ranges:
    """The open spans, outermost first. Each is a range of the profiler, which `make` makes, while the ranges are on.

    A profiler nests the ranges of a thread. So a worker that lets another one of its thread continue leaves its own
    (`leave`), and enters them again when it goes on (`enter`).
    """

    def __init__(self, make: Callable[[str], AbstractContextManager[object]], on: bool) -> None:
        self._make, self._on = make, on
        self._names: list[str] = []
        self._entered: list[AbstractContextManager[object]] = []

    def push(self, name: str) -> None:
        """A span begins."""
        self._names.append(name)
        if self._on:
            self._entered.append(self._make(name))
            self._entered[-1].__enter__()

    def pop(self) -> None:
        """The innermost span ends."""
        del self._names[-1:]  # there is none after an error
        if self._entered:
            self._entered.pop().__exit__(None, None, None)

    def switch(self, on: bool) -> None:
        """Open spans, and later ones, are ranges from now on, or no longer."""
        names, self._on = self.leave(), on
        self.enter(names)

    def leave(self) -> list[str]:
        """End all; return their names."""
        names = list(self._names)
        while self._names:
            self.pop()
        return names

    def enter(self, names: Iterable[str]) -> None:
        """Begin these again."""
        for name in names:
            self.push(name)
