"""`fxpipe diff`: what differs between two builds."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from fxpipe.cli.output import echo, emit_json, size

from fxpipe.errors import listed

Json = dict[str, Any]

WIDTH = 80
WAYS = 12
"""The most connections between workers that are shown for one kind of edges."""

NAMED = 3
"""The most edges of one connection that are named."""

MODULES = 12
"""The most modules of one connection that are named."""

COLUMNS = {
    "forward_ms": "F",
    "backward_ms": "B",
    "update_ms": "update",
    "memory_bytes": "memory",
    "bytes_in": "in",
    "bytes_out": "out",
}
"""The columns of the table of workers, by their names in the facts."""

LINKS = {
    "bandwidth": ("bandwidth of the links", "GB/s", 1e-9),
    "latency": ("latency of the links", "µs", 1e6),
    "copy": ("copying of messages", "ns a byte", 1e9),
}
"""The properties of links, by their names in the facts: title, unit, and the factor from the fact's unit to it."""


@click.command("diff")
@click.argument("first", metavar="BUILD1", type=click.Path())
@click.argument("second", metavar="BUILD2", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: all that is said, and all that is not.")
def diff_command(first: str, second: str, as_json: bool) -> int:
    """Say what differs between two builds.

    Shows settings; modules that moved between workers, forward and backward; what every worker takes, holds and sends;
    edges that were added or removed; parameters; the model's sources and the code of the stages, including edits.
    Differences of less than 2% between times are shown only with --json. The exit code is 0 whether or not the builds
    differ.

    \b
    fxpipe diff build/ other/
    fxpipe diff build/ other/ --json
    """
    from fxpipe.inspection.difference import between

    found = between(Path(first), Path(second))
    if as_json:
        emit_json(found)
    else:
        echo(describe(found), nl=False)
    return 0


def describe(found: Json) -> str:
    """Print what `fxpipe.inspection.difference` found, in words and small tables, for 80 columns."""
    lines = [f"{found['first']} → {found['second']}"]
    sections: list[tuple[str, Iterable[str]]] = [
        ("settings", _setting_lines(found)),
        ("cuts", _moved_lines(found)),
        ("workers: F and B of a microbatch, the rest of a minibatch", _worker_lines(found)),
        ("edges, bytes a microbatch", _edge_lines(found)),
        ("parameters", _parameter_lines(found)),
        ("files", _file_lines(found)),
        ("as a whole", _whole_lines(found)),
    ]
    for title, body in sections:
        told = list(body)
        if told:
            lines += ["", title, *told]
    if found["identical"]:
        lines += ["", "the builds are identical" + (", but for the times" if _times_differ(found) else "")]
    return "\n".join(lines) + "\n"


def _setting_lines(found: Json) -> Iterator[str]:
    rows: list[tuple[str, Any, Any]] = []
    for row in found["settings"]:
        if row["name"] == "links":
            rows += _link_rows(row["first"], row["second"])
        else:
            name, write = _WRITTEN.get(row["name"], (row["name"].replace("_", " "), _said))
            rows.append((name, write(row["first"]), write(row["second"])))
    for worker in found["workers"]:
        if worker["first"] and worker["second"] and "engines" in worker["changed"]:
            one, two = (", ".join(worker[side]["engines"]) for side in ("first", "second"))
            rows.append((f"engines of worker {worker['worker']}", one, two))
    width = max((len(name) for name, *_ in rows), default=0)
    for name, one, two in rows:
        yield f"  {name:<{width}}  {_said(one)} → {_said(two)}"


def _link_rows(one: Json, two: Json) -> Iterator[tuple[str, str, str]]:
    """What differs in bandwidth, latency and copying."""
    for name, (title, unit, factor) in LINKS.items():
        if one[name] != two[name]:
            yield title, _link_text(one[name], unit, factor), _link_text(two[name], unit, factor)


def _link_text(value: Any, unit: str, factor: float) -> str:
    """`3 GB/s`; of a matrix the smallest and the largest entry between two workers."""
    if not isinstance(value, list):
        return f"{float(value) * factor:.4g} {unit}"
    numbers = [float(v) * factor for i, row in enumerate(value) for j, v in enumerate(row) if i != j]
    if not numbers:
        return "none"
    least, most = min(numbers), max(numbers)
    return f"{least:.4g} {unit}" if least == most else f"{least:.4g} to {most:.4g} {unit} by pair"


def _moved_lines(found: Json) -> Iterator[str]:
    words = {"forward": "F", "backward": "B", "weights": "W"}
    for row in found["moved"]:
        cost = "" if row["ms"] is None else f", {row['ms']:.3g} ms"
        count = f"{row['units']} unit{'s' if row['units'] > 1 else ''}{cost}"
        head = f"  {words[row['phase']]} from worker {row['from']} to {row['to']}: "
        yield from _wrapped(head, f"{listed(row['modules'], MODULES)} ({count})")


def _worker_lines(found: Json) -> Iterator[str]:
    changed = [w for w in found["workers"] if COLUMNS.keys() & set(w["changed"])]
    if not changed:
        return
    columns = [["", *(f"worker {w['worker']}" for w in changed)]]
    columns += [_column(name, changed) for name in COLUMNS if any(name in w["changed"] for w in changed)]
    widths = [max(map(len, column)) for column in columns]
    for first, *cells in zip(*columns, strict=True):
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        yield "  " + "  ".join([first.ljust(widths[0]), *numbers])
    rest = len(found["workers"]) - len(changed)
    if rest:
        yield f"  the other {f'{rest} workers' if rest > 1 else 'worker'}: no change"


def _column(name: str, workers: Sequence[Json]) -> list[str]:
    """A quantity of these workers, in the unit that suits its largest value."""
    pairs = [[None if w[side] is None else w[side][name] for side in ("first", "second")] for w in workers]
    units = {"µs": 1e-3, "ms": 1.0} if name.endswith("_ms") else {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    greatest = max((value for pair in pairs for value in pair if value is not None), default=0)
    unit = next((u for u in reversed(units) if greatest >= units[u]), next(iter(units)))

    def write(value: float | None) -> str:
        return "–" if value is None else _number(value / units[unit])

    cells = [
        f"{write(one)}→{write(two)}" if name in w["changed"] else write(two)
        for w, (one, two) in zip(workers, pairs, strict=True)
    ]
    return [f"{COLUMNS[name]} {unit}", *cells]


def _edge_lines(found: Json) -> Iterator[str]:
    for kind, row in found["edges"].items():
        if not (row["came"] or row["went"] or row["changed"]):
            continue
        one, two = (f"{count} ({size(total)})" for count, total in (row["first"], row["second"]))
        yield f"  {kind}: {one} → {two}"
        told = [*_ways("−", row["went"]), *_ways("+", row["came"]), *_resized(row["changed"])]
        for head, text in told[:WAYS]:
            yield from _wrapped(head, text)
        if len(told) > WAYS:
            yield f"    … and {len(told) - WAYS} more ways"


def _ways(sign: str, edges: Sequence[Json]) -> Iterator[tuple[str, str]]:
    """Edges by connection: `− worker 0 F to 1 B: ` and what was sent there."""
    ways: dict[str, list[Json]] = {}
    for edge in edges:
        ways.setdefault(_way(edge), []).append(edge)
    for way, found in ways.items():
        total = size(sum(edge["bytes"] for edge in found))
        yield f"    {sign} {way}: ", f"{_carried(found)} ({total})"


def _resized(pairs: Sequence[Json]) -> Iterator[tuple[str, str]]:
    ways: dict[str, list[Json]] = {}
    for pair in pairs:
        ways.setdefault(_way(pair["first"]), []).append(pair)
    for way, found in ways.items():
        before, now = ([pair[side] for pair in found] for side in ("first", "second"))
        one, two = (size(sum(edge["bytes"] for edge in edges)) for edges in (before, now))
        sizes = f"{one} → {two}" if one != two else f"{one} as before"
        names = [_carried(edges) for edges in (before, now)]
        types = [dict.fromkeys(_type(edge) for edge in edges) for edges in (before, now)]
        if types[0] != types[1]:
            sizes += f", {listed(list(types[0]), NAMED)} → {listed(list(types[1]), NAMED)}"
        yield f"    ± {way}: ", f"{' → '.join(dict.fromkeys(names))} ({sizes})"


def _type(edge: Json) -> str:
    """`float32[4, 8]`."""
    return f"{edge['dtype']}[{', '.join(map(str, edge['shape']))}]" if edge["kind"] != "weights" else edge["dtype"]


def _carried(edges: Sequence[Json]) -> str:
    """What travels: values by their names, weights by their number."""
    if edges[0]["kind"] == "weights":
        count = sum(len(edge["names"]) for edge in edges)
        return f"{count} parameter{'s' if count > 1 else ''}"
    return listed([str(edge["name"]).partition(":")[0] for edge in edges], NAMED)


def _way(edge: Json) -> str:
    src, dst = ("" if edge[end] == "update" else f" {' and '.join(edge[end])}" for end in ("src_phase", "dst_phase"))
    return f"worker {edge['src']}{src} to {edge['dst']}{dst}"


def _parameter_lines(found: Json) -> Iterator[str]:
    for side in ("first", "second"):
        names = found["parameters"][side]
        if names:
            yield from _wrapped(f"  only in {found[side]}: ", listed(names))
    for row in found["owners"]:
        count = f"{len(row['names'])} parameter{'s' if len(row['names']) > 1 else ''}"
        head = f"  owner from worker {row['from']} to {row['to']}: "
        yield from _wrapped(head, f"{listed(row['modules'], MODULES)} ({count})")
    if found["weights"]:
        yield "  the initial weights differ"


def _file_lines(found: Json) -> Iterator[str]:
    for title, group in (("the model's sources", found["sources"]), ("the stages' code", found["code"])):
        if group["changed"]:
            yield from _wrapped(f"  {title} differ{'s' if title.endswith('code') else ''}: ", listed(group["changed"]))
        for side in ("first", "second"):
            if group[side]:
                yield from _wrapped(f"  {title}, only in {found[side]}: ", listed(group[side]))
    for side, edited, stale in zip(("first", "second"), found["edited"], found["stale"], strict=True):
        if edited:
            yield from _wrapped(f"  edited in {found[side]}: ", listed(edited))
        if stale:
            yield from _wrapped(f"  {found[side]} is stale: ", listed(stale))


def _whole_lines(found: Json) -> Iterator[str]:
    for name in ("units", "nodes"):
        one, two = found[name]
        if one != two:
            yield f"  {name:<8}  {_said(one)} → {_said(two)}"
    one, two = ("" if share is None else f"{share:.3f}" for share in found["balance"])
    if one and two and one != two:
        yield f"  balance   {one} → {two} (the mean worker's time over the slowest's)"
    if None in found["forecast"]:
        return
    rates, bubbles = ([f[name] for f in found["forecast"]] for name in ("samples_per_second", "bubble"))
    if all(rates) and f"{rates[0]:.1f}" != f"{rates[1]:.1f}":
        gain = f"{100 * (rates[1] / rates[0] - 1):+.1f}".replace("-", "−")
        yield (
            f"  forecast  {rates[0]:.1f} → {rates[1]:.1f} samples/s ({gain} %), "
            f"bubble {100 * bubbles[0]:.0f} → {100 * bubbles[1]:.0f} %"
        )


def _times_differ(found: Json) -> bool:
    return any(name.endswith("_ms") for worker in found["workers"] for name in worker["changed"])


def _number(value: float) -> str:
    """Three digits, or fewer for a small value among larger ones."""
    return f"{value:.{0 if value >= 100 or value == int(value) else 1 if value >= 10 else 2}f}"


def _said(value: Any) -> str:
    return "none" if value is None else str(value)


def _speeds(speeds: Sequence[float]) -> str:
    return ", ".join(f"{speed:g}" for speed in speeds) or "all equal"


_WRITTEN: dict[str, tuple[str, Callable[[Any], str]]] = {
    "speeds": ("speeds of the workers", _speeds),
    "optimizer_bytes": ("optimizer state", lambda share: f"{share:.3g} times the weights"),
}
"""Settings that are not shown as they are stored."""


def _wrapped(head: str, text: str) -> list[str]:
    deeper = " " * (len(head) - len(head.lstrip()) + 2)
    return textwrap.wrap(
        text, WIDTH, initial_indent=head, subsequent_indent=deeper, break_long_words=False, break_on_hyphens=False
    )
