"""Facts as one HTML page that contains its style, its script and the facts.

`page.html` is the page from top to bottom; it calls the modules next to this one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fxpipe.errors import BuildError
from fxpipe.files import replaced
from fxpipe.inspection import table, tables
from fxpipe.inspection.report import charts, overview
from fxpipe.inspection.report.drawing import drawn, folded, tag
from fxpipe.inspection.report.marks import MARKS, chip, stroke
from fxpipe.inspection.report.marks import style as style_of_marks
from fxpipe.inspection.report.model_map import model_map
from fxpipe.inspection.report.timeline import timeline
from fxpipe.inspection.report.tree import tree
from fxpipe.inspection.timeline import CELL, example, explained, in_words
from fxpipe.observe.trace import KINDS
from fxpipe.typed_json import dumps

Json = dict[str, Any]

_RUN = ("workers", "time_losses", "evaluation", "timeline")  # missing in a run that did not end


def write_report(facts: dict[str, Any], path: Path) -> None:
    """Write the page of `facts`, see `page`; it appears under its name when it is complete."""
    whole = page(facts)
    target = Path(os.path.realpath(path))  # a link stays; the new page replaces its target
    try:
        if target.exists() and not target.is_file():
            raise _refused(path, "it is a folder" if target.is_dir() else "it is not a regular file")
        with replaced(target) as file:
            file.write(whole.encode())
    except OSError as error:
        raise _refused(path, error.strerror or str(error)) from error


def _refused(path: Path, reason: str) -> BuildError:
    return BuildError(f"{path} cannot be written: {reason}", hint="give another path to --html")


def page(facts: Json) -> str:
    """One self-contained page that shows `facts`, which `fxpipe inspect --json` prints.

    All drawings are made here; the facts in `<script id="facts">` are for programs that read the page.
    """
    run = facts["run"] and {**dict.fromkeys(_RUN), **facts["run"]}
    parts = {"style": f"{_asset('page.css')}{style_of_marks()}", "script": _asset("page.js")}
    for name, part in parts.items():
        if "</script" in part.lower() or "<!--" in part:
            raise AssertionError(f"the page's {name} would end its element")
    panels = _panels(facts)
    memory = facts["timeline"] and facts["timeline"]["memory"]
    workers = (run or {}).get("workers") or ()
    kinds = tables.PARTS.items()
    return (
        _templates()
        .get_template("page.html")
        .render(
            {name: Markup(part) for name, part in parts.items()},
            **facts | {"run": run},
            facts=facts,
            facts_json=Markup(embedded(facts)),
            tree=tree(facts),
            balance_kinds=[k for k, key in kinds if any(w[key] for p in facts["partitions"] for w in p["workers"])],
            panels=panels,
            timeline_kinds=[kind for kind in KINDS if any(span[1] == kind for p in panels for span in p["spans"])],
            memory=memory,
            explained=explained(facts["grid"]["rows"]) if facts["grid"]["rows"] else None,
            stale=[row | {"worker": w["worker"]} for w in workers for row in w.get("staleness") or ()],
            elsewhere=overview.elsewhere(facts),
            map=model_map(facts),
            spans=timeline(panels, facts["build"]) if panels else None,
            balance=charts.balance(facts["partitions"]),
            held=charts.memory(facts["timeline"]) if memory else None,
            spent=charts.spent(workers) if workers else None,
        )
    )


def embedded(value: Any) -> str:
    r"""The JSON that `--json` prints, with `<` as `\u003c`, so that it may be in a script element."""
    return dumps(value).replace("<", "\\u003c")


def _panels(facts: Json) -> list[Json]:
    """The simulated and the measured timeline, if they have spans, each with a sentence on how far it goes."""
    timelines = {"simulated": facts["timeline"], "measured": (facts["run"] or {}).get("timeline")}
    shown = {name: timeline for name, timeline in timelines.items() if timeline and timeline["spans"]}
    last = {name: max(span[5] for span in timeline["spans"]) for name, timeline in shown.items()}
    return [
        {"name": name, "spans": timeline["spans"], "words": _how_far(name, timeline, last[name], max(last.values()))}
        for name, timeline in shown.items()
    ]


def _how_far(name: str, timeline: Json, last: float, end: float) -> str:
    minibatches, spans = timeline["minibatches"], len(timeline["spans"])
    words = f"{name.capitalize()}: {table.plural(minibatches, 'minibatch', 'minibatches')}, "
    words += f"{table.plural(spans, 'span')}, until {table.ms(1e3 * last)}"
    words += "; its lanes are blank from there on." if last < end else "."
    if (timeline.get("of") or 0) > minibatches:
        words += f" Of {timeline['of']:,} minibatches only the first {minibatches:,} are shown."
    return words


def _cells(rows: Sequence[Sequence[str]]) -> list[list[tuple[str, str, str, str]]]:
    """For each rank its steps: action, version, class, and the cell in words; all empty if the rank waits.

    If ranks have several workers, an action begins with its worker: `2:F0`. The cell that the page explains has its own
    class.
    """
    wide, shown = max(map(len, rows)), example(rows)
    return [[_cell(rank, row[i] if i < len(row) else "", shown) for i in range(wide)] for rank, row in enumerate(rows)]


def _cell(rank: int, label: str, shown: str) -> tuple[str, str, str, str]:
    if not (match := CELL.fullmatch(label)):
        return "", "", "", ""
    action, at, seen = label.partition("@")
    look = f"k-{'F' if match['phase'] == 'F' else 'B'} w{int(match['worker'] or rank) % 8}"
    return action, at + seen, f"{look} example" if label == shown else look, in_words(label)


@cache
def _templates() -> Environment:
    """The templates, which escape all values but `Markup`."""
    environment = Environment(
        loader=PackageLoader("fxpipe.inspection", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {name: getattr(table, name) for name in ("text", "count", "share")}
    environment.filters |= {"drawn": drawn, "folded": folded}
    environment.filters["strokes"] = lambda workers: [(f"worker {w}", stroke(w)) for w in workers]
    environment.globals |= {
        "chip": chip, "marks": MARKS, "plural": table.plural, "cells": _cells, "tables": tables, "overview": overview,
        "charts": charts, "tag": tag, "spent_kinds": charts.spent_kinds,
    }  # fmt: skip
    return environment


def _asset(name: str) -> str:
    return (files("fxpipe.inspection.report") / name).read_text(encoding="utf-8")
