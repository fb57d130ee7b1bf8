"""What every worker does when: the simulated run, and below it the measured one, on one axis of time.

Places are in percent of the time: to zoom, the page makes the whole wider.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from markupsafe import Markup

from fxpipe.inspection.report.drawing import stretch, tag, ticks
from fxpipe.inspection.report.marks import look
from fxpipe.inspection.table import Json, ms

ACTIONS = ("F", "B", "W")
HEAD, FOOT = 34, 26
"""The heights of a panel's name and of the axis, in pixels."""


def timeline(panels: Sequence[Json], build: Json) -> Markup:
    """The panels, one below the other, with a row for each worker; at first the first minibatches are visible."""
    workers = build["workers"]
    row = 13 if workers > 24 else 18 if workers > 8 else 28
    end = max(span[5] for panel in panels for span in panel["spans"]) * 1.005
    zoom = max(1.0, end / (1.02 * _opening(panels, build)))
    names, lanes = [], []
    for panel in panels:
        names += [tag("b", style=f"height:{HEAD}px"), *(tag("b", w, style=f"height:{row}px") for w in range(workers))]
        lanes.append(tag("p", tag("b", panel["name"]), ", by worker", style=f"height:{HEAD}px"))
        lanes += [
            tag("div", *_row(panel, worker, end, row >= 18), class_="row", style=f"height:{row}px")
            for worker in range(workers)
        ]
    axis = tag("div", *_axis(1e3 * end, zoom), class_="axis", style=f"height:{FOOT}px", aria_hidden="true")
    return Markup("").join([
        tag("div", *names, class_="names", aria_hidden="true"),
        tag("div", tag("div", *lanes, axis, class_="time"), class_="view", style=f"--zoom:{zoom:.3f}", data_first=zoom),
    ])  # fmt: skip


def _opening(panels: Sequence[Json], build: Json) -> float:
    """The seconds that are visible at first: those of the first minibatches."""
    last = [max(span[5] for span in panel["spans"]) for panel in panels]
    minibatch = max(6, min(12, 2 * build["workers"])) - 1
    ends = [
        max((span[5] for span in panel["spans"] if span[2] == minibatch), default=0) or end
        for panel, end in zip(panels, last, strict=True)
    ]
    return max(*ends, min(*last, max(last) / 4))


def _row(panel: Json, worker: int, end: float, named: bool) -> Iterator[Markup]:
    """The spans of a worker by their start."""
    for _, kind, minibatch, microbatch, start, stop in sorted(
        (span for span in panel["spans"] if span[0] == worker), key=lambda span: span[4]
    ):
        part = f".{microbatch}" if microbatch else ""
        name = f"{kind}{'' if minibatch is None else minibatch}{part}" if kind in ACTIONS else kind
        of = "" if minibatch is None or minibatch < 0 else f"\nminibatch {minibatch}"
        of += f", microbatch {microbatch}" if of and microbatch else ""
        yield stretch(
            start, stop, end, tag("span", name) if named and kind in ACTIONS else None, **look(kind, worker),
            title=f"{name} on worker {worker}, {panel['name']}{of}\n{_stretch(start, stop)}",
        )  # fmt: skip


def _stretch(start: float, stop: float) -> str:
    """`12.3 ms, from 68.0 to 80.3`, from seconds; times have as many decimals as their difference needs."""
    long = 1e3 * (stop - start)
    places = min(6, max(0, 2 - math.floor(math.log10(long)))) if long > 0 else 3
    return f"{ms(long)}, from {1e3 * start:,.{places}f} to {1e3 * stop:,.{places}f}"


def _axis(end: float, zoom: float) -> Iterator[Markup]:
    """Round numbers of milliseconds; those of finer steps are visible where the zoom gives them room."""
    _, step, *_ = ticks(0, end)
    seen: set[str] = set()
    while end / step < 60 * zoom:
        for k in range(int(end / step) + 1):
            label = f"{k * step:,.6g}"
            if label not in seen:
                seen.add(label)
                yield stretch(k * step, (k + 1) * step, end, tag("span", label))
        step /= 5 if f"{step:e}"[0] == "5" else 2  # each divides the one before: 5, 1, 0.5
