"""`fxpipe compare`: two runs side by side."""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import click
from fxpipe.cli.output import echo, emit_json, print_columns, print_text, stdout_console, warn

from fxpipe.inspection.formats import known, text
from fxpipe.inspection.run_comparison import SMOOTH, compare
from fxpipe.inspection.table import COUNT, TEXT, WRITTEN, Column, Kind, ShownTable
from fxpipe.observe.rates import RATES
from fxpipe.observe.trace import OF_TRAINING

if TYPE_CHECKING:
    from rich.console import Console

Json = dict[str, Any]

SPENT = (*OF_TRAINING, "other")
"""Columns of the workers' table."""

NAMED = {"samples": "batch size"}
"""Settings that people call otherwise."""

RARE = ("save",)
"""Those that are left out where all do not fit."""


@click.command("compare")
@click.argument("first", metavar="RUN1", type=click.Path())
@click.argument("second", metavar="RUN2", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def compare_command(first: str, second: str, as_json: bool) -> int:
    """Compare two runs: settings, speed, loss, and where their time went.

    RUN1 and RUN2 are --out folders of `fxpipe run`; the builds may differ. Losses are compared at the end and after the
    same time of training, as the mean of the last 20. Anything missing from a folder, for example after a run was
    stopped, is left out with a warning.

    \b
    fxpipe compare out/ other/
    fxpipe compare runs/async runs/gpipe --json
    """
    from fxpipe.observe.run_folder import read_run

    runs = [read_run(first), read_run(second)]
    found = compare(*runs)
    for run in runs:
        for problem in run["problems"]:
            warn(f"{run['folder']}: {problem}")
    if as_json:
        emit_json(found)
    else:
        describe(found, stdout_console())
    return 0


def describe(found: Json, console: Console) -> None:
    """Print what `fxpipe.inspection.run_comparison` found: small tables, then the verdict."""
    for number, folder in enumerate(found["runs"], start=1):
        echo(f"run {number}  {folder}")
    if not found["settings"]:
        echo("\nno setting differs")
    tables = {
        "settings that differ": _settings(found),
        "speed and outcome": _speed(found),
        "the workers' time, % of each one's run": _workers(found),
    }
    for title, table in tables.items():
        if table.rows:
            echo(f"\n{title}")
            print_columns(table, console)
    for number, rows in enumerate(found["time_losses"], start=1):
        if rows:
            echo(f"\nwhere run {number} lost time")
        for row in rows:
            print_text(console, f"- {row['text']}")
    echo()
    for sentence in found["verdict"]:
        print_text(console, sentence)


_LOSS = Kind(known(lambda value: f"{value:#.4g}"))
_PERCENT = Kind(known(lambda share: f"{100 * share:.0f}"))
_SIDE = Kind(text, elastic=True)


def _settings(found: Json) -> ShownTable:
    rows = [(NAMED.get(name, name.replace("_", " ")), *pair) for name, pair in found["settings"].items()]
    return ShownTable([Column("", itemgetter(0), TEXT), *_runs()], rows)


def _runs() -> list[Column]:
    return [Column(f"run {i}", itemgetter(i), _SIDE) for i in (1, 2)]


def _speed(found: Json) -> ShownTable:
    percent = known(lambda share: f"{100 * share:.0f} %")
    speed, loss = found["speed"], found["loss"]
    rows = [
        *((noun, speed[name], known(partial(_formed, form))) for name, (noun, form) in RATES.items()),
        ("median step", speed["step_ms"], known(lambda ms: f"{ms:.3g} ms")),
        ("of the forecast", speed["efficiency"], percent),
        ("bubble", speed["bubble"], percent),
        ("seconds", speed["seconds"], known(lambda seconds: f"{seconds:.1f}")),
        ("final loss", loss["raw"], _LOSS.write),
        (f"mean of last {SMOOTH}", loss["smoothed"], _LOSS.write),
        *((f"held out {name}", pair, _LOSS.write) for name, pair in found["evaluation"].items()),
    ]
    cells = [(name, *map(write, pair), _change(pair)) for name, pair, write in rows if pair != [None, None]]
    return ShownTable([Column("", itemgetter(0), TEXT), *_runs(), Column("2 to 1", itemgetter(3), WRITTEN)], cells)


def _formed(form: str, value: float) -> str:
    return format(value, form)


def _workers(found: Json) -> ShownTable:
    sides = [(row["spent"][i] or {}) | {"worker": row["worker"], "run": i + 1, "busy": row["busy"][i]}
             for row in found["workers"] for i in (0, 1) if row["busy"][i] is not None]  # fmt: skip
    kinds = [kind for kind in SPENT if any(side.get(kind, 0) >= 0.005 for side in sides)]
    columns = [Column("worker", "worker", COUNT), Column("run", "run", COUNT)]
    columns += [Column(kind, kind, _PERCENT, spare=int(kind in RARE)) for kind in ("busy", *kinds)]
    return ShownTable(columns, sides)


def _change(pair: list[Any]) -> str:
    return f"× {pair[1] / pair[0]:.3g}" if None not in pair and pair[0] > 0 and pair[1] > 0 else ""
