"""The model map: the units from the input to the loss, once as forward and once as backward, coloured by worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from markupsafe import Markup

from fxpipe.inspection.report.drawing import WIDTH, fitting, room, runs, tag, told
from fxpipe.inspection.report.formats import ms
from fxpipe.inspection.report.marks import colour, text_on

Json = dict[str, Any]

LEFT = 76
LANE, GAP = 40, 34
"""The height of a lane, and the room between two, where units are marked that are cut apart."""

NAMED = 40
"""The room that a part of the model needs, in the mean, for names to stand in most."""

OWN = 0.25
"""So much of a module's width may be outside of the modules in it, if those are to stand for it."""

SINGLE = 2000
"""Of more units than this, none is told of by itself."""


@dataclass(frozen=True)
class Lane:
    """A row of the map: where one of the passes runs."""

    key: str
    name: str
    letter: str
    cut: str
    times: tuple[str, ...]
    way: str = "← to input"


@dataclass(frozen=True)
class CutMark:
    """Where a lane is cut, and its label: its level, from the lane, −1 where there is no room for it; its middle."""

    x: float
    label: str
    level: int
    middle: float


class ModelMap:
    """Where everything is on the map.

    Attributes:
        x: where each unit begins, and where the last one ends.
    """

    def __init__(self, facts: Json) -> None:
        self.units: list[Json] = facts["units"]
        self.modules: list[Json] = facts["modules"]
        timed = any(u["forward_ms"] is not None for u in self.units)
        three = any(u["weights"] != u["backward"] for u in self.units)
        spent = [sum(u[f"{part}_ms"] or 0 for part in ("forward", "backward", "weight")) for u in self.units]
        weights = spent if timed else [1.0] * len(spent)
        floor = (sum(weights) or 1) * 0.02 / len(weights)  # what takes no time is still there
        ends = [0.0, *accumulate(w + floor for w in weights)]
        self.x = [LEFT + (WIDTH - LEFT - 2) * end / ends[-1] for end in ends]
        apart = ("backward_ms",) if three else ("backward_ms", "weight_ms")
        self.lanes = [
            Lane("forward", "forward", "F", "FP cut", ("forward_ms",), "to loss →"),
            Lane("backward", "backward", "B", "BP cut", apart),
            *([Lane("weights", "weights", "W", "W cut", ("weight_ms",))] if three else []),
        ]
        named = [i for i, unit in enumerate(self.units) if unit["module"]]
        self.loss = named[-1] + 1 if named else len(self.units)  # what follows the last module is the loss function's

    def drawn(self) -> Markup:
        """The drawing."""
        cuts = [self._cuts(lane) for lane in self.lanes]
        levels = [1 + max((cut.level for cut in row), default=0) for row in cuts]
        above = 18 + 15 * max(1, levels[0])
        tops = [above + i * (LANE + GAP) for i in range(len(self.lanes))]
        strip = tops[-1] + LANE + 20 + 15 * max(1, *levels[1:])
        parts = [
            *(part for lane, top in zip(self.lanes, tops, strict=True) for part in self._head(lane, top)),
            *(part for pair in zip(pairwise(self.lanes), tops, strict=False) for part in self._apart(*pair)),
            *self._lanes(tops),
            *(part for i, row in enumerate(cuts) for part in self._cut_lines(row, tops[i], i)),
            *self._strip(strip),
            *self._single(above - 4, strip + 26),
        ]
        return tag(
            "svg", _HATCHED, *parts, class_="drawing map", viewBox=f"0 0 {WIDTH} {strip + 42}", role="group",
            data_rove=".part",
            aria_label="Forward and backward of the model from input to loss, by worker. "
            "Arrow keys go from part to part.",
        )  # fmt: skip

    def _runs(self, lane: Lane) -> list[tuple[int, int, int]]:
        return list(runs(unit[lane.key] for unit in self.units))

    def _space(self, first: int, end: int) -> float:
        return self.x[end] - self.x[first]

    def _name(self, unit: int) -> str:
        return self.units[unit]["module"] or ("(loss)" if unit >= self.loss else "(no module)")

    def _time(self, lane: Lane, first: int, end: int) -> float | None:
        """The milliseconds of some units in a lane; None where none is known."""
        times = [unit[name] for unit in self.units[first:end] for name in lane.times]
        known = [time for time in times if time is not None]
        return sum(known) if known else None

    def _head(self, lane: Lane, top: float) -> Iterator[Markup]:
        yield tag("text", lane.name, class_="name", x=0, y=top + LANE / 2 - 1)
        yield tag("text", lane.way, x=0, y=top + LANE / 2 + 14)

    def _lanes(self, tops: Sequence[float]) -> Iterator[Markup]:
        """A part for each run of units of one worker; those with room for their time all say it alike."""
        parts = [(lane, top, *run) for lane, top in zip(self.lanes, tops, strict=True) for run in self._runs(lane)]
        said = [_said(worker, ms(self._time(lane, first, end))) for lane, _, first, end, worker in parts]
        spaces = [self._space(first, end) for _, _, first, end, _ in parts]
        able = [i for i, forms in enumerate(said) if _fits(forms[-2], spaces[i])]
        form = next(k for k in range(3) if all(_fits(said[i][k], spaces[i]) for i in able))
        for (lane, top, first, end, worker), forms, space in zip(parts, said, spaces, strict=True):
            time, x = self._time(lane, first, end), self.x[first]
            lines = next((lines for lines in (forms[form], forms[-1]) if _fits(lines, space)), ())
            y = top + LANE / 2 + 11.5 - 7.5 * len(lines)
            tip = told(
                f"worker {worker}, {lane.name}", f"units {first} to {end - 1} of {len(self.units)}",
                f"{self._name(first)} … {self._name(end - 1)}", ms(time),
            )  # fmt: skip
            yield tag(
                "g",
                tag("rect", x=x, y=top, width=max(space, 1.0), height=LANE, fill=colour(worker), data_worker=worker,
                    data_lane=lane.letter, data_value=time),
                self._hairs(first, end, top),
                *(tag("text", line, class_="lane", x=x + space / 2, y=y + 15 * k, text_anchor="middle",
                      style=f"fill:{text_on(worker)};font-weight:600")
                  for k, line in enumerate(lines)),
                tag("rect", class_="frame", x=x + 2, y=top + 2, width=max(space - 4, 1.0), height=LANE - 4, rx=2),
                class_="part", data_tip=tip,
            )  # fmt: skip

    def _hairs(self, first: int, end: int, top: float) -> Markup | None:
        """Lines between the units of a part, where they would not blur into one."""
        if self._space(first, end) / (end - first) < 2:
            return None
        d, last = [], self.x[first]
        for x in self.x[first + 1 : end]:
            if x - last >= 4 and self.x[end] - x >= 4:
                last = x
                d.append(f"M{x:.1f} {top}v{LANE}")
        return tag("path", class_="hair", d="".join(d)) if d else None

    def _apart(self, lanes: tuple[Lane, Lane], top: float) -> Iterator[Markup]:
        """What is hatched between two lanes: runs of units that are cut apart there."""
        before, lane = lanes
        keys = (
            (unit[before.key], unit[lane.key]) if unit["apart"] and unit[before.key] != unit[lane.key] else None
            for unit in self.units
        )
        for first, end, pair in runs(keys):
            if pair is None:
                continue
            a, b = pair
            x, space = self.x[first], self._space(first, end)
            labels = (f"{before.letter} on {a}, {lane.letter} on {b}", f"{a} ≠ {b}", "≠")
            label = fitting(labels, space)
            parts = [tag("rect", x=x, y=top + LANE, width=max(space, 2.0), height=GAP, fill="url(#apart)")]
            if label is not None:
                wide, y = room(label), top + LANE
                parts += [
                    tag("rect", x=x + (space - wide) / 2, y=y + 7, width=wide, height=20, rx=4, fill="var(--surface)"),
                    tag("text", label, class_="apart", x=x + space / 2, y=y + 21, text_anchor="middle"),
                ]
            yield tag("g", *parts, class_="mismatch", data_units=end - first)

    def _cuts(self, lane: Lane) -> list[CutMark]:
        """The cuts of a lane, each with a level on which its label finds room, or none."""
        starts = [first for first, *_ in self._runs(lane)][1:]
        free = [0.0] * (1 if len(starts) > 12 else 3)  # many cuts: labels in one line, as far as they fit
        found = []
        for first in starts:
            x, name = self.x[first], self._name(first)
            label = fitting((f"{lane.cut} {name}", name), 0.45 * WIDTH) or lane.cut
            wide = room(label)
            start = min(max(0.0, x - wide / 2), WIDTH - wide)
            level = next((i for i, end in enumerate(free) if start >= end), -1)
            if level >= 0:
                free[level] = start + wide + 6
            found.append(CutMark(x, label, level, start + wide / 2))
        return found

    def _cut_lines(self, cuts: Sequence[CutMark], top: float, lane: int) -> Iterator[Markup]:
        dense = len(cuts) > 1 and (cuts[-1].x - cuts[0].x) / (len(cuts) - 1) < 16
        for cut in cuts:
            reach = 5 + 15 * max(cut.level, 0)
            up, down = (reach, 5) if lane == 0 else (5, reach if lane == len(self.lanes) - 1 else 5)
            yield tag(
                "line", class_="cut thin" if dense else "cut", x1=cut.x, x2=cut.x, y1=top - up, y2=top + LANE + down
            )
        for cut in cuts:
            reach = 5 + 15 * max(cut.level, 0)
            y = top - reach - 5 if lane == 0 else top + LANE + reach + 12
            if cut.level >= 0 and lane in (0, len(self.lanes) - 1):
                yield tag("text", cut.label, class_="cut-text", x=cut.middle, y=y, text_anchor="middle")

    def _strip(self, top: float) -> Iterator[Markup]:
        """Which modules are where.

        A module has one name, in the middle of all that is in it; what an opened module does itself, between its parts,
        has none.
        """
        parts, opened = self._modules()
        narrow = (self.x[-1] - self.x[0]) / len(parts) < NAMED  # too narrow for names: some stand beneath
        for first, end, _ in parts:
            wide = max(self._space(first, end), 0.5)
            yield tag("rect", class_="cell", x=self.x[first], y=top, width=wide, height=12 if narrow else 24)
        extents: dict[int, tuple[int, int]] = {}
        for first, end, module in parts:
            if module not in opened:
                extents[module] = extents.get(module, (first, end))[0], end
        taken: list[tuple[float, float]] = []
        for module, (first, end) in extents.items():
            space, name = self._space(first, end), self.modules[module]["name"]
            middle, path = self.x[first] + space / 2, self.modules[module]["path"] or name
            names = [path] if narrow else [path, ".".join(path.split(".")[-2:]), name]
            names += [f"{name[: int((space - 16) / 7.1)]}…"] if space > 38 and not narrow else []
            limit = 2 * min(middle, WIDTH - middle) if narrow else space + 1
            held = fitting(names, limit)
            if held is None:
                continue
            from_, to = middle - room(held) / 2, middle + room(held) / 2
            if any(from_ < b and a < to for a, b in taken):
                continue
            taken.append((from_, to))
            if narrow:
                yield tag("path", class_="tie", d=f"M{middle:.1f} {top + 12}v6")
            y = top + (30 if narrow else 16)
            yield tag("text", held, class_="mono strip", x=middle, y=y, text_anchor="middle")

    def _modules(self) -> tuple[list[tuple[int, int, int]], set[int]]:
        """The parts of the strip, each with its module, and the modules that are opened.

        The tree is opened at its widest places until its parts get too narrow.
        """
        index = {module["path"]: i for i, module in enumerate(self.modules)}
        places = [index.get(None if u >= self.loss else unit["module"] or "", 0) for u, unit in enumerate(self.units)]
        parents = {module["parent"] for module in self.modules}
        opened, whole, across = {0}, set[int](), self.x[-1] - self.x[0]

        def trail(module: int | None) -> list[int]:
            found = []
            while module is not None:
                found.append(module)
                module = self.modules[module]["parent"]
            return found[::-1]

        trails = [trail(place) for place in places]

        def shown() -> list[tuple[int, int, int]]:
            return list(runs(next((m for m in t if m not in opened), t[-1]) for t in trails))

        def divides(module: int, parts: list[tuple[int, int, int]]) -> bool:
            inside = [u for first, end, m in parts if m == module for u in range(first, end)]
            own = sum(self._space(u, u + 1) for u in inside if places[u] == module)
            return own <= OWN * sum(self._space(u, u + 1) for u in inside)

        parts = shown()
        for _ in range(12):
            wide = [p for p in parts if p[2] in parents - opened - whole and self._space(*p[:2]) >= 160]
            if not wide:
                break
            widest = max(wide, key=lambda part: self._space(*part[:2]))
            alike = {m for *_, m in wide if self.modules[m]["parent"] == self.modules[widest[2]]["parent"]}
            tried = {module for module in alike if divides(module, parts)}
            opened |= tried
            finer = shown()
            named = 7 if self._space(*widest[:2]) > across / 2 else NAMED  # most of the model is shown by its parts
            if tried and len(finer) <= max(12, across / named):
                parts = finer
            else:
                opened -= tried
            whole |= alike
        return parts, opened

    def _single(self, top: float, bottom: float) -> Iterator[Markup]:
        """What is told of each unit where the mouse is."""
        if len(self.units) > SINGLE:
            return
        for number, unit in enumerate(self.units):
            tip = told(
                self._name(number), f"unit {number} of {len(self.units)}",
                f"forward on worker {unit['forward']}: {ms(unit['forward_ms'])}",
                f"backward on worker {unit['backward']}: {ms(unit['backward_ms'])}",
                f"weight gradients on worker {unit['weights']}: {ms(unit['weight_ms'])}" if unit["weight_ms"] else None,
            )  # fmt: skip
            wide = self._space(number, number + 1)
            yield tag("rect", class_="unit", x=self.x[number], y=top, width=wide, height=bottom - top, data_tip=tip)


_HATCHED = Markup(
    '<defs><pattern id="apart" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="var(--sunk)"/><line x1="0" y1="0" x2="0" y2="6" class="tie" stroke-width="2"/>'
    "</pattern></defs>"
)


def _said(worker: int, time: str) -> tuple[tuple[str, ...], ...]:
    """What a part of a lane may say, the fullest first, as lines."""
    return (f"worker {worker} · {time}",), (f"worker {worker}", time), (str(worker), time), (str(worker),)


def _fits(lines: Sequence[str], space: float) -> bool:
    return all(room(line) <= space for line in lines)
