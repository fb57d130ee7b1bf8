"""How workers and kinds of time look on the page: the worker gives the colour, the kind its brightness and pattern."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

COLOURS = ("#4477AA", "#EE7733", "#228833", "#CC3311", "#AA3377", "#33BBEE", "#CCBB44", "#777777")
_DARK_TEXT = {1, 5, 6, 7}  # the colours on which black is easier to read than white

_STROKES = (None, "7 4", "2 3", "7 3 2 3", "13 4", "13 3 2 3", "7 2 2 2 2 2", "4 2")
_PATTERNS = {
    "/": "repeating-linear-gradient(135deg, {0} 0 1.3px, transparent 1.3px 6px)",
    "\\": "repeating-linear-gradient(45deg, {0} 0 1.3px, transparent 1.3px 6px)",
    "-": "repeating-linear-gradient(0deg, {0} 0 1.5px, transparent 1.5px 6px)",
    "|": "repeating-linear-gradient(90deg, {0} 0 1.5px, transparent 1.5px 6px)",
    ".": "radial-gradient({0} 1px, transparent 1.4px) 0 0 / 6px 6px",
}


@dataclass(frozen=True)
class Mark:
    """How a kind of time is drawn: each character of `shape` is a pattern."""

    name: str
    opacity: float
    shape: str = ""


MARKS = {
    "F": Mark("forward (F)", 0.5),
    "B": Mark("backward (B)", 1),
    "W": Mark("weight gradients (W)", 1, "-"),
    "predict": Mark("predict", 0.5, "/\\"),
    "update": Mark("update", 1, "/\\"),
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


def style() -> str:
    """CSS classes for the eight colours of workers, and for kinds of time; patterns are white on full colour."""
    rules = [f".w{w} {{ --c: {colour(w)}; --t: {text_on(w)}; }}" for w in range(len(COLOURS))]
    for kind, mark in MARKS.items():
        line = "rgba(255, 255, 255, .8)" if mark.opacity == 1 else "var(--c)"
        back = [_PATTERNS[shape].format(line) for shape in mark.shape]
        back += [f"color-mix(in srgb, var(--c) {100 * mark.opacity:g}%, transparent)"]
        rules.append(f".k-{kind} {{ background: {', '.join(back)}; }}")
    return "\n".join(rules)


def look(kind: str, worker: int) -> dict[str, str]:
    """The class of an element for a kind of time of a worker."""
    return {"class_": f"k-{kind} w{worker % 8}"}


def colour(worker: int) -> str:
    """The colour of a worker; from the ninth on they repeat."""
    return COLOURS[worker % 8]


def text_on(worker: int) -> str:
    """The colour of text on a worker's colour."""
    return "#111111" if worker % 8 in _DARK_TEXT else "#ffffff"


def stroke(worker: int) -> dict[str, Any]:
    """A line in a worker's colour; workers of one colour have different dashes."""
    return {"stroke": colour(worker), "stroke_dasharray": _STROKES[worker // 8 % 8]}


def chip(worker: int | None, title: str | None = None) -> Markup | str:
    """A worker's number on its colour."""
    if worker is None:
        return "–"
    return Markup('<span class="chip w{}" title="{}">{}</span>').format(worker % 8, title or f"worker {worker}", worker)
