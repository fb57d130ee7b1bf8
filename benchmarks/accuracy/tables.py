"""The README's tables, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from study import METHODS
from summary import Row, better
from training import SYNCHRONOUS

BEGIN, END = "<!-- tables: written by main.py -->", "<!-- end of tables -->"

# The official port of SpecTrain: accuracy with 4 GPUs less that of data parallelism, in points; one run each.
PORT = {
    "vgg": ("VGG16", {"latest": -2.79, "stash": -2.19, "spectrain": -2.99}),
    "resnet": ("ResNet50", {"latest": -1.67, "stash": -0.86, "spectrain": -0.93}),
    "transformer": ("Transformer", {"latest": -3.86, "stash": -3.01, "spectrain": -1.41}),
    "lstm": ("Residual LSTM", {"latest": -3.63, "stash": -3.50, "spectrain": -0.50}),
}  # fmt: skip


def tables(summary: dict[str, Any]) -> str:
    """All tables, those of results first."""
    rows: list[Row] = summary["conditions"]
    pairs = list(dict.fromkeys((row["workload"], row["optimizer"]) for row in rows))
    workers = sorted({row["workers"] for row in rows if row["method"] != SYNCHRONOUS})
    found = {(r["workload"], r["optimizer"], r["method"], r["workers"]): r for r in rows}
    parts = [_results(found, pairs, n) for n in workers]
    parts += [_steps(found, pairs, workers), _beside_port(found, pairs, workers[:1])]
    parts += [_prediction_errors(summary["prediction_errors"]), _eager(summary["eager"]), _grid(rows)]
    made = summary["environment"]
    return f"Python {made['python']}, torch {made['torch']}.\n\n" + "\n".join(parts)


def write_between_markers(text: str, path: Path) -> None:
    """Put the text between the markers of a file, in place of what stands there."""
    before, rest = path.read_text().split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{rest.split(END)[1]}")


def _results(found: dict[tuple[Any, ...], Row], pairs: Iterable[tuple[str, str]], workers: int) -> str:
    rows = []
    for workload, optimizer in pairs:
        synchronous = found.get((workload, optimizer, SYNCHRONOUS, 1))
        those = [found.get((workload, optimizer, method, workers)) for method in METHODS]
        best: Row | None = None
        for row in those:
            if row and row["mean"] is not None and (not best or better(row["mean"], best["mean"], row["metric"])):
                best = row
        metric = next((row["metric"] for row in [synchronous, *those] if row), "")
        cells = [f"**{_value(row)}**" if row is best and row else _value(row) for row in those]
        rows.append([workload, optimizer, "%" if metric == "accuracy" else "nats/byte", _value(synchronous), *cells])
    head = ["workload", "optimizer", "in", "synchronous", *METHODS]
    title = f"**{workers} workers**: held-out accuracy, or loss, at the end; mean ± standard deviation at the best rate"
    return f"{title}; the best asynchronous one is bold.\n\n{_table(head, rows)}"


def _steps(found: dict[tuple[Any, ...], Row], pairs: Iterable[tuple[str, str]], workers: Sequence[int]) -> str:
    rows = []
    for workload, optimizer in pairs:
        cells = []
        for method in METHODS:
            those = [found.get((workload, optimizer, method, n)) for n in workers]
            cells.append(" / ".join(_reached(row) for row in those))
        synchronous = found.get((workload, optimizer, SYNCHRONOUS, 1))
        total = synchronous["steps"] if synchronous else "–"
        rows.append([workload, optimizer, str(total), _reached(synchronous), *cells])
    counts = " / ".join(map(str, workers))
    title = f"**Steps** until within 1 % of the synchronous mean, at the best rate ({counts} workers; – never)"
    return f"{title}.\n\n{_table(['workload', 'optimizer', 'of', 'synchronous', *METHODS], rows)}"


def _beside_port(found: dict[tuple[Any, ...], Row], pairs: Iterable[tuple[str, str]], workers: Sequence[int]) -> str:
    methods = ("latest", "stash", "spectrain")
    rows = []
    for workload, optimizer in pairs:
        if workload not in PORT or optimizer != "sgd" or not workers:
            continue
        model, port = PORT[workload]
        synchronous = found.get((workload, optimizer, SYNCHRONOUS, 1))
        cells = [_difference(found.get((workload, optimizer, m, workers[0])), synchronous) for m in methods]
        rows.append([f"{workload}, {model}", *(f"{c}, {port[m]:+.2f}" for c, m in zip(cells, methods, strict=True))])
    title = "**Beside SpecTrain's official port**: points of accuracy lost (−) with 4 workers, here and there"
    return f"{title}.\n\n{_table(['workload, their model', *methods], rows)}"


def _prediction_errors(errors: Sequence[Row]) -> str:
    ahead = (1, 2, 4, 8)
    rows = []
    for e in errors:
        ratios = (f"{e['predicted'][s - 1] / e['stale'][s - 1]:.2f}" for s in ahead)
        rows.append([e["workload"], e["optimizer"], f"{e['rate']:g}", *ratios])
    title = "**Prediction**: root mean square error of predicted weights over that of stale ones, s updates ahead"
    return f"{title}.\n\n{_table(['workload', 'optimizer', 'rate', *(f's = {s}' for s in ahead)], rows)}"


def _eager(checks: Sequence[Row]) -> str:
    rows = [
        [c["workload"], c["optimizer"], "yes" if c["equal"] else f"to {c['difference']:.1e} of {c['greatest']:.2g}"]
        for c in checks
    ]
    steps = checks[0]["steps"] if checks else 0
    title = f"**Synchronous equals eager PyTorch** after {steps} steps, every bit of every parameter and buffer"
    return f"{title}.\n\n{_table(['workload', 'optimizer', 'equal'], rows)}"


def _grid(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        cells = [f"{at['rate']:g}: {_cell(at, row['metric'])}" for at in row["grid"]]
        lines.append([row["workload"], row["optimizer"], row["method"], str(row["workers"]), *cells])
    count = max((len(row["grid"]) for row in rows), default=0)
    head = ["workload", "optimizer", "method", "N", *(f"rate {number}" for number in range(1, count + 1))]
    return f"**The whole grid**: rate: mean ± standard deviation, or how many seeds diverged.\n\n{_table(head, lines)}"


def _value(row: Row | None) -> str:
    if row is None:
        return "–"
    return "diverged" if row["mean"] is None else _number(row["mean"], row["std"], row["metric"])


def _cell(at: Row, metric: str) -> str:
    if at["diverged"]:
        return f"diverged {at['diverged']}/{at['n']}"
    return _number(at["mean"], at["std"], metric)


def _number(mean: float, std: float | None, metric: str) -> str:
    scale, places = (1, 3) if metric == "nats" else (100, 1)
    spread = "" if std is None else f" ± {scale * std:.{places}f}"
    return f"{scale * mean:.{places}f}{spread}"


def _reached(row: Row | None) -> str:
    return "–" if row is None or row["reached"] is None else str(row["reached"])


def _difference(row: Row | None, synchronous: Row | None) -> str:
    if row is None or synchronous is None or row["mean"] is None or synchronous["mean"] is None:
        return "–"
    return f"{100 * (row['mean'] - synchronous['mean']):+.2f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
