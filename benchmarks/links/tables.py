"""The tables of README.md, and the lines that tell of a run while it lasts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- tables: written by main.py -->", "<!-- end of tables -->"
WORKERS = 2
ALONE, ASYNC, AUTO, DDP, PIPELINING = "alone", "fxpipe async", "fxpipe async, auto", "DDP", "torch 1F1B"


def text(result: dict[str, Any]) -> str:
    """All of them, and the verdict."""
    parts = [_headline(result["rows"])]
    parts += [model_text(name, result) for name in result["losses"]]
    return "\n\n".join([*parts, _verdict(result)]) + "\n"


def missed(goals: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that were not reached."""
    return [goal for goal in goals if goal["times"] < goal["goal"]]


def write_between_markers(text: str, path: Path) -> None:
    """Put the text between the markers of a file, in place of what stands there."""
    before, rest = path.read_text().split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{rest.split(END)[1]}")


def wire_seconds(row: dict[str, Any]) -> float:
    """Seconds in which the link carries the bytes of all weights once."""
    seconds: float = 8 * row["weights"] / row["link"]["bits"]
    return seconds


def weights_per_step(row: dict[str, Any]) -> float:
    """x: bytes of the weights / (bandwidth × seconds of a worker's half of the minibatch, nothing communicated)."""
    return wire_seconds(row) / statistics.median(row["seconds"][ALONE])


def predicted(row: dict[str, Any]) -> float:
    """How many times as fast as DDP without overlap is a pipeline whose activations cost nothing.

    A ring all-reduce sends 2(N−1)/N of the bytes each way; the pipeline's step is a worker's share of the work.
    """
    return 1 + 2 * (WORKERS - 1) / WORKERS * weights_per_step(row)


def times_as_fast(row: dict[str, Any], against: str) -> float:
    """By how many times more samples/s fxpipe trains, with the contender of its that is fastest here."""
    return statistics.median(row["seconds"][against]) / _fastest(row, "fxpipe")


def times_as_soon(row: dict[str, Any], against: str) -> float | None:
    """By how many times fewer seconds the first of fxpipe takes to the loss; None if one of the two never has it."""
    slow, fast = seconds_to_loss(row, against), _first(row, "fxpipe")
    return None if slow is None or fast is None else slow / fast


def gain_of_auto(row: dict[str, Any], against: str) -> float | None:
    """Samples/s with the codec that fxpipe chooses, over those without; None if it was not measured."""
    auto = _median(row, AUTO)
    return None if auto is None else statistics.median(row["seconds"][against]) / auto


def seconds_to_loss(row: dict[str, Any], name: str) -> float | None:
    """Until a contender has synchronous training's loss; None if it had not in the minibatches that it was given."""
    minibatches = row["reached"].get(name)
    return None if minibatches is None else minibatches * statistics.median(row["seconds"][name])


def row_text(row: dict[str, Any]) -> str:
    """One model on one link, in a line."""
    rates = ", ".join(
        f"{name} {row['batch'] / statistics.median(seconds):.1f}" for name, seconds in row["seconds"].items()
    )
    return f"{row['model']}, {row['link']['text']}: {rates} samples/s"


def link_text(link: dict[str, Any], checks: Sequence[dict[str, float]]) -> str:
    """What was found of a link, before and after."""
    found = " and ".join(f"{8e-6 * check['bandwidth']:.0f} Mbit/s, {1e3 * check['latency']:.1f} ms" for check in checks)
    return f"the link of {link['text']}, before and after: {found}"


def _headline(rows: Sequence[dict[str, Any]]) -> str:
    """By model and link, what a pipeline is predicted and found to be over data parallelism."""
    lines = [
        f"**How many times as fast**: samples/s of {ASYNC} over DDP as it comes, then of the fastest of fxpipe over "
        "the fastest DDP and over torch 1F1B; seconds to the same loss, the same way",
        "",
        "| model | link | x | predicted 1 + x | over DDP | fastest over fastest DDP | fastest over torch 1F1B "
        "| to the loss, over DDP | first over first DDP | first over torch 1F1B |",
        f"|{'---|' * 10}",
    ]
    for row in rows:
        cells = [
            row["model"],
            row["link"]["text"],
            f"{weights_per_step(row):.2f}",
            f"{predicted(row):.2f}",
            _ratio(_median(row, DDP), _median(row, ASYNC)),
            _ratio(_fastest(row, DDP), _fastest(row, "fxpipe")),
            _ratio(_fastest(row, PIPELINING), _fastest(row, "fxpipe")),
            _ratio(seconds_to_loss(row, DDP), seconds_to_loss(row, ASYNC)),
            _ratio(_first(row, DDP), _first(row, "fxpipe")),
            _ratio(_first(row, PIPELINING), _first(row, "fxpipe")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def model_text(name: str, result: dict[str, Any]) -> str:
    """All contenders of a model on all its links."""
    losses = result["losses"][name]
    rows = [row for row in result["rows"] if row["model"] == name]
    links = [row["link"]["text"] for row in rows]
    lines = [
        f"**{name}**, {rows[0]['weights'] / 1e6:.1f} MB of weights, {rows[0]['batch']} samples a minibatch: samples/s, "
        f"median (all rounds); seconds to the loss {losses['goal']:.3f}, synchronous training's after {losses['of']} "
        "minibatches",
        "",
        f"| contender | minibatches to the loss | {' | '.join(links)} |",
        f"|---|---|{'---|' * len(links)}",
    ]
    for contender in rows[0]["seconds"]:
        reached = losses["reached"].get(contender)
        count = "" if contender == ALONE else str(reached) if reached else f"not in {losses['longest']}"
        cells = [_cell(row, contender) for row in rows]
        lines.append(f"| {contender} | {count} | {' | '.join(cells)} |")
    if result["reason"]:
        cells = [f"{row['batch'] / (statistics.median(row['seconds'][ALONE]) + wire_seconds(row)):.1f}" for row in rows]
        lines.append(f"| DDP, computed without overlap | {losses['of']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any], contender: str) -> str:
    rates = [row["batch"] / seconds for seconds in row["seconds"][contender]]
    span = f" ({min(rates):.1f} to {max(rates):.1f})" if len(rates) > 1 else ""
    to_loss = seconds_to_loss(row, contender)
    after = "" if to_loss is None else f"; {to_loss:.1f} s"
    return f"{statistics.median(rates):.1f}{span}{after}"


def _verdict(result: dict[str, Any]) -> str:
    """Which goals are met, and which are missed."""
    if result["reason"]:
        return f"{result['reason']}: no links, so nothing but fxpipe is measured on them, and no goal."
    known = result["goals"]
    late = missed(known)
    told = [("goals met", [goal for goal in known if goal not in late]), ("missed", late)]
    return "; ".join(f"{word}: {', '.join(map(_goal, some))}" for word, some in told if some)


def _goal(goal: dict[str, Any]) -> str:
    return f"{goal['times']:.2f} times {goal['what']} ({goal['where']}; goal {goal['goal']})"


def _median(row: dict[str, Any], name: str) -> float | None:
    return statistics.median(row["seconds"][name]) if name in row["seconds"] else None


def _fastest(row: dict[str, Any], kind: str) -> float:
    """Seconds of a minibatch of the fastest contender whose name begins so; infinite if there is none."""
    return min((statistics.median(s) for name, s in row["seconds"].items() if name.startswith(kind)), default=math.inf)


def _first(row: dict[str, Any], kind: str) -> float | None:
    """Seconds to the loss of the first there whose name begins so; None if none is."""
    there = (seconds_to_loss(row, name) for name in row["seconds"] if name.startswith(kind))
    return min((seconds for seconds in there if seconds is not None), default=None)


def _ratio(slow: float | None, fast: float | None) -> str:
    return "–" if slow is None or fast is None or math.isinf(slow) else f"{slow / fast:.2f}"
