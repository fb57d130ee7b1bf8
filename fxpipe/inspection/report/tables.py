"""The page's tables: each is its columns and the rows that they read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from fxpipe.inspection.report import formats as form
from fxpipe.inspection.report.marks import MARKS, chip

Json = dict[str, Any]

ROWS = 10_000
"""Of more rows than this, every n-th is shown."""

PARTS = {
    "F": "forward_ms", "B": "backward_ms", "W": "weight_ms", "update": "update_ms", "recompute": "recompute_ms",
    "exposed": "exposed_ms",
}  # fmt: skip
"""What a worker's load in `partitions` is made of: its mark, its key."""


@dataclass(frozen=True)
class Column:
    """A column: the key of its value in a row, `spent.F` for a key within a key, and how that is written.

    Attributes:
        kind: the class of its cells; "n" for numbers.
    """

    label: str
    key: str
    written: Callable[[Any], Markup | str] = form.number
    kind: str = "n"
    title: str | None = None

    def cell(self, row: Json) -> str:
        value: Any = row
        for key in self.key.split("."):
            value = None if value is None else value.get(key)
        return f'<td class="{self.kind}">{escape(self.written(value))}</td>'


def plain(label: str, key: str) -> Column:
    """A column of words that are not broken."""
    return Column(label, key, form.text, "nobreak")


def mono(label: str, key: str) -> Column:
    """A column of names, which may be broken anywhere."""
    return Column(label, key, form.text, "name mono")


def units(label: str, key: str) -> Column:
    """A column of ranges of units."""
    return Column(label, key, form.span, "nobreak")


def counted(label: str, key: str) -> Column:
    """A column of whole numbers."""
    return Column(label, key, form.count)


def sized(label: str, key: str) -> Column:
    """A column of bytes."""
    return Column(label, key, form.size)


WORKER = Column("worker", "worker", chip, "nobreak")


def table(caption: str, columns: Sequence[Column], rows: Sequence[Json]) -> Markup:
    """A table that scrolls within itself if it is wide."""
    th = Markup('<th scope="col" class="{}" title="{}">{}</th>')
    heads = Markup("").join(th.format("n" if c.kind == "n" else "", c.title or "", c.label) for c in columns)
    step = -(-len(rows) // ROWS)
    shown = rows[:: max(1, step)]
    body = Markup("\n".join(f"<tr>{''.join(column.cell(row) for column in columns)}</tr>" for row in shown))
    words = f"Of {form.count(len(rows))} rows one in {step} is shown; inspect --json has all."
    more = Markup('<p class="quiet">{}</p>').format(words) if step > 1 else ""
    return Markup(
        '<div class="scroll" tabindex="0" role="region" aria-label="{0}"><table><caption class="unseen">{0}</caption>'
        "<thead><tr>{1}</tr></thead>\n<tbody>{2}</tbody></table>{3}</div>"
    ).format(caption, heads, body, more)


def edges(rows: Sequence[Json]) -> Markup:
    def end(edge: Json, side: str) -> Markup:
        return Markup("{}{}").format(chip(edge[side]), edge[f"{side}_phase"])

    columns = [
        mono("name", "name"), plain("kind", "kind"), plain("from", "from"), plain("to", "to"),
        Column("shape", "shape", form.dims, "mono"), Column("dtype", "dtype", form.text, "mono"),
        sized("bytes", "bytes"), mono("module", "module"), mono("line", "source"),
    ]  # fmt: skip
    return table("Edges", columns, [edge | {"from": end(edge, "src"), "to": end(edge, "dst")} for edge in rows])


def modes(partitions: Sequence[Json]) -> Markup:
    columns = [
        plain("cuts", "cuts"), Column("slowest worker", "bottleneck_ms", form.ms),
        Column("ideal", "ideal_ms", form.ms), Column("efficiency", "efficiency", form.share),
        Column("proved best", "exact", form.yes, ""),
    ]  # fmt: skip
    chosen = Markup("{} <strong>✓ chosen</strong>")
    rows = [p | {"cuts": chosen.format(p["mode"]) if p["chosen"] else p["mode"]} for p in partitions]
    return table("Modes of cuts", columns, rows)


def schedules(rows: Sequence[Json]) -> Markup:
    columns = [
        plain("schedule", "schedule"), counted("microbatches", "microbatches"), plain("cuts", "cuts"),
        counted("stale updates", "staleness"), Column("minibatch", "milliseconds", form.ms),
        Column("bubble", "bubble", form.share), sized("memory", "memory_bytes"), Column("why", "why", form.text, ""),
    ]  # fmt: skip
    return table("Schedules that were compared", columns, list(map(_compared, rows)))


def _compared(row: Json) -> Json:
    """A schedule's row; of one that cannot be, there are no numbers."""
    row = row | {"why": row["why"] or Markup("<strong>✓ taken</strong>")}
    if row["seconds"] is None:
        nothing = dict.fromkeys(("milliseconds", "bubble", "staleness"))
        return row | nothing | {"schedule": row["schedule"] or "all", "memory_bytes": row["enough_bytes"]}
    return row | {"milliseconds": 1e3 * row["seconds"]}


def balance(partitions: Sequence[Json]) -> Markup:
    columns = [
        plain("cuts", "mode"), WORKER, *(Column(MARKS[mark].name, part) for mark, part in PARTS.items()),
        Column("total ms", "total_ms"), sized("memory", "memory_bytes"),
    ]  # fmt: skip
    loads = [load | {"mode": p["mode"], "worker": w} for p in partitions for w, load in enumerate(p["workers"])]
    return table("Balance", columns, loads)


def spans(name: str, rows: Sequence[Sequence[Any]]) -> Markup:
    columns = [
        WORKER, plain("what", "what"), counted("minibatch", "minibatch"), counted("microbatch", "microbatch"),
        Column("start, s", "start", form.moment), Column("end, s", "end", form.moment),
    ]  # fmt: skip
    return table(f"Spans, {name}", columns, [dict(zip([c.key for c in columns], row, strict=True)) for row in rows])


def memory(rows: Sequence[Json]) -> Markup:
    columns = [WORKER, sized("most", "most"), counted("changes", "changes")]
    peaks = [{"worker": m["worker"], "most": max(m["bytes"]), "changes": len(m["bytes"])} for m in rows]
    return table("Peak memory", columns, peaks)


def steps(metrics: dict[str, list[Any]], named: dict[str, list[Any]] | None = None) -> Markup:
    names = ("loss", "lr", "grad_norm", "loss_scale", "seconds", "samples_per_second")
    known = [name for name in names if any(v is not None for v in metrics.get(name, ()))]
    columns = [counted("step", "step"), *(Column(name.replace("_", " "), name) for name in known)]
    named = named or {}
    keys = {f"own_{i}": name for i, name in enumerate(named)}  # names may have dots
    columns += [Column(name, key) for key, name in keys.items()]
    whole = metrics | {key: named[name] for key, name in keys.items()}
    return table("Steps", columns, _rows(whole, ["step", *known, *keys]))


def spent(workers: Sequence[Json], kinds: Sequence[str]) -> Markup:
    columns = [
        Column("seconds of worker", "worker", chip, "nobreak"), Column("all", "seconds", form.clock),
        *(Column(kind, f"spent.{kind}", form.clock) for kind in kinds),
    ]  # fmt: skip
    return table("Seconds of the workers", columns, workers)


def paces(workers: Sequence[Json]) -> Markup:
    columns = [
        Column("a minibatch of worker", "worker", chip, "nobreak"), Column("busy", "busy", form.share),
        Column("F ms", "forward_ms"), Column("B ms", "backward_ms"), Column("wait ms", "wait_ms"),
        Column("engines", "engines", form.listed, "name"),
    ]  # fmt: skip
    return table("Minibatches of the workers", columns, workers)


def waits(rows: Sequence[Json]) -> Markup:
    columns = [
        WORKER, Column("waited for", "what", form.text, "name"), Column("from", "from", chip, ""),
        Column("seconds", "seconds", form.clock),
    ]  # fmt: skip
    return table("What the workers waited for", columns, rows)


def staleness(rows: Sequence[Json]) -> Markup:
    columns = [
        WORKER, Column("parameter group", "group", form.count, title="of the optimizer, counted from 0"),
        counted("updates behind", "stale"), counted("predicted", "ahead"), counted("minibatches", "samples"),
        Column("RMSE", "rmse", title="root mean square of the difference"), Column("RMS of the weights", "rms"),
    ]  # fmt: skip
    return table("Staleness", columns, rows)


def work(workers: Sequence[Json]) -> Markup:
    edited = Markup('{} <span class="quiet">edited</span>')
    rows = [w | {"mark": edited.format(chip(w["worker"])) if w["edited"] else chip(w["worker"])} for w in workers]
    uneven = any((w["speed"] or 1) != 1 for w in workers)
    shared = any(w["rank"] != w["worker"] for w in workers)
    columns = [
        plain("worker", "mark"), *([counted("process", "rank")] if shared else []),
        mono("forward from", "forward_from"), units("units", "forward_units"),
        mono("backward from", "backward_from"), units("units", "backward_units"),
        units("W units", "weight_units"), Column("F ms", "forward_ms"), Column("B ms", "backward_ms"),
        Column("update ms", "update_ms"), Column("engines", "engines", form.listed, "name"),
        *([Column("speed", "speed")] if uneven else []), mono("file", "file"),
    ]  # fmt: skip
    return table("Work of the workers", columns, rows)


def holdings(workers: Sequence[Json]) -> Markup:
    columns = [
        WORKER, counted("owned", "owned"), sized("owned bytes", "owned_bytes"),
        counted("copies", "copies"), sized("bytes of copies", "copy_bytes"),
        sized("in, a minibatch", "bytes_in"), sized("out, a minibatch", "bytes_out"),
        sized("saved, a microbatch", "saved_bytes"), counted("in flight", "in_flight"),
        sized("memory", "memory_bytes"),
    ]  # fmt: skip
    return table("Parameters, messages and memory of the workers", columns, workers)


def parameters(workers: Sequence[Json]) -> Markup:
    columns = [
        WORKER, Column("owns", "owned_names", form.listed, "name mono"),
        Column("keeps copies of", "copy_names", form.listed, "name mono"),
    ]  # fmt: skip
    return table("Parameters by worker", columns, workers)


def _rows(columns: Json, names: Sequence[str]) -> list[Json]:
    return [dict(zip(names, row, strict=True)) for row in zip(*(columns[name] for name in names), strict=True)]
