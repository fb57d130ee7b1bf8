"""The tables of builds and runs: their columns, and the rows of the facts that these read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from fxpipe.errors import listed as named
from fxpipe.inspection.table import (
    CLOCK,
    COUNT,
    MOMENT,
    NAME,
    NAMES,
    NONE,
    SHARE,
    SIZE,
    TEXT,
    TIME,
    WORKERS,
    WRITTEN,
    YES,
    Cell,
    Column,
    Json,
    ShownTable,
    plural,
    within,
)
from fxpipe.observe.rates import RATES
from fxpipe.plan.cost_records import EngineTime

APART = "≠"
"""Marks modules with units whose forward, backward and weight gradients are not all on one worker."""

MANY = 40
"""If a kind has more edges, they are added up by route."""

FEW = 8
"""At most this many inputs and readers of a node are named."""

PARTS = {
    "F": "forward_ms", "B": "backward_ms", "W": "weight_ms", "update": "update_ms", "recompute": "recompute_ms",
    "exposed": "exposed_ms",
}  # fmt: skip
"""The parts of a worker's load in `partitions`: kind of time, and key."""

WORKER = Column("worker", "worker", WORKERS)
_PHASES = {"forward": "F", "backward": "B"}
_DTYPES = {"float": "f", "bfloat": "bf", "uint": "u", "int": "i", "complex": "c"}


def modules(rows: Sequence[Json]) -> ShownTable:
    """Modules: where they run, how long they take, and their parameters. Rows also have a `label`."""
    return ShownTable(
        (
            Column("module", "label", NAME),
            *(Column(f"{letter} on", partial(_runs_on, phase), WORKERS) for phase, letter in _PHASES.items()),
            Column("", lambda m: APART if m["apart"] else "", TEXT),
            *(Column(letter, partial(milliseconds, phase), TIME) for phase, letter in _PHASES.items()),
            Column("parameters", lambda m: m["parameters"] or None, COUNT),
            Column("size", lambda m: m["parameter_bytes"] if m["parameters"] else None, SIZE),
            Column("owned by", lambda m: _ranks(m["owners"], "–"), WORKERS, spare=2),
            Column("nodes", lambda m: m["nodes"] or None, COUNT, spare=1),
        ),
        rows,
        "Modules",
    )


def _runs_on(phase: str, module: Json) -> Cell:
    """Where a module's forward or backward runs: `0`, `0→1` in forward, `0←1` in backward; `0,2` with a gap."""
    return _ranks(sorted({worker for worker, *_ in module[phase]}), "→" if phase == "forward" else "←")


def _ranks(workers: Sequence[int], sign: str) -> Cell:
    if len(workers) > 1 and workers[-1] - workers[0] == len(workers) - 1:
        return workers[0], sign, workers[-1]
    return tuple(piece for worker in workers for piece in (",", worker))[1:] or NONE


def milliseconds(phase: str, module: Json) -> float | None:
    """The time of a module's forward or backward; None if it has none."""
    return sum(ms for _, ms, _ in module[phase]) if module[phase] else None


def workers(facts: Json) -> ShownTable:
    """What every worker computes, owns, holds and sends."""
    rows = facts["workers"]
    shared = any(w["rank"] != w["worker"] for w in rows)
    columns = [
        Column("worker", lambda w: (w["worker"], f" on {w['rank']}" if shared else "", "*" * w["edited"]), WORKERS),
        *(Column(f"{phase} from", partial(_place, phase), NAME, spare=2) for phase in _PHASES),
        Column("F", "forward_ms", TIME), Column("B", "backward_ms", TIME), Column("update", "update_ms", TIME),
        Column("parameters", "owned", COUNT, spare=3), Column("owns", "owned_bytes", SIZE),
        Column("copies", "copies", COUNT, spare=3), Column("copied", "copy_bytes", SIZE, spare=1),
        Column("in", "bytes_in", SIZE), Column("out", "bytes_out", SIZE),
        Column("saved", "saved_bytes", SIZE), Column("in flight", "in_flight", COUNT, spare=2),
        Column("memory", "memory_bytes", SIZE),
    ]  # fmt: skip
    if any(engine != "eager" for w in rows for engine in w["engines"]):
        columns.append(Column("engines", "engines", NAMES, spare=2))
    if any((w["speed"] or 1) != 1 for w in rows):
        columns.append(Column("speed", "speed", spare=2))
    return ShownTable(columns, rows, "Workers")


def _place(phase: str, worker: Json) -> str | None:
    """Where a worker's forward or backward begins; None if it has none."""
    first, end = worker[f"{phase}_units"]
    return f"{worker[f'{phase}_from']} ({plural(end - first, 'unit')})" if first < end else None


def parameters(rows: Sequence[Json]) -> ShownTable:
    """Which parameters each worker owns, and of which it has copies."""
    columns = (WORKER, Column("owns", "owned_names", NAMES), Column("keeps copies of", "copy_names", NAMES))
    return ShownTable(columns, rows, "Parameters by worker")


def edges(rows: Sequence[Json], every: bool = True) -> ShownTable:
    """What crosses between workers, kind by kind: every edge, or one row a route for kinds with more than `MANY`."""
    kinds: dict[str, list[Json]] = {}
    for edge in rows:
        kinds.setdefault(edge["kind"], []).append(edge)
    shown = [row for group in kinds.values() for row in (group if every or len(group) <= MANY else _together(group))]
    columns = [
        Column("edge", way, WORKERS), Column("kind", "kind", TEXT), Column("value", _value, NAME),
        Column("type", _type, NAME), Column("size", "bytes", SIZE),
        *([Column("codec", "codec", TEXT)] if any(edge["codec"] for edge in rows) else []),
        Column("module", "module", NAME, spare=2), Column("line", "source", NAME),
    ]  # fmt: skip
    return ShownTable(columns, shown, "Edges")


def _together(edges: Sequence[Json]) -> list[Json]:
    """Edges of one kind, added up by their route."""
    ways: dict[tuple[Any, ...], list[Json]] = {}
    for edge in edges:
        ways.setdefault(itemgetter("src", "src_phase", "dst", "dst_phase")(edge), []).append(edge)
    rows = []
    for _, (first, *others) in sorted(ways.items()):
        total = {"count": 1 + len(others), "bytes": sum(edge["bytes"] for edge in (first, *others))}
        rows.append(first | {"dtype": None, "module": None, "source": None} | total if others else first)
    return rows


def way(edge: Json) -> Cell:
    """An edge's route: `F0 → B1`, or for weights `update 0 → F1`."""
    before = "update " if edge["src_phase"] == "update" else edge["src_phase"]
    return before, edge["src"], f" → {edge['dst_phase']}", edge["dst"]


def _value(edge: Json) -> str:
    if "count" in edge:
        return f"{edge['count']:,} edges"
    return plural(len(edge["names"]), "parameter") if edge["kind"] == "weights" else str(edge["name"])


def _type(edge: Json) -> str | None:
    """`f32[4, 8]`."""
    if edge["dtype"] is None:
        return None
    long = next((name for name in _DTYPES if edge["dtype"].startswith(name)), "")
    short = _DTYPES.get(long, "") + edge["dtype"].removeprefix(long)
    return str(edge["dtype"]) if edge["kind"] == "weights" else f"{short}[{', '.join(map(str, edge['shape'] or ()))}]"


def nodes(rows: Sequence[Json]) -> ShownTable:
    """Nodes with the columns of `node_table`, and the names of those that each `reads` and is `read_by`."""
    columns = (
        Column("node", "name", NAME), Column("operator", "op", TEXT), Column("type", "type", TEXT),
        Column("on", _on, WORKERS), Column("took", "ms", TIME), Column("size", "bytes", SIZE),
        Column("unit", "unit", COUNT),
        Column("reads", lambda node: named(node["reads"], FEW), NAME),
        Column("is read by", lambda node: named(node["read_by"], FEW), NAME),
        Column("line", lambda node: ": ".join(filter(None, (node["source"], node["text"]))) or None, NAME),
    )  # fmt: skip
    return ShownTable(columns, rows, "Nodes")


def _on(node: Json) -> Cell | None:
    """`F0`; `W1` if the node only makes weight gradients."""
    return None if node["worker"] is None else ("W" if node["weight"] else node["phase"] or "", node["worker"])


def modes(partitions: Sequence[Json]) -> ShownTable:
    """The best cuts of each mode."""
    columns = (
        Column("cuts", lambda p: f"{p['mode']} ✓ chosen" if p["chosen"] else p["mode"], TEXT),
        Column("slowest worker", "bottleneck_ms", TIME), Column("ideal", "ideal_ms", TIME),
        Column("efficiency", "efficiency", SHARE), Column("moved", "moved_bytes", SIZE),
        Column("proved best", "exact", YES),
    )  # fmt: skip
    return ShownTable(columns, partitions, "Modes of cuts")


_PART_NAMES = {"recompute": "again"}
LOADS = (
    *(Column(_PART_NAMES.get(part, part), key, TIME) for part, key in PARTS.items()),
    Column("sum", "total_ms", TIME), Column("memory", "memory_bytes", SIZE),
)  # fmt: skip
"""What a microbatch costs a worker."""


def balance(partitions: Sequence[Json]) -> ShownTable:
    """What a microbatch costs each worker with the best cuts of each mode."""
    loads = [load | {"mode": p["mode"], "worker": w} for p in partitions for w, load in enumerate(p["workers"])]
    return ShownTable((Column("cuts", "mode", TEXT), WORKER, *LOADS), loads, "Balance")


def schedules(rows: Sequence[Json], samples: int | None) -> ShownTable:
    """The schedules that were compared, the best first, and why each other one was not or cannot be chosen.

    Times are per microbatch where the samples of a minibatch are not known.
    """

    def pace(row: Json) -> float:
        return row["seconds"] / (1 if samples else row["microbatches"]) if row["seconds"] else 0.0

    best = next(filter(None, map(pace, rows)), 1.0)
    columns = (
        Column("schedule", lambda row: row["schedule"] or "all", TEXT), Column("microbatches", "microbatches", COUNT),
        Column("cuts", "cuts", TEXT), Column("stale updates", lambda row: row["seconds"] and row["staleness"], COUNT),
        Column("samples/s", lambda row: samples / row["seconds"] if row["seconds"] else None) if samples
        else Column("a microbatch", lambda row: 1e3 * pace(row) or None, TIME),
        Column("time", lambda row: f"{100 * (pace(row) / best - 1):+.1f} %" if row["seconds"] else None, WRITTEN),
        Column("bubble", lambda row: row["seconds"] and row["bubble"], SHARE),
        Column("memory", lambda row: row["enough_bytes"] if row["seconds"] is None else row["memory_bytes"], SIZE),
        Column("why", lambda row: row["why"] or "the one to take", TEXT),
    )  # fmt: skip
    return ShownTable(columns, rows, "Schedules that were compared")


def engines(times: Sequence[EngineTime]) -> ShownTable:
    """The time of each part of a stage on each engine, the chosen one marked."""
    parts: dict[str, Json] = {}
    for time in times:
        seconds = None if time.seconds is None else f"{1e3 * time.seconds:.1f} ms{' ←' if time.chosen else ''}"
        parts.setdefault(time.part, {"": time.part})[time.engine] = seconds
    columns = [Column(name, name, WRITTEN) for name in dict.fromkeys(time.engine for time in times)]
    return ShownTable([Column("", "", TEXT), *columns], list(parts.values()), "Engines")


def spans(name: str, rows: Sequence[Sequence[Any]]) -> ShownTable:
    """The spans of a timeline."""
    titles = ("worker", "what", "minibatch", "microbatch", "start, s", "end, s")
    kinds = zip(titles, (WORKERS, TEXT, COUNT, COUNT, MOMENT, MOMENT), strict=True)
    columns = [Column(title, itemgetter(i), kind) for i, (title, kind) in enumerate(kinds)]
    return ShownTable(columns, rows, f"Spans, {name}")


def memory(rows: Sequence[Json]) -> ShownTable:
    """The peak memory of each worker."""
    columns = (WORKER, Column("most", lambda m: max(m["bytes"]), SIZE))
    return ShownTable(columns, rows, "Peak memory")


def steps(metrics: Json, named: Json) -> ShownTable:
    """What was measured at every step, and the metrics that the model file names."""
    names = ("loss", "lr", "grad_norm", "loss_scale", "seconds", *RATES)
    series = {n.replace("_", " "): metrics[n] for n in names if any(v is not None for v in metrics.get(n, ()))} | named
    columns = [Column("step", itemgetter(0), COUNT)]
    columns += [Column(name, itemgetter(i)) for i, name in enumerate(series, start=1)]
    return ShownTable(columns, list(zip(metrics["step"], *series.values(), strict=True)), "Steps")


def spent(rows: Sequence[Json], kinds: Iterable[str]) -> ShownTable:
    """How a run's workers spent their seconds, by kind of time."""
    columns = [WORKER, Column("all", "seconds", CLOCK)]
    columns += [Column(kind, partial(within, "spent", kind), CLOCK) for kind in kinds]
    return ShownTable(columns, rows, "Seconds of the workers")


def paces(rows: Sequence[Json]) -> ShownTable:
    """Each worker's times for a microbatch of a run, and what was planned, where there was a forecast."""
    planned = any(row.get("planned") for row in rows)
    columns = [WORKER, Column("busy", "busy", SHARE)]
    for title, key in (("F", "forward_ms"), ("B", "backward_ms"), ("wait", "wait_ms")):
        columns.append(Column(title, key, TIME))
        columns += [Column("planned", partial(within, "planned", key), TIME)] if planned else []
    if any(engine != "eager" for w in rows for engine in w["engines"]):
        columns.append(Column("engines", "engines", NAMES))
    return ShownTable(columns, rows, "Microbatches of the workers")


def moves(rows: Sequence[Json]) -> ShownTable:
    """When units went to other workers during a run, and why."""
    columns = (
        Column("after step", "step", COUNT), Column("because", "because", NAME), Column("units", "before", TEXT),
        Column("then", "after", TEXT), Column("saves", "gain", SHARE), Column("took", "seconds", CLOCK),
    )  # fmt: skip
    return ShownTable(columns, rows, "Units moved")


def waits(rows: Sequence[Json]) -> ShownTable:
    """What the workers of a run waited for, the longest waits first."""
    every_wait = [wait | {"worker": w["worker"]} for w in rows for wait in w.get("waits") or ()]
    columns = (
        WORKER, Column("waited for", "what", NAME), Column("from", "from", WORKERS),
        Column("seconds", "seconds", CLOCK),
    )  # fmt: skip
    longest = sorted(every_wait, key=lambda wait: -(wait.get("seconds") or 0))
    return ShownTable(columns, longest, "What the workers waited for")


def staleness(rows: Sequence[Json]) -> ShownTable:
    """How far the weights that forwards saw were from those that their updates changed, over a run."""
    columns = (
        WORKER, Column("parameter group", "group", COUNT), Column("updates behind", "stale", COUNT),
        Column("predicted", "ahead", COUNT), Column("minibatches", "samples", COUNT),
        Column("RMSE to those updated", "rmse"), Column("RMS of the weights", "rms"),
    )  # fmt: skip
    return ShownTable(columns, rows, "Staleness")
