"""`fxpipe compare`: two runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click
from fxpipe.cli.output import TextColumn, echo, emit_json, print_columns, print_text, stdout_console, warn

from fxpipe.observe.run_comparison import SMOOTH, compare
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
    """Print what `fxpipe.observe.run_comparison` found: small tables, then the verdict."""
    for number, folder in enumerate(found["runs"], start=1):
        echo(f"run {number}  {folder}")
    settings = found["settings"]
    if settings:
        echo("\nsettings that differ")
        words = [[_said(value) for value in pair] for pair in settings.values()]
        _side_by_side(console, [NAMED.get(name, name.replace("_", " ")) for name in settings], words)
    else:
        echo("\nno setting differs")
    _print_speed(found, console)
    _print_workers(found, console)
    for number, rows in enumerate(found["time_losses"], start=1):
        if rows:
            echo(f"\nwhere run {number} lost time")
        for row in rows:
            print_text(console, f"- {row['text']}")
    echo()
    for sentence in found["verdict"]:
        print_text(console, sentence)


def _print_speed(found: Json, console: Console) -> None:
    names = {
        "samples_per_second": ("samples/s", lambda v: f"{v:.1f}"),
        "step_ms": ("median step", lambda v: f"{v:.3g} ms"),
        "efficiency": ("of the forecast", _percent),
        "bubble": ("bubble", _percent),
        "seconds": ("seconds", lambda v: f"{v:.1f}"),
    }
    rows = [(title, found["speed"][name], write) for name, (title, write) in names.items()]
    rows += [("final loss", found["loss"]["raw"], _loss), (f"mean of last {SMOOTH}", found["loss"]["smoothed"], _loss)]
    rows += [(f"held out {name}", pair, _loss) for name, pair in found["evaluation"].items()]
    rows = [row for row in rows if row[1] != [None, None]]
    if rows:
        echo("\nspeed and outcome")
        cells = [[_cell(value, write) for value in pair] for _, pair, write in rows]
        _side_by_side(console, [title for title, _, _ in rows], cells, [_change(pair) for _, pair, _ in rows])


def _print_workers(found: Json, console: Console) -> None:
    rows = [(row, i) for row in found["workers"] for i in (0, 1) if row["busy"][i] is not None]
    if not rows:
        return
    kinds = [kind for kind in SPENT if any((row["spent"][i] or {}).get(kind, 0) >= 0.005 for row, i in rows)]
    echo("\nthe workers' time, % of each one's run")
    columns = [TextColumn(name, right=True, spare=int(name in RARE)) for name in ("worker", "run", "busy", *kinds)]
    cells = []
    for row, i in rows:
        shares = (row["busy"][i], *((row["spent"][i] or {}).get(kind) for kind in kinds))
        cells.append([str(row["worker"]), str(i + 1), *(_cell(share, lambda v: f"{100 * v:.0f}") for share in shares)])
    print_columns(columns, cells, console)


def _side_by_side(
    console: Console, names: list[str], cells: Sequence[Sequence[str]], changes: list[str] | None = None
) -> None:
    columns = [TextColumn(""), *(TextColumn(f"run {i}", right=True, elastic=True) for i in (1, 2))]
    columns += [] if changes is None else [TextColumn("2 to 1", right=True)]
    more = [[] for _ in names] if changes is None else [[change] for change in changes]
    rows = [[name, *pair, *change] for name, pair, change in zip(names, cells, more, strict=True)]
    print_columns(columns, rows, console)


def _change(pair: list[Any]) -> str:
    return f"× {pair[1] / pair[0]:.3g}" if None not in pair and pair[0] > 0 and pair[1] > 0 else ""


def _cell(value: float | None, write: Callable[[float], str]) -> str:
    return "–" if value is None else write(value)


def _said(value: Any) -> str:
    return "–" if value is None else str(value)


def _loss(value: float) -> str:
    return f"{value:#.4g}"


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"
