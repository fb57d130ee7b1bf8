"""Facts as one HTML page: its style, its script and the facts themselves are inside.

`page.html` is the page from top to bottom; what it calls is in the modules next to this one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fxpipe.errors import BuildError
from fxpipe.inspection.grid import explained
from fxpipe.inspection.report import charts, formats, overview, tables
from fxpipe.inspection.report.drawing import tag
from fxpipe.inspection.report.edges import SINGLE, wires
from fxpipe.inspection.report.grid import cells
from fxpipe.inspection.report.marks import DASHES, MARKS, chip, stroke
from fxpipe.inspection.report.marks import style as style_of_marks
from fxpipe.inspection.report.model_map import ModelMap
from fxpipe.inspection.report.timeline import timeline
from fxpipe.inspection.report.tree import ModuleRows, milliseconds
from fxpipe.typed_json import dumps

Json = dict[str, Any]

_TIMES = ("F", "B", "W", "predict", "update", "send", "receive", "wait", "data", "save", "evaluate")
_RUN = ("workers", "time_losses", "evaluation", "timeline")  # what a run that did not end lacks


def write_report(facts: dict[str, Any], path: Path) -> None:
    """Write the page of `facts`, see `page`, as a whole or not at all: it appears under its name when it is complete.

    Raises:
        BuildError: the target is not a plain file, or the disk refuses; an old page stays.
    """
    whole = page(facts)
    target = Path(os.path.realpath(path))  # a link stays, and leads to the new page
    partial = target.with_name(f".fxpipe-report-{secrets.token_hex(6)}")
    try:
        if target.exists() and not target.is_file():
            raise _refused(path, "it is a folder" if target.is_dir() else "it is no plain file")
        try:
            with partial.open("x", encoding="utf-8") as file:
                file.write(whole)
            os.replace(partial, target)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _refused(path, error.strerror or str(error)) from error


def _refused(path: Path, reason: str) -> BuildError:
    return BuildError(f"{path} cannot be written: {reason}", hint="choose another --html")


def page(facts: Json) -> str:
    """One self-contained page that shows `facts`, what `fxpipe inspect --json` prints.

    All of it is made here, drawings too; the facts, in `<script id="facts">`, are for programs that read the page.
    """
    run = facts["run"] and {**dict.fromkeys(_RUN), **facts["run"]}
    parts = {"style": f"{_own('page.css')}{style_of_marks()}", "script": _own("page.js")}
    for name, part in parts.items():
        if "</script" in part.lower() or "<!--" in part:
            raise AssertionError(f"the page's {name} would end its element")
    panels = _panels(facts)
    memory = facts["timeline"] and facts["timeline"]["memory"]
    edge_kinds: dict[str, list[Json]] = {}
    for edge in facts["edges"]:
        edge_kinds.setdefault(edge["kind"], []).append(edge)
    workers = (run or {}).get("workers") or ()
    waits = [wait | {"worker": w["worker"]} for w in workers for wait in w.get("waits") or ()]
    return (
        _templates()
        .get_template("page.html")
        .render(
            {name: Markup(part) for name, part in parts.items()},
            **facts | {"run": run},
            facts=facts,
            facts_json=Markup(embedded(facts)),
            tree=ModuleRows(facts),
            timed=any(unit["forward_ms"] is not None for unit in facts["units"]),
            edge_kinds=edge_kinds,
            balance_kinds=[
                k for k, part in tables.PARTS.items() if any(w[part] for p in facts["partitions"] for w in p["workers"])
            ],
            panels=panels,
            timeline_kinds=[kind for kind in _TIMES if any(span[1] == kind for p in panels for span in p["spans"])],
            memory=memory,
            example=explained(facts["grid"]["rows"]) if facts["grid"]["rows"] else None,
            stale=[row | {"worker": w["worker"]} for w in workers for row in w.get("staleness") or ()],
            waits=sorted(waits, key=lambda wait: -(wait.get("seconds") or 0)),
            elsewhere=overview.elsewhere(facts),
            map=ModelMap(facts).drawn() if facts["units"] else None,
            wires=wires(facts["edges"], facts["build"]["workers"]) if facts["edges"] else None,
            spans=timeline(panels, facts["build"]) if panels else None,
            balance=charts.balance(facts["partitions"]),
            held=charts.memory(facts["timeline"]) if memory else None,
            spent=charts.spent(workers) if workers else None,
        )
    )


def embedded(value: Any) -> str:
    r"""A value as JSON that may be inside a script element.

    What `--json` prints, with `<` written as `\u003c`: JSON has `<` only in strings.
    """
    return dumps(value).replace("<", "\\u003c")


def _panels(facts: Json) -> list[Json]:
    """The simulated and the measured timeline, as far as there are spans, with a sentence on how far each goes."""
    found = {"simulated": facts["timeline"], "measured": (facts["run"] or {}).get("timeline")}
    shown = {name: timeline for name, timeline in found.items() if timeline and timeline["spans"]}
    last = {name: max(span[5] for span in timeline["spans"]) for name, timeline in shown.items()}
    return [
        {"name": name, "spans": timeline["spans"], "words": _how_far(name, timeline, last[name], max(last.values()))}
        for name, timeline in shown.items()
    ]


def _how_far(name: str, timeline: Json, last: float, end: float) -> str:
    minibatches, spans = timeline["minibatches"], len(timeline["spans"])
    words = f"{name.capitalize()}: {formats.plural(minibatches, 'minibatch', 'minibatches')}, "
    words += f"{formats.plural(spans, 'span')}, until {formats.ms(1e3 * last)}"
    words += "; its lanes are blank from there on." if last < end else "."
    if (timeline.get("of") or 0) > minibatches:
        words += f" Of {timeline['of']:,} minibatches only the first {minibatches:,} are shown."
    return words


def _route(edge: Json) -> str:
    return f"{edge['src_phase']} → {' and '.join(edge['dst_phase'])}"


def _total(values: Iterable[int | None]) -> int:
    return sum(value or 0 for value in values)


def _strokes(workers: Iterable[int]) -> list[tuple[str, dict[str, Any]]]:
    return [(f"worker {w}", stroke(w)) for w in workers]


@cache
def _templates() -> Environment:
    """The templates; whatever they are given is escaped unless it is `Markup`."""
    made = Environment(
        loader=PackageLoader("fxpipe.inspection", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    forms = ("size", "listed", "text", "number", "count", "ms", "share")
    made.filters.update({name: getattr(formats, name) for name in forms})
    made.filters |= {
        "route": _route,
        "total": _total,
        "strokes": _strokes,
    }
    made.globals |= {
        "chip": chip, "marks": MARKS, "dashes": DASHES, "single": SINGLE, "plural": formats.plural, "cells": cells,
        "tables": tables, "overview": overview, "milliseconds": milliseconds, "curve": charts.curve,
        "is_long": charts.is_long, "tag": tag, "spent_kinds": charts.spent_kinds,
    }  # fmt: skip
    return made


def _own(name: str) -> str:
    return (files("fxpipe.inspection.report") / name).read_text(encoding="utf-8")
