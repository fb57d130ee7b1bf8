"""Shows a simulation on a terminal."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from fxpipe.simulator.result import Simulation, Span

_LETTERS = {"F": "0123456789", "B": "abcdefghij", "W": "ABCDEFGHIJ"}
_NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}
_UPDATE, _WAITS = "*", "."


def picture(simulation: Simulation, width: int = 100, begin: float = 0.0, end: float | None = None) -> str:
    """The seconds from `begin` to `end`, by default the whole run, as a row of `width` columns for each worker.

        worker 0: 01...aabb
        worker 1: .0aa1bb

    A column shows what the worker does in the middle of that time: a digit is a forward, a letter a backward, of the
    microbatch whose number ends in that digit (a: 0), a capital letter its weight gradients where they are apart; `*`
    is an update, `.` waits. The last line is a legend.
    """
    end = simulation.seconds if end is None else end
    column = (end - begin) / width
    times = [begin + (i + 0.5) * column for i in range(width)]
    number = len(str(simulation.workers - 1))
    lines = [
        f"worker {worker:>{number}}: {''.join(_row(simulation, worker, times))}".rstrip()
        for worker in range(simulation.workers)
    ]
    done = {span.kind for spans in simulation.spans for span in spans}
    key = ", ".join(f"{letters[0]}-{letters[-1]} {_NAMES[kind]}" for kind, letters in _LETTERS.items() if kind in done)
    return "\n".join([*lines, f"{key}, {_UPDATE} update, {_WAITS} waits; a column is {column:.3g} s"])


def _row(simulation: Simulation, worker: int, times: list[float]) -> Iterator[str]:
    spans = simulation.spans[worker]
    starts = [span.start for span in spans]
    for time in times:
        place = bisect_right(starts, time) - 1
        if place >= 0 and time < spans[place].end:
            yield _letter(simulation, spans[place])
        else:
            yield _WAITS if time < spans[-1].end else " "


def _letter(simulation: Simulation, span: Span) -> str:
    if span.kind == "update":
        return _UPDATE
    number = span.action.minibatch * simulation.microbatches + span.action.microbatch
    return _LETTERS[span.kind][number % 10]
