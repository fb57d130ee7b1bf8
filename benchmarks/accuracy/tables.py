"""The README's tables, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cells import number, table
from codec_tables import codec_tables
from study import METHODS
from summary import Row, speedup
from training import FLUSHED, SYNCHRONOUS

from fxpipe.policy import copies
from fxpipe.policy import make as make_policy
from fxpipe.schedule import make as make_schedule
from fxpipe.schedule.check import held

OPTIMIZERS = ("sgd", "adamw", "muon")
BEGIN, END = "<!-- tables: written by main.py -->", "<!-- end of tables -->"

Key = tuple[int, int]  # workers, microbatches


def tables(summary: dict[str, Any]) -> str:
    """All tables, those of results first."""
    rows: list[Row] = summary["conditions"]
    alone = {(row["workload"], row["optimizer"]): row for row in rows if row["method"] == SYNCHRONOUS}
    keys = sorted({(row["workers"], row["microbatches"]) for row in rows} - {(1, 1)}, key=lambda k: (k[0], -k[1]))
    parts = [_lost(rows, keys), _resources(rows, keys)]
    parts += [_results(rows, alone, key) for key in keys]
    parts += codec_tables(summary["codecs"])
    parts += [_steps(rows, alone, key) for key in keys]
    parts += [_prediction_errors(summary["prediction_errors"]), _eager(summary["eager"]), _grid(rows)]
    made = summary["environment"]
    return f"Python {made['python']}, torch {made['torch']}.\n\n" + "\n".join(parts)


def write_between_markers(text: str, path: Path) -> None:
    """Put the text between the markers of a file, in place of what stands there."""
    before, rest = path.read_text().split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{rest.split(END)[1]}")


def _results(rows: Sequence[Row], alone: dict[tuple[str, str], Row], key: Key) -> str:
    title = f"**{_named(key)}**: held-out accuracy, or loss, at the end; mean ± standard deviation"
    about = "bold: no worse than synchronous training by more than its standard deviation."
    return f"{title}; {about}\n\n{_by_method(rows, alone, key, _value, unit=True)}"


def _steps(rows: Sequence[Row], alone: dict[tuple[str, str], Row], key: Key) -> str:
    title = f"**{_named(key)}**: steps until within 1 % of the synchronous result (– never)"
    return f"{title}.\n\n{_by_method(rows, alone, key, _reached)}"


def _by_method(
    rows: Sequence[Row],
    alone: dict[tuple[str, str], Row],
    key: Key,
    cell: Callable[[Row | None], str],
    unit: bool = False,
) -> str:
    """A line a workload, a column a method, synchronous training first."""
    here = {(r["workload"], r["optimizer"], r["method"]): r for r in rows if (r["workers"], r["microbatches"]) == key}
    pairs = [pair for pair in alone if any(found[:2] == pair for found in here)]
    methods = [method for method in (*METHODS, FLUSHED) if any(found[2] == method for found in here)]
    lines = []
    for pair in pairs:
        metric = alone[pair]["metric"]
        of_what = ["%" if metric == "accuracy" else "nats/byte"] if unit else [str(alone[pair]["steps"])]
        lines.append([*pair, *of_what, cell(alone[pair]), *(cell(here.get((*pair, method))) for method in methods)])
    return table(["workload", "optimizer", "in" if unit else "of", "synchronous", *methods], lines)


def _lost(rows: Sequence[Row], keys: Sequence[Key]) -> str:
    """What is lost on average, and how many workloads are as good."""
    lines = []
    for key in keys:
        for method in METHODS:
            cells = []
            for optimizer in OPTIMIZERS:
                those = [
                    row
                    for row in rows
                    if (row["workers"], row["microbatches"], row["method"], row["optimizer"])
                    == (*key, method, optimizer)
                ]
                known = [row for row in those if row["lost"] is not None]
                good = sum(bool(row["within"]) for row in known)
                mean = statistics.mean(row["lost"] for row in known) if known else None
                cells.append("–" if mean is None else f"{100 * mean:+.1f} % ({good} of {len(those)})")
            if any(cell != "–" for cell in cells):
                lines.append([str(key[0]), str(key[1]), method, *cells])
    title = "**Lost of the synchronous result**: mean over the workloads"
    about = "and how many of them are no worse by more than the synchronous standard deviation"
    return f"{title}, {about}.\n\n{table(['N', 'M', 'method', *OPTIMIZERS], lines)}"


def _resources(rows: Sequence[Row], keys: Sequence[Key]) -> str:
    """Time until near the synchronous result, against a pipeline with a flush; and what a worker holds."""
    goals = {(row["workload"], row["optimizer"]): row["reached"] for row in rows if row["method"] == SYNCHRONOUS}
    lines = []
    for workers, microbatches in keys:
        flushed = speedup(FLUSHED, workers, workers)
        for method in METHODS:
            those = [
                row
                for row in rows
                if (row["workers"], row["microbatches"], row["method"]) == (workers, microbatches, method)
            ]
            goals = {(r["workload"], r["optimizer"]): r["reached"] for r in rows if r["method"] == SYNCHRONOUS}
            known = [(row["reached"], goals.get((row["workload"], row["optimizer"]))) for row in those]
            ratios = [reached / goal for reached, goal in known if reached and goal]
            if not those:
                continue
            schedule = make_schedule("async", workers, microbatches)
            copied = copies(make_policy(method), schedule)
            flying = held(schedule)
            mean = statistics.geometric_mean(ratios) if ratios else None
            faster = flushed / speedup(method, workers, microbatches)
            lines.append(
                [
                    str(workers),
                    str(microbatches),
                    method,
                    f"{len(ratios)} of {len(those)}",
                    "–" if mean is None else f"{mean:.2f}",
                    "–" if mean is None else f"{mean * faster:.2f}",
                    f"{max(copied):g}",
                    f"{max(flying) / microbatches:.2g}",
                ]
            )
    head = ["N", "M", "method", "reach it", "steps", "time", "copies of weights", "minibatches in flight"]
    title = "**To within 1 % of the synchronous result**: how many workloads get there, and the geometric mean of their"
    about = (
        "steps over those of synchronous training, and of their simulated time over that of `1f1b` with as many "
        "microbatches as workers, which gets there in as many steps; and the most that a worker holds"
    )
    return f"{title} {about}.\n\n{table(head, lines)}"


def _of(rows: Sequence[Row], key: Key, method: str) -> list[Row]:
    return [row for row in rows if (row["workers"], row["microbatches"], row["method"]) == (*key, method)]


def _named(key: Key) -> str:
    workers, microbatches = key
    return f"{workers} workers, {microbatches} microbatch{'' if microbatches == 1 else 'es'}"


def _prediction_errors(errors: Sequence[Row]) -> str:
    ahead = (1, 2, 4, 8)
    rows = []
    for e in errors:
        ratios = (f"{e['predicted'][s - 1] / e['stale'][s - 1]:.2f}" for s in ahead)
        rows.append([e["workload"], e["optimizer"], f"{e['rate']:g}", *ratios])
    title = "**Prediction**: root mean square error of predicted weights over that of stale ones, s updates ahead"
    return f"{title}.\n\n{table(['workload', 'optimizer', 'rate', *(f's = {s}' for s in ahead)], rows)}"


def _eager(checks: Sequence[Row]) -> str:
    rows = [
        [c["workload"], c["optimizer"], "yes" if c["equal"] else f"to {c['difference']:.1e} of {c['greatest']:.2g}"]
        for c in checks
    ]
    steps = checks[0]["steps"] if checks else 0
    title = f"**Synchronous equals eager PyTorch** after {steps} steps, every bit of every parameter and buffer"
    return f"{title}.\n\n{table(['workload', 'optimizer', 'equal'], rows)}"


def _grid(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        cells = [f"{at['rate']:g}: {_cell(at, row['metric'])}" for at in row["grid"]]
        where = [str(row["workers"]), str(row["microbatches"])]
        lines.append([row["workload"], row["optimizer"], row["method"], *where, *cells])
    count = max((len(row["grid"]) for row in rows), default=0)
    head = ["workload", "optimizer", "method", "N", "M", *(f"rate {place}" for place in range(1, count + 1))]
    title = (
        "**The whole grid**: rate: mean, ± standard deviation over the seeds at the chosen rate; or how many diverged"
    )
    return f"{title}.\n\n{table(head, lines)}"


def _value(row: Row | None) -> str:
    if row is None:
        return "–"
    if row["mean"] is None:
        return f"diverged {row['diverged']}/{row['n']}"
    text = number(row["mean"], row["std"], row["metric"])
    return f"**{text}**" if row["within"] and row["method"] != SYNCHRONOUS else text


def _cell(at: Row, metric: str) -> str:
    if at["diverged"]:
        return f"diverged {at['diverged']}/{at['n']}"
    return number(at["mean"], at["std"], metric)


def _reached(row: Row | None) -> str:
    return "–" if row is None or row["reached"] is None else str(row["reached"])
