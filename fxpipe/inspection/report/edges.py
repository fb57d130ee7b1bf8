"""What crosses workers: a row for each worker with its F and its B, and a line for every edge between them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from fxpipe.inspection.report.drawing import WIDTH, tag, told
from fxpipe.inspection.report.formats import dims, plural, size
from fxpipe.inspection.report.marks import DASHES, colour, text_on

Json = dict[str, Any]

SINGLE = 60
"""More edges than this are drawn as bundles."""

TOP, SIDE, BOX = 26, 230, 104
PLACES = {"F": SIDE, "B": WIDTH - SIDE - BOX}
"""Where the boxes of forwards and of backwards begin."""

_PHASES = {"F": "forward", "B": "backward", "W": "weight gradients"}


@dataclass(frozen=True)
class EdgeLine:
    """An edge, or all of one kind from one place to another, and where on its boxes it begins and ends.

    Attributes:
        way: the worker and the box (F or B) where it begins, and where it ends.
        turn: how many lines there are already between the same boxes.
    """

    edges: tuple[int, ...]
    first: Json
    bytes: int
    way: tuple[int, str, int, str]
    turn: int = 0
    leaves: float = 0.0
    arrives: float = 0.0

    @property
    def outside(self) -> bool:
        """Whether it is an arc from a column to itself."""
        return self.way[1] == self.way[3]


def wires(edges: Sequence[Json], workers: int) -> Markup:
    """The drawing, as tall as it takes for the lines of a box to have room."""
    lines = _lines(edges)
    ends = Counter(end for line in lines for end in ((*line.way[:2], line.outside), (*line.way[2:], line.outside)))
    crowd = max(ends.values())
    tall = min(max(26 if workers > 16 else 38, 6 * crowd), 60 if workers > 8 else 160)
    pitch = tall + (18 if workers > 16 else 38)
    thick = min(9.0, 0.8 * tall / crowd)
    most = max((line.bytes for line in lines), default=0) or 1

    def middle(worker: int) -> float:
        return TOP + (worker + 0.5) * pitch

    drawn = []
    for line in _ported(lines, tall, workers):
        path, way = _path(line, middle, workers)
        least = min(1.2, thick)
        width = least + (thick - least) * (line.bytes / most) ** 0.5
        shade = colour(line.way[0])
        drawn.append(
            tag(
                "g",
                tag("path", class_="hit", d=path),
                tag("path", class_="wire", d=path, stroke=shade, stroke_width=width,
                    stroke_dasharray=DASHES.get(line.first["kind"])),
                _head(line, middle, way, min(4, 1.5 + thick / 2) + width / 2),
                class_="edge", data_edges=list(line.edges), data_value=line.bytes, data_tip=_told(line, edges),
            )
        )  # fmt: skip
    boxes = [
        part
        for worker in range(workers)
        for phase, x in PLACES.items()
        for part in (
            tag("rect", x=x, y=middle(worker) - tall / 2, width=BOX, height=tall, rx=6, fill=colour(worker)),
            tag("text", f"worker {worker} · {phase}", x=x + BOX / 2, y=middle(worker) + 4, text_anchor="middle",
                style=f"fill:{text_on(worker)};font-weight:600"),
        )
    ]  # fmt: skip
    heads = [
        tag("text", name, class_="name", x=PLACES[phase] + BOX / 2, y=14, text_anchor="middle")
        for phase, name in (("F", "forward"), ("B", "backward, update"))
    ]
    return tag(
        "svg", *heads, *boxes, tag("g", *drawn, class_="edges"), class_="drawing", role="group", data_rove=".edge",
        viewBox=f"0 0 {WIDTH} {TOP + workers * pitch}",
        aria_label="Edges between workers. Arrow keys go from edge to edge.",
    )  # fmt: skip


def _lines(edges: Sequence[Json]) -> list[EdgeLine]:
    bundled = len(edges) > SINGLE
    found: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for number, edge in enumerate(edges):
        way = tuple(edge[key] for key in ("kind", "src", "src_phase", "dst", "dst_phase"))
        found[way if bundled else (number,)].append(number)
    turns: Counter[tuple[Any, ...]] = Counter()
    lines = []
    for members in found.values():
        first = edges[members[0]]
        way = (first["src"], _box(first["src_phase"], True), first["dst"], _box(first["dst_phase"], False))
        total = sum(edges[number]["bytes"] or 0 for number in members)
        lines.append(EdgeLine(tuple(members), first, total, way, turns[way]))
        turns[way] += 1
    return lines


def _box(phase: str, leaves: bool) -> str:
    return "F" if "F" in phase and not (leaves and phase == "FB") else "B"


def _told(line: EdgeLine, edges: Sequence[Json]) -> str:
    edge = line.first
    route = (
        f"from worker {edge['src']}, {_phase(edge['src_phase'])}, to worker {edge['dst']}, {_phase(edge['dst_phase'])}"
    )
    if len(line.edges) > 1:
        names = [edges[number]["name"] for number in line.edges[:4]]
        more = ", …" if len(line.edges) > 4 else ""
        return told(
            f"{plural(len(line.edges), 'edge')}, {edge['kind']}, {size(line.bytes)}", route, ", ".join(names) + more
        )
    shape = f", {edge['dtype'] or ''}{dims(edge['shape'])}" if edge["shape"] else ""
    held = edge["names"] or ()
    some = f"{', '.join(held[:6])}{', …' if len(held) > 6 else ''}"
    return told(
        f"{edge['name']}, {size(edge['bytes'])}", f"{edge['kind']}{shape}", route,
        " · ".join(filter(None, (edge["module"], edge["source"]))),
        f"{plural(len(held), 'parameter')}: {some}" if held else None,
    )  # fmt: skip


def _phase(phase: str) -> str:
    return phase if phase == "update" else " and ".join(_PHASES[letter] for letter in phase)


def _ported(lines: Sequence[EdgeLine], tall: float, workers: int) -> list[EdgeLine]:
    """The lines, those of one side of a box spread over it."""
    sides: dict[tuple[Any, ...], list[tuple[Any, ...]]] = defaultdict(list)
    for number, line in enumerate(lines):
        src, leaves, dst, arrives = line.way
        for which, worker, box, way in (("leaves", src, leaves, dst - src), ("arrives", dst, arrives, src - dst)):
            far = workers - way if way > 0 else -way  # arcs are within each other: upwards the far ones below
            rank = way if not line.outside else workers + far if way > 0 else far
            turn = -line.turn if line.outside and way > 0 else line.turn
            kind = "" if line.outside else line.first["kind"]
            sides[worker, box, line.outside].append((rank, kind, turn, number, which))
    found = list(lines)
    for side in sides.values():
        for place, (*_, number, which) in enumerate(sorted(side)):
            port = ((place + 0.5) / len(side) - 0.5) * (tall - 8)
            found[number] = replace(found[number], **{which: port})
    return found


def _path(line: EdgeLine, middle: Any, workers: int) -> tuple[str, int]:
    """Its curve, and whether it arrives from the left (1) or from the right (−1)."""
    src, box, dst, other = line.way
    begin, end = middle(src) + line.leaves, middle(dst) + line.arrives
    if line.outside:
        out = -1 if box == "F" else 1
        x = PLACES[box] + (BOX if out > 0 else 0)
        far = (abs(dst - src) / max(workers - 1, 3)) ** 0.5
        bend = x + out * min(SIDE - 16, 26 + (SIDE - 60) * far + 7 * (line.turn % 6)) * 4 / 3
        return f"M{x} {begin:.1f}C{bend:.1f} {begin:.1f} {bend:.1f} {end:.1f} {x + 8 * out} {end:.1f}", -out
    out = 1 if box == "F" else -1
    x, to = PLACES[box] + (BOX if out > 0 else 0), PLACES[other] + (0 if out > 0 else BOX)
    half = (x + to) / 2
    return f"M{x} {begin:.1f}C{half} {begin:.1f} {half} {end:.1f} {to - 8 * out} {end:.1f}", out


def _head(line: EdgeLine, middle: Any, way: int, radius: float) -> Markup:
    """An arrow head that ends where the line does."""
    x = PLACES[line.way[3]] + (0 if way > 0 else BOX)
    y = middle(line.way[2]) + line.arrives
    d = f"M{x} {y:.1f}l{-way * (radius + 5):.1f} {-radius:.1f}v{2 * radius:.1f}z"
    return tag("path", d=d, style=f"fill:{colour(line.way[0])}")
