"""What Plotly is told to draw: the traces and layout of each chart, without widths and the page's own colours."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fxpipe.inspection.report.formats import ms, number
from fxpipe.inspection.report.marks import MARKS, fill, stroke
from fxpipe.inspection.report.tables import PARTS

Json = dict[str, Any]

STEPS = 400
"""From this many steps on, a mean is drawn over the single values."""

SPENT = ("F", "B", "W", "predict", "update", "send", "receive", "wait", "data", "other")

_GREY, _BLUE = "#777777", "#4C6FE0"


def balance(partitions: Sequence[Json]) -> list[Json]:
    """A chart for each mode of cuts, all on one scale: a stacked bar for each worker, and a line at the ideal."""
    top = max((w["total_ms"] or 0 for p in partitions for w in p["workers"]), default=0) or 1
    return [_panel(p, top, first=i == 0) for i, p in enumerate(partitions)]


def _panel(partition: Json, top: float, first: bool) -> Json:
    loads, ideal = partition["workers"], partition["ideal_ms"]
    workers = range(len(loads))
    traces = [
        trace
        for kind, part in PARTS.items()
        if any(load[part] for load in loads)
        for trace in _bars(kind, workers, [load[part] for load in loads], ms)
    ]
    line = {"type": "line", "x0": -0.5, "x1": len(loads) - 0.5, "y0": ideal, "y1": ideal}
    layout = {
        "barmode": "stack",
        "bargap": 0.25,
        "dragmode": False,
        "margin": {"l": 48 if first else 32, "r": 8, "t": 8, "b": 44},
        "shapes": [] if ideal is None else [line | {"line": {"width": 1.5, "dash": "4px,3px"}}],
        "xaxis": _axis("worker", tickangle=0, showgrid=False, fixedrange=True) | _each(len(loads)),
        "yaxis": _axis("ms a microbatch" if first else "", range=[0, top * 1.08], fixedrange=True, nticks=6),
    }
    return {"data": traces, "layout": layout, "height": 280}


def memory(timeline: Json) -> Json:
    """The bytes that each worker holds over the simulated time."""
    rows, end = timeline["memory"], timeline["seconds"]
    power = min(4, max(0, int(math.log2(max(max(m["bytes"]) for m in rows) or 1) // 10)))
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": [1e3 * s for s in (*m["seconds"], end)],
            "y": [b / 1024**power for b in (*m["bytes"], m["bytes"][-1])],
            "line": {"shape": "hv", "width": 2, **stroke(m["worker"])},
            "hovertemplate": f"worker {m['worker']}: %{{y:.3~f}} {unit} at %{{x:.4~g}} ms<extra></extra>",
        }
        for m in rows
    ]
    axes = {"xaxis": _axis("milliseconds, simulated", range=[0, 1e3 * end]), "yaxis": _axis(unit, rangemode="tozero")}
    return {"data": traces, "layout": axes, "height": 300}


def curve(steps: Sequence[int], values: Sequence[float | None], from_zero: bool) -> Json:
    """A value over the steps: of many steps each in grey and a trailing mean in blue."""
    base: Json = {"type": "scatter", "mode": "lines" if len(values) - values.count(None) > 2 else "markers", "x": steps}
    hover = " %{x}: %{y:.4~g}<extra></extra>"
    blue: Json = {"line": {"color": _BLUE, "width": 2}, "marker": {"color": _BLUE, "size": 7}}
    traces = [base | blue | {"y": values, "hovertemplate": f"step{hover}"}]
    if is_long(values):
        traces = [
            traces[0] | {"opacity": 0.35, "line": {"color": _GREY, "width": 1}},
            base | blue | {"y": smooth(values), "hovertemplate": f"mean to step{hover}"},
        ]
    layout = {"xaxis": _axis("step"), "yaxis": _axis("", rangemode="tozero" if from_zero else "normal")}
    return {"data": traces, "layout": layout, "height": 260}


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


def spent(workers: Sequence[Json]) -> Json:
    """What each worker spent its seconds on, as horizontal bars."""
    places = [w["worker"] for w in workers]
    traces = [
        trace
        for kind in spent_kinds(workers)
        for trace in _bars(kind, places, [_of(w, kind) for w in workers], lambda s: f"{number(s)} s", lying=True)
    ]
    layout = {
        "barmode": "stack",
        "bargap": 0.3,
        "dragmode": False,
        "xaxis": _axis("seconds", fixedrange=True),
        "yaxis": _axis("worker", autorange="reversed", showgrid=False, fixedrange=True) | _each(len(places)),
    }
    return {"data": traces, "layout": layout, "height": max(120, 50 + len(places) * (16 if len(places) > 16 else 34))}


def spent_kinds(workers: Sequence[Json]) -> list[str]:
    """What any worker spent time on."""
    return [kind for kind in SPENT if any(_of(w, kind) for w in workers)]


def _of(worker: Json, kind: str) -> float:
    return (worker.get("spent") or {}).get(kind) or 0


def staleness(logs: Sequence[Json]) -> Json:
    """How far the weights of forwards were from those that their updates met.

    A log gives a line for each pair (updates behind, updates predicted ahead) of its forwards; lines of one colour
    differ in name and stroke.
    """
    groups = len({log["group"] for log in logs}) > 1
    drawn: Counter[int] = Counter()
    traces = []
    for log in logs:
        points: dict[tuple[int, int], list[tuple[int, float]]] = {}
        for step, stale, ahead, rmse in zip(log["step"], log["stale"], log["ahead"], log["rmse"], strict=True):
            points.setdefault((stale, ahead), []).append((step, rmse))
        for (stale, ahead), found in points.items():
            worker = log["worker"]
            group = f"group {log['group']} · " if groups else ""
            name = f"worker {worker} · {group}{stale:g} behind, predicted {ahead or 0:g}"
            line = stroke(worker, drawn[worker % 8])
            drawn[worker % 8] += 1
            traces.append({
                "type": "scatter", "mode": "lines" if len(found) > 60 else "lines+markers", "name": name,
                "x": [x for x, _ in found], "y": [y for _, y in found], "line": {"width": 1.8, **line},
                "marker": {"size": 4, "color": line["color"]},
                "hovertemplate": "%{fullData.name}<br>step %{x}: %{y:.3~g}<extra></extra>",
            })  # fmt: skip
    layout = {
        "xaxis": _axis("step"),
        "yaxis": _axis("root mean square of the difference (RMSE)", rangemode="tozero", exponentformat="e"),
        "margin": {"l": 68, "r": 12, "t": 16, "b": 40},
    }
    return {"data": traces, "layout": layout, "height": 340}


def _bars(
    kind: str, workers: Sequence[int], values: Sequence[float], form: Callable[[float], str], lying: bool = False
) -> Iterator[Json]:
    """The bars of one kind of time, a trace for each colour of workers."""
    for same in sorted({worker % 8 for worker in workers}):
        own = [(w, v) for w, v in zip(workers, values, strict=True) if w % 8 == same]
        ranks, sizes = [w for w, _ in own], [v for _, v in own]
        looks = fill(kind, same)
        yield {
            "type": "bar",
            "meta": kind,
            "orientation": "h" if lying else "v",
            "x": sizes if lying else ranks,
            "y": ranks if lying else sizes,
            "hovertext": [f"worker {w}: {MARKS[kind].name} {form(v)}" for w, v in own],
            "hoverinfo": "text",
            "textposition": "none",
            "marker": {
                "color": looks["color"],
                "pattern": {**looks["pattern"], "fillmode": "overlay"},
                "line": {"width": 0},
            },
        }


def _axis(title: str, **more: Any) -> Json:
    return {"title": {"text": title, "standoff": 8}, "zeroline": False, "automargin": False, **more}


def _each(workers: int) -> Json:
    """A tick for each worker, as far as there is room."""
    return {"tickmode": "auto" if workers > 16 else "linear", "dtick": 1}
