"""Tries on fake tensors whether Python state that a step changes decides what its later calls compute.

A graph holds a step as it was at its first call. So the step runs again and again, forward and backward, as in eager
training: its Python state is kept; and then with counters far ahead and lists grown long. If what decides its results
stays the same, the state does not matter: it may be a log. If not, the graph would compute something else than eager
does, and capture is refused.
"""

from __future__ import annotations

import contextlib
import numbers
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import BuiltinFunctionType
from typing import Any

import torch

from fxpipe.errors import CaptureError, listed
from fxpipe.tracing.holders import Advancing, Bytes, Generator, Globals
from fxpipe.tracing.model_state import WHOLE, Change, PythonState, Snapshot
from fxpipe.tracing.origin import TracedStep
from fxpipe.tracing.step_calls import Departure

RUNS = 4
"""Calls of the step that keep its state: the first fills caches, the others must be equal."""

AHEAD = (10, 100, 1_000, 10_000, 1_000_000)
"""What counters are set to, and how many members lists are grown by: where branches of later steps begin."""

MORE = 12
"""Further calls where state cannot be set: draws of random numbers, iterators, sets, texts."""

NODES = 2_500
"""Most nodes of the first `RUNS` calls together, where the step changes nothing visible: calls take time."""

LATER = 86_400.0
"""Seconds that clocks are set ahead by, in the last call."""


class Unknown(Exception):
    """The step cannot be called repeatedly on fake tensors."""


def still_changing(run: Callable[[], None], watch: TracedStep, python: PythonState, nodes: int) -> list[Change]:
    """The changes that the step still makes, without an effect on its results.

    `run` calls the step; `watch.calls` compares the torch calls that its results depend on. The number of `nodes`
    measures what a call costs; it is 0 for a step that is known to change something.

    Raises:
        CaptureError: they have an effect.
        Unknown: it cannot be found out.
    """
    first, last = python.snapshot(), list[Change]()
    runs = min(RUNS, NODES // nodes) if nodes else RUNS
    if runs < 2:
        return last
    for _ in range(runs):
        last = _run(run, watch, python, first)
        first += python.look_again()  # what this call has made
    ahead = last
    with contextlib.suppress(Unknown):  # a counter out of its range
        for target in AHEAD if any(_is_count(change) or _grown(change) for change in last) else ():
            for change in ahead:
                _put_ahead(change, target)
            for _ in range(2):
                ahead = _run(run, watch, python, first)
        for _ in range(MORE if any(map(_is_restless, last)) else 0):
            _run(run, watch, python, first)
        with _clocks_ahead(python):
            _run(run, watch, python, None)
    return last


@contextlib.contextmanager
def _clocks_ahead(python: PythonState) -> Iterator[None]:
    """Inside, the clocks of the module `time` are ahead, also where code has one under a name of its own.

    Only for this thread: in a run, others look meanwhile whether the processes still move.
    """
    changed = {}
    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time"):
        for called, seconds in ((name, LATER), (f"{name}_ns", int(LATER * 1e9))):
            clock = getattr(time, called)
            changed[clock] = _ahead(clock, seconds)
    spaces = [vars(time), *(h.thing for h in python.holders if isinstance(h, Globals) and h.of_user)]
    named = ((space, name, value) for space in spaces for name, value in space.items())
    put = [row for row in named if isinstance(row[2], BuiltinFunctionType) and row[2] in changed]
    try:
        for space, name, clock in put:
            space[name] = changed[clock]
        yield
    finally:
        for space, name, clock in put:
            space[name] = clock


def _ahead(clock: Callable[[], float], seconds: float) -> Callable[[], float]:
    thread = threading.get_ident()
    return lambda: clock() + seconds if threading.get_ident() == thread else clock()


def noteworthy(changes: Sequence[Change]) -> list[Change]:
    """The changes that a user should know of though no result depends on them: not an object's own, and not the
    process's random generators, which `fxpipe.tracing.capture` reports."""
    return [c for c in changes if c.kind != "object" and not getattr(c.holder, "shared", False)]


def _run(run: Callable[[], None], watch: TracedStep, python: PythonState, first: Snapshot | None) -> list[Change]:
    """Call the step once more, and say what this call has changed.

    `first` is the state before the first call; None if what has changed since is not the cause of a difference.

    Raises:
        CaptureError: its results depend on what it has changed since the `first` call.
        Unknown: it cannot be called again.
    """
    before = python.snapshot()
    try:
        run()
    except Exception as error:
        raise Unknown from error
    if watch.calls.departs is not None:
        changes = [] if first is None else python.changes(first) or python.changes(before)
        raise _refusal(watch.calls.departs, watch, changes)
    return python.changes(before)


def _refusal(departure: Departure, watch: TracedStep, changes: Sequence[Change]) -> CaptureError:
    if not changes:
        return CaptureError(
            "the step's later calls compute something else, and fxpipe does not see why: a clock, a file, state of a "
            "C library or an installed package. A graph would repeat the first call",
            where=watch.where(departure.place),
            hint="read it in train_data() and put it into the batch as a tensor; or keep it in a buffer of the "
            "model that the step changes by torch calls",
            page="python-state",
        )
    if all(isinstance(change.holder, Generator) for change in changes):
        return CaptureError(
            f"the step draws random numbers from {listed([c.place for c in changes], 4)}, so its later calls compute "
            "something else: a graph would repeat the first call",
            where=watch.where(departure.place),
            hint="draw with torch (torch.rand, F.dropout, torch.where over a drawn mask), or draw in train_data() and "
            "pass it in the batch",
            page="randomness",
        )
    stale = {id(tensor) for tensor in departure.stale}
    holding = [c for c in changes if _holds(c, stale)] if stale else []
    values = noteworthy(changes)
    names = list(dict.fromkeys(str(change) for change in holding or values or changes))
    if stale:
        cure = (
            "keep it in a buffer of the model, made in __init__ and changed in place (a queue is a buffer of a fixed "
            "number of rows: torch.cat([self.queue[len(x):], x]))"
        )
    else:
        cure = (
            "what counts steps belongs in train_data() (put it into the batch), in lr_scheduler, or in a buffer that "
            "is counted with add_ and read with torch.where; what only the first call does, let model() do by calling "
            "the model once"
        )
    return CaptureError(
        f"the step changes {listed(names, 4)}, so its later calls compute something else: a graph would repeat "
        "the first call",
        where=watch.where(departure.place),
        hint=cure,
        page="python-state",
    )


def _holds(change: Change, tensors: set[int]) -> bool:
    content = change.holder.read()
    values: list[Any] = list(content.values()) if change.key is WHOLE else [content.get(change.key)]
    return any(id(part) in tensors for value in values for part in (value if _is_list(value) else [value]))


def _is_list(value: Any) -> bool:
    return isinstance(value, (tuple, list, deque))


def _is_restless(change: Change) -> bool:
    """Whether it may still become what no call so far has seen."""
    if isinstance(change.holder, (Advancing, Bytes, Generator)):
        return True
    return change.kind != "object" and not (_is_count(change) or _grown(change))


def _is_count(change: Change) -> bool:
    values = (change.old, change.new)
    return change.kind == "value" and all(isinstance(v, numbers.Real) and not isinstance(v, bool) for v in values)


def _grown(change: Change) -> Any:
    """The list or deque that has changed its size; None if none has."""
    if change.kind != "size":
        return None
    container = change.holder.thing if change.key is WHOLE else change.holder.read().get(change.key)
    return container if isinstance(container, (list, deque)) else None


def _put_ahead(change: Change, target: int) -> None:
    """Set a counter so that this run and the next pass the target; repeat a list's last member."""
    if _is_count(change):
        step = change.new - change.old
        value = type(change.new)((target if step > 0 else -target) - step)
        change.holder.write({**change.holder.read(), change.key: value})
    elif (grown := _grown(change)) and isinstance(grown[-1], (torch.Tensor, numbers.Number, tuple, str)):
        grown.extend([grown[-1]] * min(target, 1_000))
