"""How workers and kinds of time look on the page: the worker gives the colour, the kind its brightness and pattern."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

COLOURS = ("#4477AA", "#EE7733", "#228833", "#CC3311", "#AA3377", "#33BBEE", "#CCBB44", "#777777")
_DARK_TEXT = {1, 5, 6, 7}  # the colours on which black is easier to read than white

DASHES = {"input": "2 3", "saved": "7 4", "weights": "10 3 2 3", "token": "1 5"}
"""How the lines of kinds of edges are dashed; the others are solid."""

_STROKES = (
    "solid", "7px,4px", "2px,3px", "7px,3px,2px,3px", "13px,4px", "13px,3px,2px,3px", "7px,2px,2px,2px,2px,2px",
    "4px,2px",
)  # fmt: skip


@dataclass(frozen=True)
class Mark:
    """How a kind of time is drawn: `shape` is a pattern of Plotly's, empty for none."""

    name: str
    opacity: float
    shape: str = ""


MARKS = {
    "F": Mark("forward (F)", 0.5),
    "B": Mark("backward (B)", 1),
    "W": Mark("weight gradients (W)", 1, "-"),
    "predict": Mark("predict", 0.5, "x"),
    "update": Mark("update", 1, "x"),
    "recompute": Mark("recompute", 0.5, "-"),
    "exposed": Mark("communication", 0.15, "/"),
    "send": Mark("send", 0.15, "/"),
    "receive": Mark("receive", 0.15, "\\"),
    "wait": Mark("wait", 0.12),
    "data": Mark("data", 0.15, "|"),
    "save": Mark("save a checkpoint", 0.5, "\\"),
    "evaluate": Mark("evaluate", 0.5, "|"),
    "other": Mark("other", 0.15, "."),
}


def colour(worker: int) -> str:
    """The colour of a worker; from the ninth on they repeat."""
    return COLOURS[worker % 8]


def text_on(worker: int) -> str:
    """The colour of text on a worker's colour."""
    return "#111111" if worker % 8 in _DARK_TEXT else "#ffffff"


def tint(worker: int, opacity: float) -> str:
    """A worker's colour, paler."""
    red, green, blue = (int(colour(worker)[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity:g})"


def stroke(worker: int, nth: int | None = None) -> dict[str, str]:
    """A line of a worker's colour: dashed differently for workers of one colour, or for the nth line of a worker."""
    return {"color": colour(worker), "dash": _STROKES[(worker // 8 if nth is None else nth) % 8]}


def fill(kind: str, worker: int) -> dict[str, Any]:
    """The colour and, as Plotly wants it, the pattern of a kind of time: white on full colour, on pale the colour."""
    mark = MARKS[kind]
    line = "rgba(255,255,255,0.8)" if mark.opacity == 1 else colour(worker)
    back = tint(worker, mark.opacity)
    return {
        "color": back,
        "pattern": {"shape": mark.shape, "fgcolor": line, "bgcolor": back, "size": 6, "solidity": 0.3},
    }


def looks() -> dict[str, Any]:
    """What the page's scripts must know of this: colours, texts and fills of the eight workers that differ."""
    workers = range(len(COLOURS))
    fills = {kind: [fill(kind, w) for w in workers] for kind in MARKS}
    fills["wait"] = [fills["wait"][w] | {"color": tint(w, 0.5)} for w in workers]  # on the timeline a thin line
    return {
        "colours": COLOURS,
        "texts": [text_on(w) for w in workers],
        "fills": fills,
        "dashes": DASHES,
    }


def chip(worker: int | None, title: str | None = None) -> Markup | str:
    """A worker, by number and colour."""
    if worker is None:
        return "–"
    return Markup('<span class="chip" title="{}" style="background:{};color:{}">{}</span>').format(
        title or f"worker {worker}", colour(worker), text_on(worker), worker
    )
