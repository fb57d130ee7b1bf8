"""`fxpipe diff`: what differs between two builds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from fxpipe.cli.command import Command
from fxpipe.cli.output import echo, new_console, print_sections, put
from fxpipe.errors import listed
from fxpipe.inspection.table import NAMES, SIZE, TEXT, TIME, WORKERS, Column, Json, ShownTable, described_links, plural
from fxpipe.inspection.tables import WORKER, way
from fxpipe.planner.links import Links, matrix

SIDES = ("first", "second")
NAMED = 12
"""The most names of one kind that are printed."""


@click.command("diff", cls=Command)
@click.argument("first", metavar="BUILD1", type=click.Path())
@click.argument("second", metavar="BUILD2", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with all differences, however small.")
def diff_command(first: str, second: str, as_json: bool) -> int:
    """Show what differs between two builds.

    Shows settings; modules whose forward or backward moved to another worker; each worker's time, memory and messages;
    edges that were added or removed; parameters; the model's sources and the code of the stages, including edits.
    Times that differ by less than 2% are shown only with --json. The exit code is 0 whether or not the builds differ.

    \b
    fxpipe diff build/ other/
    fxpipe diff build/ other/ --json
    """
    from fxpipe.inspection.difference import difference_of_folders

    changes = difference_of_folders(Path(first), Path(second))
    put(changes, as_json, describe)
    return 0


def describe(changes: Json) -> None:
    """Print what `fxpipe.inspection.difference` found, in words and small tables."""
    from fxpipe.inspection.difference import TIMES

    echo(f"{changes['first']} → {changes['second']}")
    sections: dict[str, ShownTable | list[str]] = {
        "settings": list(_settings(changes)),
        "cuts": list(_moved(changes)),
        "workers: F and B of a microbatch, the rest of a minibatch": _workers(changes),
        "edges": _edges(changes),
        "parameters": list(_parameters(changes)),
        "files": list(_files(changes)),
        "as a whole": list(_whole(changes)),
    }
    print_sections(sections, new_console())
    if changes["identical"]:
        times = any(set(TIMES) & set(worker["changed"]) for worker in changes["workers"])
        echo("\nthe builds are identical" + (", but for the times" if times else ""))


def _settings(changes: Json) -> Iterator[str]:
    for row in changes["settings"]:
        one, two = (_value_text(row["name"], row[side]) for side in SIDES)
        yield f"{row['name'].replace('_', ' ')}: {one} → {two}"
    for worker in changes["workers"]:
        if worker["first"] and worker["second"] and "engines" in worker["changed"]:
            one, two = (listed(worker[side]["engines"]) for side in SIDES)
            yield f"engines of worker {worker['worker']}: {one} → {two}"


def _value_text(name: str, value: Any) -> str:
    if name == "links":
        numbers: Json = {key: matrix(v) if isinstance(v, list) else float(v) for key, v in value.items()}
        links = Links(**numbers)
        return f"{described_links(links)}, {1e9 * links.copy:.3g} ns a byte to copy"
    return (", ".join(f"{speed:g}" for speed in value) or "all equal") if name == "speeds" else str(value)


def _moved(changes: Json) -> Iterator[str]:
    words = {"forward": "F", "backward": "B", "weights": "W"}
    for row in changes["moved"]:
        first, *_, last = row["modules"] * 2
        units = first if first == last else f"{first} … {last}"
        way = f"{words[row['phase']]} from worker {row['from']} to {row['to']}"
        yield f"{way}: {units} ({plural(row['units'], 'unit')}, {row['ms']:.3g} ms)"


def _workers(changes: Json) -> ShownTable:
    """Two rows for each worker that differs: in the first build and in the second."""
    from fxpipe.inspection.difference import BYTES, TIMES

    rows = [
        {"worker": worker["worker"], "build": side, **(worker[side] or {})}
        for worker in changes["workers"]
        if {*TIMES, *BYTES} & set(worker["changed"])
        for side in SIDES
    ]
    names = dict(zip((*TIMES, *BYTES), ("F", "B", "update", "memory", "in", "out"), strict=True))
    columns = [Column(title, name, TIME if name in TIMES else SIZE) for name, title in names.items()]
    return ShownTable([WORKER, Column("build", "build", TEXT), *columns], rows)


def _edges(changes: Json) -> ShownTable:
    columns = (
        Column("edge", way, WORKERS), Column("kind", "kind", TEXT),
        Column("gone", "went", NAMES), Column("new", "came", NAMES), Column("changed", "changed", NAMES),
        Column("before", "before", SIZE), Column("after", "after", SIZE),
    )  # fmt: skip
    return ShownTable(columns, changes["edges"])


def _parameters(changes: Json) -> Iterator[str]:
    for side in SIDES:
        if names := changes["parameters"][side]:
            yield f"only in {changes[side]}: {listed(names)}"
    for row in changes["owners"]:
        count = plural(len(row["names"]), "parameter")
        yield f"owner from worker {row['from']} to {row['to']}: {listed(row['names'], NAMED)} ({count})"
    if changes["weights"]:
        yield "the initial weights differ"


def _files(changes: Json) -> Iterator[str]:
    for title, group in (("the model's sources", changes["sources"]), ("the stages' code", changes["code"])):
        if group["changed"]:
            yield f"{title} differ{'s' if title.endswith('code') else ''}: {listed(group['changed'])}"
        for side in SIDES:
            if group[side]:
                yield f"{title}, only in {changes[side]}: {listed(group[side])}"
    for side, edited, stale in zip(SIDES, changes["edited"], changes["stale"], strict=True):
        if edited:
            yield f"edited in {changes[side]}: {listed(edited)}"
        if stale:
            yield f"{changes[side]} is stale: {listed(stale)}"


def _whole(changes: Json) -> Iterator[str]:
    for name in ("units", "nodes"):
        one, two = changes[name]
        if one != two:
            yield f"{name} {one} → {two}"
    one, two = (f"{share:.3f}" for share in changes["balance"])
    if one != two:
        yield f"balance {one} → {two} (the mean worker's time over the slowest's)"
    if None in changes["forecast"]:
        return
    rates, bubbles = ([f[name] for f in changes["forecast"]] for name in ("samples_per_second", "bubble"))
    if all(rates) and f"{rates[0]:.1f}" != f"{rates[1]:.1f}":
        gain = f"{100 * (rates[1] / rates[0] - 1):+.1f}".replace("-", "−")
        yield (
            f"forecast {rates[0]:.1f} → {rates[1]:.1f} samples/s ({gain} %), "
            f"bubble {100 * bubbles[0]:.0f} → {100 * bubbles[1]:.0f} %"
        )
