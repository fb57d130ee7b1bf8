"""`fxpipe compare`: two runs side by side, or several in a table."""

from __future__ import annotations

import os
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import click

from fxpipe.cli.command import Command
from fxpipe.cli.output import echo, new_console, note, print_columns, print_sections, print_text, put, warn
from fxpipe.inspection.run_comparison import SMOOTH, Pair, comparison, run_table
from fxpipe.inspection.table import (
    COUNT,
    NONE,
    TEXT,
    WRITTEN,
    Column,
    Json,
    Kind,
    ShownTable,
    digits,
    or_dash,
    text,
    within,
)
from fxpipe.observe.rates import RATES
from fxpipe.observe.trace import OF_TRAINING

SPENT = (*OF_TRAINING, "other")
"""Columns of the workers' table."""

NAMED = {"samples": "batch size"}
"""Settings that the table shows under another name."""

RARE = ("save",)
"""Columns that are left out first if the table is too wide."""


@click.command("compare", cls=Command)
@click.argument("folders", metavar="RUN RUN [RUN…]", nargs=-1, type=click.Path())
@click.option("--seeds", is_flag=True, help="One row for runs that differ only in the seed: mean and deviation.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def compare_command(folders: tuple[str, ...], seeds: bool, as_json: bool) -> int:
    """Compare runs: settings, speed, loss, and where their time went.

    Each RUN is the --out folder of an `fxpipe run`. The builds may differ. For two runs, losses are compared at the end
    and after the same training time. A loss is the mean of the last 20 steps, or of all if there are fewer; so is the
    one that `fxpipe run` prints at its end. Three or more runs, or any with --seeds, become one table of the settings
    that differ and the results. A warning names what a folder lacks, for example because the run was stopped.

    \b
    fxpipe compare out/ other/
    fxpipe compare runs/async runs/gpipe --json
    fxpipe compare out/ other/ runs/async runs/gpipe
    """
    from fxpipe.observe.run_folder import read_run

    if len(folders) < 2:
        raise click.UsageError("give two runs or more")
    runs = [read_run(folder) for folder in folders]
    for run in runs:
        for problem in run["problems"]:
            warn(f"{run['folder']}: {problem}")
    if len(folders) > 2 or seeds:
        put(run_table(runs, seeds=seeds), as_json, partial(_print_table, seeds))
    else:
        put(comparison(*runs), as_json, describe)
    return 0


def _print_table(seeds: bool, table: Json) -> None:
    """A row for each run; with `seeds`, one for runs that differ only in the seed."""
    named = {name: NAMED.get(name, name.removeprefix("setting ").replace("_", " ")) for name in table["settings"]}
    columns = [Column(title, partial(within, "settings", name), TEXT) for name, title in named.items()]
    columns += [Column("seeds", lambda row: len(row["seeds"]), COUNT)] if seeds else []
    titles = {"samples_per_second": "samples/s"}
    columns += [
        Column(titles.get(name, name), partial(within, "outcomes", name), _SPREAD, spare=int(name == "seconds"))
        for name in table["outcomes"]
    ]
    if not seeds:
        shared = os.path.commonpath([Path(row["runs"][0]).absolute().parent for row in table["rows"]])
        columns.append(Column("run", lambda row: os.path.relpath(row["runs"][0], shared), TEXT))
    print_columns(ShownTable(columns, table["rows"]))
    if seeds and any(row["outcomes"]["loss"][1] == 0 for row in table["rows"]):
        note(
            "± 0: a run's seed changes only the order of data and random numbers, such as dropout's; "
            "the initial weights are the build's (fxpipe compile --seed)"
        )


def _spread(pair: Pair) -> str:
    """A mean with its deviation, as text."""
    middle, deviation = pair
    if middle is None:
        return NONE
    return digits(middle) if deviation is None else f"{digits(middle)} ± {digits(deviation)}"


def describe(comparison: Json) -> None:
    """Print what `fxpipe.inspection.run_comparison` found: small tables, then the verdict."""
    console = new_console()
    for number, folder in enumerate(comparison["runs"], start=1):
        echo(f"run {number}  {folder}")
    if not comparison["settings"]:
        echo("\nno setting differs")
    sections: dict[str, ShownTable | list[str]] = {
        "settings that differ": _settings(comparison),
        "speed and outcome": _speed(comparison),
        "the workers' time, % of each one's run": _workers(comparison),
    }
    for number, rows in enumerate(comparison["time_losses"], start=1):
        sections[f"where run {number} lost time"] = [f"- {row['text']}" for row in rows]
    print_sections(sections, console)
    echo()
    for sentence in comparison["verdict"]:
        print_text(console, sentence)


_LOSS = Kind(or_dash(lambda value: f"{value:#.4g}"))
_PERCENT = Kind(or_dash(lambda share: f"{100 * share:.0f}"))
_SIDE = Kind(text, elastic=True)
_SPREAD = Kind(_spread)


def _settings(comparison: Json) -> ShownTable:
    rows = [(NAMED.get(name, name.replace("_", " ")), *pair) for name, pair in comparison["settings"].items()]
    return ShownTable([Column("", itemgetter(0), TEXT), *_runs()], rows)


def _runs() -> list[Column]:
    return [Column(f"run {i}", itemgetter(i), _SIDE) for i in (1, 2)]


def _speed(comparison: Json) -> ShownTable:
    percent = or_dash(lambda share: f"{100 * share:.0f} %")
    speed, loss = comparison["speed"], comparison["loss"]
    rows = [
        *((noun, speed[name], or_dash(f"{{:{form}}}".format)) for name, (noun, form) in RATES.items()),
        ("median step", speed["step_ms"], or_dash(lambda ms: f"{ms:.3g} ms")),
        ("of the forecast", speed["efficiency"], percent),
        ("bubble", speed["bubble"], percent),
        ("seconds", speed["seconds"], or_dash(lambda seconds: f"{seconds:.1f}")),
        ("final loss", loss["raw"], _LOSS.write),
        (f"mean of last {SMOOTH}", loss["smoothed"], _LOSS.write),
        *((f"held out {name}", pair, _LOSS.write) for name, pair in comparison["evaluation"].items()),
    ]
    cells = [(name, *map(write, pair), _change(pair)) for name, pair, write in rows if pair != [None, None]]
    return ShownTable([Column("", itemgetter(0), TEXT), *_runs(), Column("2 to 1", itemgetter(3), WRITTEN)], cells)


def _workers(comparison: Json) -> ShownTable:
    sides = [(row["spent"][i] or {}) | {"worker": row["worker"], "run": i + 1, "busy": row["busy"][i]}
             for row in comparison["workers"] for i in (0, 1) if row["busy"][i] is not None]  # fmt: skip
    kinds = [kind for kind in SPENT if any(side.get(kind, 0) >= 0.005 for side in sides)]
    columns = [Column("worker", "worker", COUNT), Column("run", "run", COUNT)]
    columns += [Column(kind, kind, _PERCENT, spare=int(kind in RARE)) for kind in ("busy", *kinds)]
    return ShownTable(columns, sides)


def _change(pair: list[Any]) -> str:
    return f"× {pair[1] / pair[0]:.3g}" if None not in pair and pair[0] > 0 and pair[1] > 0 else ""
