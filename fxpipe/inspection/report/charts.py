"""The charts: bars and lines on axes, placed in percent, so that they are as wide as there is room."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from fxpipe.inspection.report.drawing import tag, ticks
from fxpipe.inspection.report.formats import ms, number, share
from fxpipe.inspection.report.marks import MARKS, look, stroke
from fxpipe.inspection.report.tables import PARTS

Json = dict[str, Any]

STEPS = 400
"""From this many steps on, a mean is drawn over the single values."""

POINTS = 1500
"""That a line is drawn with, about."""

SPENT = ("F", "B", "W", "predict", "update", "send", "receive", "wait", "data", "other")

_GREY, _BLUE = "#777777", "#4C6FE0"


@dataclass(frozen=True)
class Plane:
    """Axes: from where to where each goes, and what it shows."""

    x: tuple[float, float]
    y: tuple[float, float]
    x_title: str = ""
    y_title: str = ""

    def across(self, value: float) -> float:
        return 100 * (value - self.x[0]) / (self.x[1] - self.x[0])

    def up(self, value: float) -> float:
        return 100 * (value - self.y[0]) / (self.y[1] - self.y[0])

    def box(self, x: tuple[float, float], y: tuple[float, float], **looks: Any) -> Markup:
        """A box from one number to another, on both axes."""
        left, right = sorted(map(self.across, x))
        low, high = sorted(map(self.up, y))
        return tag(
            "i", style=f"left:{left:.3f}%;width:{right - left:.3f}%;bottom:{low:.3f}%;height:{high - low:.3f}%", **looks
        )

    def dot(self, x: float, y: float, tip: str, colour: str) -> Markup:
        style = f"left:{self.across(x):.2f}%;bottom:{self.up(y):.2f}%;--c:{colour}"
        return tag("i", class_="dot", style=style, data_tip=tip)

    def line(self, points: Sequence[tuple[float, float | None]], **looks: Any) -> Markup:
        """A line through points; where one is missing, it ends and begins again."""
        d, pen = [], "M"
        for x, y in _thin(points):
            if y is not None:
                d.append(f"{pen}{10 * self.across(x):.1f} {1000 - 10 * self.up(y):.1f}")
            pen = "M" if y is None else "L"
        return tag("path", d="".join(d), **looks)

    def drawn(
        self, label: str, height: int, boxes: Sequence[Markup], lines: Sequence[Markup] = (), **at: Any
    ) -> Markup:
        """The chart.

        Args:
            at: the numbers that are written on `x` and `y`; by default round ones.
        """
        x, y = at.get("x") or ticks(*self.x, 7), at.get("y") or ticks(*self.y)
        grid = [
            *(
                tag(
                    "s",
                    tag("span", digits_of(v)),
                    class_="bare across" if "y" in at else "across",
                    style=f"bottom:{self.up(v):.2f}%",
                )
                for v in y
            ),
            *(tag("s", tag("span", digits_of(v)), class_="up", style=f"left:{self.across(v):.2f}%") for v in x),
        ]
        svg = tag("svg", *lines, viewBox="0 0 1000 1000", preserveAspectRatio="none", aria_hidden="true")
        titles = [tag("span", self.x_title, class_="x-title"), tag("span", self.y_title, class_="y-title")]
        plane = tag("div", *grid, *boxes, *([svg] if lines else []), class_="plane")
        return tag("div", plane, *titles, class_="chart", role="img", aria_label=label, style=f"height:{height}px")


def digits_of(value: float) -> str:
    """A number on an axis."""
    return f"{value:,.6g}"


def balance(partitions: Sequence[Json]) -> list[Markup]:
    """A chart for each mode of cuts, all on one scale: a stacked bar for each worker, and a line at the ideal."""
    top = 1.08 * (max((w["total_ms"] or 0 for p in partitions for w in p["workers"]), default=0) or 1)
    return [_panel(p, top, "" if i else "ms a microbatch") for i, p in enumerate(partitions)]


def _panel(partition: Json, top: float, title: str) -> Markup:
    loads, ideal = partition["workers"], partition["ideal_ms"]
    plane = Plane((-0.5, len(loads) - 0.5), (0, top), "worker", title)
    bars = [
        plane.box((worker - 0.38, worker + 0.38), ends, **look(kind, worker), data_tip=f"worker {worker}: {said}")
        for worker, load in enumerate(loads)
        for kind, ends, said in _stacked({kind: load[part] for kind, part in PARTS.items()}, ms)
    ]
    if ideal is not None:
        bars.append(plane.box(plane.x, (ideal, ideal), class_="ideal"))
    label = f"Balance of {partition['mode']}: {share(partition['efficiency'])}"
    return plane.drawn(label, 280, bars, x=_each(len(loads)))


def _stacked(parts: dict[str, float | None], form: Any) -> Iterator[tuple[str, tuple[float, float], str]]:
    """Parts that are there, each from where the one before ends, with what is said of it."""
    total = 0.0
    for kind, part in parts.items():
        if part:
            yield kind, (total, total + part), f"{MARKS[kind].name} {form(part)}"
            total += part


def memory(timeline: Json) -> Markup:
    """The bytes that each worker holds over the simulated time."""
    rows, end = timeline["memory"], timeline["seconds"]
    most = max(max(m["bytes"]) for m in rows)
    power = min(4, max(0, int(math.log2(most or 1) // 10)))
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    plane = Plane((0, 1e3 * end or 1), (0, 1.05 * most / 1024**power or 1), "milliseconds, simulated", unit)
    lines = []
    for m in rows:
        sizes = [size / 1024**power for size in m["bytes"]]
        times = [1e3 * s for s in (*m["seconds"], end)]
        held = [(t, size) for i, size in enumerate(sizes) for t in times[i : i + 2]]
        lines.append(plane.line(held, stroke_width=2, **stroke(m["worker"])))
    label = "Memory over the simulated time, a line for each worker. The table below has the peak of each."
    return plane.drawn(label, 300, [], lines)


def curve(steps: Sequence[int], values: Sequence[float | None], title: str, from_zero: bool) -> Markup:
    """A value over the steps: of many, each in grey and a trailing mean in blue. Empty where none is a number."""
    values = [None if value is None or not math.isfinite(value) else value for value in values]
    if not (held := [value for value in values if value is not None]):
        return Markup()
    low, high = min(held), max(held)
    edge = 0.06 * ((high - min(low, 0 if from_zero else low)) or abs(high) or 1)
    least = min(0.0, low) if from_zero else low - edge
    plane = Plane((steps[0] - 0.5, steps[-1] + 0.5), (least, high + edge), "step")
    told, said, lines = values, "step", []
    if is_long(values):
        lines.append(plane.line(list(zip(steps, values, strict=True)), stroke=_GREY, stroke_opacity=0.35))
        told, said = smooth(values), "mean to step"
    points = list(zip(steps, told, strict=True))
    lines.append(plane.line(points, stroke=_BLUE, stroke_width=2))
    few = _thin(points, 200)
    colour = _BLUE if len(held) < 3 else "transparent"
    dots = [plane.dot(x, y, f"{said} {x:g}: {y:.4g}", colour) for x, y in few if y is not None]
    label = f"{title} over steps {steps[0]} to {steps[-1]}: first {number(held[0])}, last {number(held[-1])}. "
    return plane.drawn(f"{label}The table below has the numbers.", 260, dots, lines)


def is_long(values: Sequence[float | None]) -> bool:
    """Whether a mean is drawn over the single values."""
    return len(values) - values.count(None) >= STEPS


def smooth(values: Sequence[float | None]) -> list[float | None]:
    """A trailing mean over a fiftieth of the steps."""
    width = max(2, round(len(values) / 50))
    held: list[float] = []
    total, means = 0.0, list[float | None]()
    for value in values:
        if value is not None:
            held.append(value)
            total += value - (held[-1 - width] if len(held) > width else 0)
        means.append(total / min(width, len(held)) if held else None)
    return means


def spent(workers: Sequence[Json]) -> Markup:
    """What each worker spent its seconds on, as horizontal bars."""
    count, kinds = len(workers), spent_kinds(workers)
    longest = max((sum(_of(w, kind) for kind in kinds) for w in workers), default=0)
    plane = Plane((0, 1.03 * longest or 1), (count - 0.5, -0.5), "seconds", "worker")
    bars = [
        plane.box(ends, (row - 0.35, row + 0.35), **look(kind, w["worker"]), data_tip=f"worker {w['worker']}: {said} s")
        for row, w in enumerate(workers)
        for kind, ends, said in _stacked({kind: _of(w, kind) for kind in kinds}, number)
    ]
    height = max(120, 60 + count * (16 if count > 16 else 34))
    label = "Seconds that each worker spent on what. The table below has the numbers."
    return plane.drawn(label, height, bars, y=_each(count))


def spent_kinds(workers: Sequence[Json]) -> list[str]:
    """What any worker spent time on."""
    return [kind for kind in SPENT if any(_of(w, kind) for w in workers)]


def _of(worker: Json, kind: str) -> float:
    return (worker.get("spent") or {}).get(kind) or 0


def _each(workers: int) -> list[float]:
    """A tick for each worker, as far as there is room."""
    return [t for t in ticks(0, workers - 1, 16) if t == int(t)] if workers > 16 else list(range(workers))


def _thin(points: Sequence[tuple[float, float | None]], most: int = POINTS) -> Sequence[tuple[float, float | None]]:
    """The points, or of each stretch of them the least and the greatest where they are many."""
    stride = math.ceil(2 * len(points) / most)
    if stride < 3:
        return points
    kept: list[tuple[float, float | None]] = []
    for start in range(0, len(points), stride):
        known = [p for p in points[start : start + stride] if p[1] is not None]
        kept += sorted({min(known, key=_height), max(known, key=_height)}) if known else [(points[start][0], None)]
    return kept


def _height(point: tuple[float, float | None]) -> float:
    return point[1] or 0.0
