"""The tables of README.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- tables: written by main.py -->", "<!-- end of tables -->"


def text(result: dict[str, Any]) -> str:
    """All of them, and the verdict."""
    parts = [_training(result["training"]), _states(result), _far(result["far"])]
    verdict = "missed: " + "; ".join(result["missed"]) if result["missed"] else "All goals are met."
    return "\n\n".join([*parts, verdict]) + "\n"


def write_between_markers(text: str, path: Path) -> None:
    """Put the text between the markers of a file, in place of what stands there."""
    before, rest = path.read_text().split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{rest.split(END)[1]}")


def _training(row: dict[str, Any]) -> str:
    waits, minibatch = statistics.median(row["waits"]), statistics.median(row["minibatch"])
    return "\n".join(
        [
            f"**Training**, a checkpoint of {_bytes(row['bytes'])} at every {row['every']} steps, "
            f"median of {len(row['waits'])} rounds (all of them)",
            "",
            "| | |",
            "|---|---|",
            f"| a minibatch without checkpoints | {1e3 * minibatch:.1f} ms ({_span(row['minibatch'], 1e3, 1)}) |",
            f"| a worker waits for a checkpoint | {1e3 * waits:.1f} ms ({_span(row['waits'], 1e3, 1)}) |",
            f"| **training waits** | **{100 * row['share']:.2f} %** of its time |",
            f"| by the clock, with checkpoints | {100 * statistics.median(row['slower']):+.1f} % "
            f"({_span(row['slower'], 100, 1, '+')}) |",
        ]
    )


def _states(result: dict[str, Any]) -> str:
    lines = [
        f"**Saving and loading**, seconds, on {result['disk']}, median (all rounds)",
        "",
        "| state | side | training waits | on the disk after | CPU | loaded in | of it, to choose |",
        "|---|---|---|---|---|---|---|",
    ]
    for size, found in result["states"].items():
        for side, rounds in found["sides"].items():
            cells = [_median(rounds, key) for key in ("waits", "save", "cpu", "load", "choose")]
            lines.append(f"| {size} | {side} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _far(row: dict[str, Any]) -> str:
    runs = row["runs"]
    return "\n".join(
        [
            f"**Going on after step {row['step']:,}**, seconds of a whole run of 8 more steps",
            "",
            "| | |",
            "|---|---|",
            f"| after step 8 | {_seconds(runs['near'])} |",
            f"| after step {row['step']:,}, data that say where they stand | {_seconds(runs['told'])} |",
            f"| after step {row['step']:,}, data that are skipped | {_seconds(runs['skipped'])} |",
            f"| making and forgetting those data, alone; as a run does it | {row['data']:.2f}; {row['skip']:.2f} |",
            f"| taking over {_bytes(row['metrics_bytes'])} of `metrics.jsonl`, alone | {row['metrics']:.2f} |",
        ]
    )


def _median(rounds: Sequence[dict[str, float]], key: str) -> str:
    return _seconds([row[key] for row in rounds]) if key in rounds[0] else "–"


def _seconds(values: Sequence[float]) -> str:
    middle = f"{statistics.median(values):.2f}"
    return middle if len(values) == 1 else f"{middle} ({_span(values, 1, 2)})"


def _span(values: Sequence[float], factor: float, places: int, sign: str = "") -> str:
    low, high = (f"{factor * value:{sign}.{places}f}" for value in (min(values), max(values)))
    return f"{low} to {high}"


def _bytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"
