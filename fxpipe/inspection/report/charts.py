"""The charts: bars and lines on axes. Their places are in percent, so that they fill the width of the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from fxpipe.inspection.report.drawing import tag, ticks
from fxpipe.inspection.report.marks import MARKS, look, stroke
from fxpipe.inspection.table import Json, ms, number, share, within
from fxpipe.inspection.tables import PARTS
from fxpipe.observe.trace import OF_TRAINING

Points = Sequence[tuple[float, float | None]]

STEPS = 40
"""From this many steps on, a mean is drawn over the single values."""

POINTS = 1500
"""A line has at most about this many points."""

_GREY, _BLUE, _RED, _GREEN = "#777777", "#4C6FE0", "#C8502D", "#1E8A5F"
EVALUATED = {
    "metrics": ("held out", {"stroke": _RED}),
    "averaged": ("held out, averaged weights", {"stroke": _GREEN, "stroke_dasharray": "5 4"}),
}
"""How the evaluations of a run are drawn: as dots with a line between them."""


@dataclass(frozen=True)
class Line:
    """A line of a chart, with a gap where a point is missing; if `dots`, only its points."""

    points: Points
    looks: dict[str, Any]
    dots: bool = False


@dataclass(frozen=True)
class Plane:
    """Two axes: where each begins and ends."""

    x: tuple[float, float]
    y: tuple[float, float]

    def across(self, value: float) -> float:
        return 100 * (value - self.x[0]) / (self.x[1] - self.x[0])

    def up(self, value: float) -> float:
        return 100 * (value - self.y[0]) / (self.y[1] - self.y[0])

    def box(self, x: tuple[float, float], y: tuple[float, float], **looks: Any) -> Markup:
        """A box from one number to another, on both axes."""
        low, high = sorted(map(self.up, y))
        left, right = map(self.across, x)
        return tag(
            "i", style=f"left:{left:.3f}%;width:{right - left:.3f}%;bottom:{low:.3f}%;height:{high - low:.3f}%", **looks
        )

    def line(self, line: Line) -> Markup:
        d, pen = [], "M"
        for x, y in _thin(line.points):
            if y is not None:
                d.append(f"{pen}{10 * self.across(x):.1f} {1000 - 10 * self.up(y):.1f}")
            pen = "M" if y is None or line.dots else "L"
        # A stroke of no length with round ends is a dot, even where the picture is stretched.
        dots = {"stroke_width": 6, "stroke_linecap": "round"} if line.dots else {}
        return tag("path", d="h0".join([*d, ""]) if line.dots else "".join(d), **line.looks | dots)

    def chart(
        self, label: str, height: int, titles: tuple[str, str], inside: Sequence[Markup], rows: Sequence[float] = ()
    ) -> Markup:
        """The chart: a grid with titles of both axes, and what is `inside`. `rows` label `y` in place of round numbers,
        without grid lines."""
        kind = "bare across" if rows else "across"
        grid = [
            tag("s", tag("span", f"{v:,.6g}"), class_=kind, style=f"bottom:{self.up(v):.2f}%")
            for v in rows or ticks(*self.y)
        ]
        grid += [
            tag("s", tag("span", f"{v:,.6g}"), class_="up", style=f"left:{self.across(v):.2f}%")
            for v in ticks(*self.x, 7)
        ]
        names = [tag("span", title, class_=f"{axis}-title") for axis, title in zip("xy", titles, strict=True)]
        plane = tag("div", *grid, *inside, class_="plane")
        return tag("div", plane, *names, class_="chart", role="img", aria_label=label, style=f"height:{height}px")


def bars(
    label: str,
    unit: str,
    rows: Mapping[int, Mapping[str, float | None]],
    most: float,
    form: Any,
    ideal: float | None = None,
) -> Markup:
    """A bar for each worker, made of its kinds of time, up to `most`, and a line at the ideal."""
    plane = Plane((0, 1.03 * most or 1), (len(rows) - 0.5, -0.5))
    drawn = list[Markup]()
    for place, (worker, parts) in enumerate(rows.items()):
        total = 0.0
        for kind, part in parts.items():
            if part:
                title = f"worker {worker}: {MARKS[kind].name} {form(part)}"
                ends = total, total + part
                drawn.append(plane.box(ends, (place - 0.35, place + 0.35), **look(kind, worker), title=title))
                total += part
    if ideal is not None:
        drawn.append(plane.box((ideal, ideal), plane.y, class_="ideal"))
    height = max(120, 60 + len(rows) * (16 if len(rows) > 16 else 34))
    return plane.chart(label, height, (unit, "worker"), drawn, _each(len(rows)))


def lines(label: str, titles: tuple[str, str], drawn: Sequence[Line], least: float = 0.0, height: int = 300) -> Markup:
    """Lines on one pair of axes; `y` begins at `least`."""
    held = [(x, y) for line in drawn for x, y in line.points if y is not None]
    high = max((y for _, y in held), default=0.0)
    edge = 0.05 * (high - least) or abs(high) or 1.0
    across = [x for line in drawn for x, _ in line.points]
    plane = Plane((min(across, default=0.0), max(across, default=0.0)), (least, high + edge))
    if plane.x[0] == plane.x[1]:
        plane = Plane((plane.x[0] - 0.5, plane.x[1] + 0.5), plane.y)
    svg = tag("svg", *map(plane.line, drawn), viewBox="0 0 1000 1000", preserveAspectRatio="none", aria_hidden="true")
    return plane.chart(f"{label} The table below has the numbers.", height, titles, [svg])


def balance(partitions: Sequence[Json]) -> list[Markup]:
    """A chart for each mode of cuts, all on one scale, with a line at the ideal."""
    most = max((w["total_ms"] or 0 for p in partitions for w in p["workers"]), default=0)
    return [
        bars(
            f"Balance of {p['mode']}: {share(p['efficiency'])}", "ms a microbatch",
            {w: {kind: load[part] for kind, part in PARTS.items()} for w, load in enumerate(p["workers"])},
            most, ms, p["ideal_ms"],
        )
        for p in partitions
    ]  # fmt: skip


def spent(workers: Sequence[Json]) -> Markup:
    """How each worker spent its seconds."""
    rows = {w["worker"]: {kind: within("spent", kind, w) or 0 for kind in spent_kinds(workers)} for w in workers}
    longest = max((sum(parts.values()) for parts in rows.values()), default=0)
    label = "How each worker spent its seconds. The table below has the numbers."
    return bars(label, "seconds", rows, longest, lambda seconds: f"{number(seconds)} s")


def spent_kinds(workers: Sequence[Json]) -> list[str]:
    """What any worker spent time on."""
    return [kind for kind in (*OF_TRAINING, "other") if any(within("spent", kind, w) for w in workers)]


def memory(timeline: Json) -> Markup:
    """The bytes that each worker holds over the simulated time."""
    most = max(max(m["bytes"]) for m in timeline["memory"])
    power = min(4, max(0, int(math.log2(most or 1) // 10)))
    drawn = []
    for m in timeline["memory"]:
        times = [1e3 * s for s in (*m["seconds"], timeline["seconds"])]
        held = [(t, size / 1024**power) for i, size in enumerate(m["bytes"]) for t in times[i : i + 2]]
        drawn.append(Line(held, stroke(m["worker"])))
    titles = "milliseconds, simulated", ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return lines("Memory over the simulated time, a line for each worker.", titles, drawn)


def curves(run: Json) -> dict[str, tuple[Markup, list[tuple[str, dict[str, Any]]]]]:
    """For each metric of training or evaluations, the loss first: its chart, and the key of its lines."""
    steps, trained = run["metrics"]["step"], {"loss": run["metrics"]["loss"], **(run.get("step_metrics") or {})}
    rows = run.get("evaluations") or []
    held = {name: None for row in rows for name in row["metrics"]}
    charts = {}
    for name in {**trained, **held}:
        drawn, key = _of_steps(steps, trained.get(name) or [], "training")
        for kind, (noun, looks) in EVALUATED.items():
            pairs = [(row["step"], value) for row in rows for value in _finite([(row.get(kind) or {}).get(name)])]
            points = [(step, value) for step, value in pairs if value is not None]
            if points:
                drawn += [Line(points, looks), Line(points, {"stroke": looks["stroke"]}, dots=True)]
                key.append((noun, looks))
        if drawn:
            charts[name] = _chart(name.capitalize() if name == "loss" else name, drawn), key
    return charts


def speed(run: Json) -> Markup:
    """Samples a second of every step; empty if none is known."""
    drawn, _ = _of_steps(run["metrics"]["step"], run["metrics"]["samples_per_second"] or [], "")
    return _chart("Samples a second", drawn, 0.0) if drawn else Markup()


def _of_steps(
    steps: Sequence[int], values: Sequence[float | None], noun: str
) -> tuple[list[Line], list[tuple[str, dict[str, Any]]]]:
    """Lines through a value of each step, and their key; if steps are many, values in grey and their mean in blue."""
    values = _finite(values)
    if all(value is None for value in values):
        return [], []
    grey, blue = {"stroke": _GREY, "stroke_opacity": 0.35}, {"stroke": _BLUE}
    named: list[tuple[str, Sequence[float | None], dict[str, Any]]] = [(noun, values, blue)]
    if len(values) - values.count(None) >= STEPS:
        named = [(noun, values, grey), (f"{noun}, mean of {width(values)} steps", smooth(values), blue)]
    drawn = [Line(list(zip(steps, shown, strict=True)), looks) for _, shown, looks in named]
    return drawn, [(name, looks) for name, _, looks in named]


def _chart(title: str, drawn: Sequence[Line], least: float | None = None) -> Markup:
    """Lines over steps; `y` begins at `least`, by default just below the lowest point."""
    held = [y for line in drawn for _, y in line.points if y is not None]
    low = min(held)
    least = low - 0.06 * (max(held) - low or abs(low) or 1) if least is None else min(least, low)
    points = [point for point in drawn[-1].points if point[1] is not None]
    sentence = f"{title} over steps {points[0][0]} to {points[-1][0]}: first {number(points[0][1])}, "
    return lines(f"{sentence}last {number(points[-1][1])}.", ("step", ""), drawn, least, 260)


def _finite(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None or not math.isfinite(value) else value for value in values]


def width(values: Sequence[float | None]) -> int:
    """How many steps a mean covers: a fiftieth of all, but at least 10."""
    return max(10, round(len(values) / 50))


def smooth(values: Sequence[float | None]) -> list[float | None]:
    """A trailing mean over `width` values."""
    most = width(values)
    held: list[float] = []
    total, means = 0.0, list[float | None]()
    for value in values:
        if value is not None:
            held.append(value)
            total += value - (held[-1 - most] if len(held) > most else 0)
        means.append(total / min(most, len(held)) if held else None)
    return means


def _each(workers: int) -> list[float]:
    """A tick for each worker; for some of them if they are many."""
    return [t for t in ticks(0, workers - 1, 16) if t == int(t)] if workers > 16 else list(range(workers))


def _thin(points: Points, most: int = POINTS) -> Points:
    """The points; if they are many, the lowest and the highest of each stretch."""
    stride = math.ceil(2 * len(points) / most)
    if stride < 3:
        return points
    shown: list[tuple[float, float | None]] = []
    for start in range(0, len(points), stride):
        stretch = [p for p in points[start : start + stride] if p[1] is not None] or [points[start]]
        shown += sorted({end(stretch, key=_height) for end in (min, max)})
    return shown


def _height(point: tuple[float, float | None]) -> float:
    return point[1] or 0.0
