"""The model map: the units from the input to the loss, once as forward and once as backward, coloured by worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

from markupsafe import Markup

from fxpipe.inspection.modules import LOSS
from fxpipe.inspection.report.drawing import runs, stretch, tag
from fxpipe.inspection.table import Json, ms, plural

NAMED = 24
"""At most this many modules are named; they are as deep as that allows."""


def model_map(facts: Json) -> Markup:
    """A lane for forward and one for backward, between them the units whose workers differ, and below the modules.

    Weight gradients with their own cuts have their own lane. A unit is as wide as its time.
    """
    units: list[Json] = facts["units"]
    spent = [sum(unit[f"{part}_ms"] for part in ("forward", "backward", "weight")) for unit in units]
    floor = 0.02 * (sum(spent) / len(spent) or 1.0)  # units without time stay visible
    ends = [0.0, *accumulate(time + floor for time in spent)]
    named = [i for i, unit in enumerate(units) if unit["module"]]
    loss = named[-1] + 1 if named else len(units)  # units after the last module belong to the loss
    paths = [unit["module"] or (LOSS if i >= loss else "(no module)") for i, unit in enumerate(units)]

    def box(first: int, end: int, *inside: Any, **looks: Any) -> Markup:
        return stretch(ends[first], ends[end], ends[-1], *inside, **looks)

    def parts(lane: str, cut: str, times: Sequence[str]) -> Iterator[Markup]:
        """A part for each run of units of one worker."""
        for first, end, worker in runs(unit[lane] for unit in units):
            time = ms(sum(unit[name] for unit in units[first:end] for name in times))
            title = f"worker {worker}, {lane}: {time}\nunits {first} to {end - 1} of {len(units)}"
            begins = tag("span", f"{cut} {paths[first]}") if first else None
            yield box(
                first, end, tag("b", f"worker {worker} · {time}"), begins, class_=f"part w{worker % 8}",
                title=f"{title}\n{paths[first]} … {paths[end - 1]}",
            )  # fmt: skip

    def between(before: str, after: str) -> Iterator[Markup]:
        """Hatched boxes between two lanes: runs of units that are on different workers in them."""
        pairs = ((u[before], u[after]) if u["apart"] and u[before] != u[after] else None for u in units)
        for first, end, pair in runs(pairs):
            if pair is not None:
                title = f"{plural(end - first, 'unit')}: {before} on {pair[0]}, {after} on {pair[1]}"
                yield box(first, end, tag("span", f"{pair[0]} ≠ {pair[1]}"), class_="apart", title=title)

    def modules() -> Iterator[Markup]:
        """The modules, as deep as `NAMED` allows."""
        deep = max(path.count(".") for path in paths)
        cut = [[".".join(path.split(".")[: depth + 1]) for path in paths] for depth in range(deep, -1, -1)]
        shown = next((names for names in cut if len(list(runs(names))) <= NAMED), cut[-1])
        for first, end, path in runs(shown):
            yield box(first, end, tag("span", ".".join(path.split(".")[-2:])), class_="cell", title=path)

    three = any(unit["weights"] != unit["backward"] for unit in units)
    backward = ("backward_ms",) if three else ("backward_ms", "weight_ms")
    lanes = [("forward", "FP cut", ("forward_ms",)), ("backward", "BP cut", backward)]
    lanes += [("weights", "W cut", ("weight_ms",))] if three else []
    rows = [("forward →", "lane", parts(*lanes[0]))]
    for (before, *_), lane in pairwise(lanes):
        rows += [("", "gap", between(before, lane[0])), (f"← {lane[0]}", "lane", parts(*lane))]
    rows.append(("", "strip", modules()))
    drawn = (tag("div", tag("b", name), tag("div", *row), class_=kind) for name, kind, row in rows)
    return tag("div", *drawn, class_="map")
