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
from training import SYNCHRONOUS

COLOURS = {SYNCHRONOUS: "black"} | {method: f"C{number}" for number, method in enumerate(METHODS)}


def draw(summary: dict[str, Any], folder: Path) -> None:
    """Write curves.png, workers.png and prediction.png."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = summary["conditions"]
    _save(_curves(rows), folder / "curves.png")
    _save(_over_workers(rows), folder / "workers.png")
    _save(_predictions(summary["prediction_errors"]), folder / "prediction.png")


def _curves(rows: Sequence[Row]) -> Figure:
    """The held-out metric against steps, with the most workers, at each method's best rate."""
    most = max((row["workers"] for row in rows), default=1)
    figure, axes = _panels(rows)
    for (workload, optimizer), panel in axes.items():
        for row in rows:
            if (row["workload"], row["optimizer"]) != (workload, optimizer) or row["workers"] not in (1, most):
                continue
            if row["curve"]:
                panel.plot(*zip(*row["curve"], strict=True), **_style(row["method"]))
        panel.set_xlabel("steps")
    figure.suptitle(f"Held-out data along the way, {most} workers, best rate of each method")
    return figure


def _over_workers(rows: Sequence[Row]) -> Figure:
    """The final metric against the number of workers; one worker is synchronous."""
    figure, axes = _panels(rows)
    counts = sorted({row["workers"] for row in rows})
    for pair, panel in axes.items():
        here = [row for row in rows if (row["workload"], row["optimizer"]) == pair and row["mean"] is not None]
        start = [row for row in here if row["method"] == SYNCHRONOUS]
        for method in METHODS:
            line = start + [row for row in here if row["method"] == method]
            if len(line) > len(start):
                places = [counts.index(row["workers"]) for row in line]
                spread = [row["std"] or 0.0 for row in line]
                panel.errorbar(places, [row["mean"] for row in line], spread, capsize=2, **_style(method))
        for row in start:
            panel.axhline(row["mean"], color="black", linewidth=0.8, linestyle=":", label=SYNCHRONOUS)
        panel.set_xticks(range(len(counts)), [str(count) for count in counts])
        panel.set_xlabel("workers")
    figure.suptitle("Held-out data at the end, best rate of each method")
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
        figure.legend(
            named.values(), named.keys(), loc="lower center", ncols=len(named) or 1, fontsize=8, frameon=False
        )
        figure.tight_layout(rect=(0, 0.05, 1, 1))
    else:
        figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)
