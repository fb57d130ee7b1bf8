"""The study's three plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from prediction import FURTHEST
from study import METHODS
from summary import Row
from training import FLUSHED, SYNCHRONOUS

COLOURS = {SYNCHRONOUS: "black", FLUSHED: "grey"} | {method: f"C{number}" for number, method in enumerate(METHODS)}
SHOWN = 8  # workers
LONG = "long_gpt"


def draw(summary: dict[str, Any], folder: Path) -> None:
    """Write curves.png, workers.png, prediction.png, and long.png where there is a long run."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = summary["conditions"]
    _save(_curves(rows), folder / "curves.png")
    _save(_over_workers(rows), folder / "workers.png")
    if any(row["workload"] == LONG for row in rows):
        _save(_long(rows), folder / "long.png")
    _save(_predictions(summary["prediction_errors"]), folder / "prediction.png")


def _curves(rows: Sequence[Row]) -> Figure:
    """The held-out metric against steps, with as many microbatches as workers, at each method's best rate."""
    counts = {row["workers"] for row in rows} - {1}
    shown = SHOWN if SHOWN in counts else max(counts, default=1)
    at = [row for row in rows if (row["workers"], row["microbatches"]) == (shown, shown) and row["workload"] != LONG]
    pairs = {(row["workload"], row["optimizer"]) for row in at}
    alone = (row for row in rows if row["method"] == SYNCHRONOUS and (row["workload"], row["optimizer"]) in pairs)
    those = [*alone, *at]
    figure, axes = _panels(those)
    for (workload, optimizer), panel in axes.items():
        for row in those:
            if (row["workload"], row["optimizer"]) == (workload, optimizer) and row["curve"]:
                panel.plot(*zip(*row["curve"], strict=True), **_style(row["method"]))
        panel.set_xlabel("steps")
    figure.suptitle(f"Held-out data along the way, {shown} workers, {shown} microbatches, best rate of each method")
    return figure


def _over_workers(rows: Sequence[Row]) -> Figure:
    """What each method loses on average, against the workers: as many microbatches, and a single one."""
    counts = sorted({row["workers"] for row in rows} - {1})
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), squeeze=False, sharey=True)
    for panel, title, microbatches in zip(panels.flat, ("M = N", "M = 1"), (lambda n: n, lambda n: 1), strict=True):
        for method in METHODS:
            points = []
            for place, n in enumerate(counts):
                key = (method, n, microbatches(n))
                those = [row["lost"] for row in rows if (row["method"], row["workers"], row["microbatches"]) == key]
                lost = [value for value in those if value is not None]
                if lost:
                    points.append((place, 100 * sum(lost) / len(lost)))
            if points:
                panel.plot(*zip(*points, strict=True), marker=".", **_style(method))
        panel.axhline(0, color="black", linewidth=0.8, linestyle=":", label=SYNCHRONOUS)
        panel.set_xticks(range(len(counts)), [str(count) for count in counts])
        panel.set_xlabel("workers")
        panel.set_title(title, fontsize=9)
    panels.flat[0].set_ylabel("% lost of the synchronous result")
    figure.suptitle("Mean over the workloads that each number of workers has")
    return figure


def _long(rows: Sequence[Row]) -> Figure:
    """The held-out metric of the long runs, and how much each differs from synchronous training."""
    figure, (curves, differences) = plt.subplots(1, 2, figsize=(10, 3.6))
    those = [row for row in rows if row["workload"] == LONG and row["curve"]]
    alone = next((dict(row["curve"]) for row in those if row["method"] == SYNCHRONOUS), {})
    for row in those:
        curves.plot(*zip(*row["curve"], strict=True), **_style(row["method"]))
        points = [(step, value - alone[step]) for step, value in row["curve"] if step in alone]
        differences.plot(*zip(*points, strict=True), **_style(row["method"]))
    curves.set_ylabel("nats/byte")
    differences.set_ylabel("more than synchronous, nats/byte")
    for panel in (curves, differences):
        panel.set_xlabel("steps")
    figure.suptitle("A byte GPT of 8 blocks, 8 workers, 8 microbatches")
    return figure


def _predictions(errors: Sequence[Row]) -> Figure:
    """Root mean square error of stale and of predicted weights against how far ahead they are wanted."""
    figure, panels = plt.subplots(1, max(1, len(errors)), figsize=(3.2 * max(1, len(errors)), 3), squeeze=False)
    for panel, row in zip(panels.flat, errors, strict=False):
        for what, colour in (("stale", "C0"), ("predicted", "C3")):
            panel.plot(range(1, FURTHEST + 1), row[what], marker=".", color=colour, label=what)
        panel.set_title(f"{row['workload']}, {row['optimizer']}", fontsize=9)
        panel.set_xlabel("updates ahead, s")
        panel.set_ylim(bottom=0)
        panel.legend(fontsize=7)
    panels.flat[0].set_ylabel("RMSE of the weights")
    return figure


def _panels(rows: Sequence[Row]) -> tuple[Figure, dict[tuple[str, str], Axes]]:
    """A panel for every workload and optimizer, four in a line."""
    pairs = {(row["workload"], row["optimizer"]): row["metric"] for row in rows}
    lines = max(1, -(-len(pairs) // 4))
    figure, panels = plt.subplots(lines, 4, figsize=(13, 3 * lines), squeeze=False)
    for panel in panels.flat[len(pairs) :]:
        panel.axis("off")
    axes = dict(zip(pairs, panels.flat, strict=False))
    for (workload, optimizer), panel in axes.items():
        panel.set_title(f"{workload}, {optimizer}", fontsize=9)
        panel.set_ylabel("nats/byte" if pairs[workload, optimizer] == "nats" else "accuracy", fontsize=8)
    return figure, axes


def _style(method: str) -> dict[str, Any]:
    return {"color": COLOURS[method], "label": method, "linewidth": 1.6 if method == SYNCHRONOUS else 1.1}


def _save(figure: Figure, path: Path) -> None:
    named = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if not any(axes.get_legend() for axes in figure.axes):
        width, height = figure.get_size_inches()
        columns = max(1, int(width / 1.5))
        lines = -(-len(named) // columns)
        figure.legend(
            named.values(), named.keys(), loc="lower center", ncols=columns, fontsize=8, frameon=False, borderpad=0
        )
        figure.tight_layout(rect=(0, 0.25 * lines / height, 1, 1))
    else:
        figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)
