"""The README's tables of codecs, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from cells import number, table
from training import FLUSHED, NONE

Row = dict[str, Any]


def codec_tables(rows: Sequence[Row]) -> list[str]:
    """Codec against none by condition and by workload; nothing without rows."""
    return [_by_condition(rows), _by_workload(rows)] if rows else []


def _by_condition(rows: Sequence[Row]) -> str:
    codecs = [codec for codec in dict.fromkeys(row["codec"] for row in rows) if codec != NONE]
    found = {(*_condition(row), row["codec"]): row for row in rows}
    lines = []
    for condition in dict.fromkeys(map(_condition, rows)):
        workload, optimizer, method, workers = condition
        plain = found.get((*condition, NONE))
        first = plain or next(row for row in rows if _condition(row) == condition)
        unit = "nats/byte" if first["metric"] == "nats" else "%"
        shown = [workload, optimizer, unit, f"{first['rate']:g}", _method(method), str(workers), _value(plain)]
        for codec in codecs:
            row = found.get((*condition, codec))
            shown += [_value(row), _by_seed(row)]
        lines.append(shown)
    head = ["workload", "optimizer", "in", "rate", "method", "N = M", NONE]
    head += [title for codec in codecs for title in (codec, f"{codec}, lost by seed")]
    title = "**Codec against none**: held-out accuracy, or loss, at the end; mean ± standard deviation over the seeds"
    about = (
        "bold: no worse than none by more than none's standard deviation; lost by seed: how much worse than the "
        "training of the same seed without a codec, its mean and deviation; without ±: one seed; –: not trained"
    )
    return f"{title}; {about}.\n\n{table(head, lines)}"


def _by_workload(rows: Sequence[Row]) -> str:
    lines = []
    for row in shares(rows):
        shown = [f"{100 * row['lost']:+.2f} %", f"{100 * row['deviation']:.2f} %"]
        kept = "yes" if row["lost"] <= row["deviation"] else "no"
        lines.append([row["codec"], row["workload"], row["optimizer"], *shown, kept, f"{row['within']} of {row['of']}"])
    head = ["codec", "workload", "optimizer", "lost", "a deviation", "within one", "trainings within one"]
    title = "**What codecs lost**: the share of the result without a codec, as the mean over the methods and numbers of"
    about = "workers that have all seeds, and what share one standard deviation of the seeds without a codec is there"
    return f"{title} {about}.\n\n{table(head, lines)}"


def shares(rows: Sequence[Row]) -> list[Row]:
    """By codec, workload and optimizer: the means over what was trained of the share lost and of none's deviation.

    Conditions count that have a deviation, and no seed that diverged, with a codec and without.
    """
    plain = {_condition(row): row for row in rows if row["codec"] == NONE}
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row["lost"] is not None and plain[_condition(row)]["std"] is not None:
            groups.setdefault((row["codec"], row["workload"], row["optimizer"]), []).append(row)
    return [
        {
            "codec": codec,
            "workload": workload,
            "optimizer": optimizer,
            "lost": statistics.mean(row["lost"] for row in those),
            "deviation": statistics.mean(
                plain[_condition(row)]["std"] / plain[_condition(row)]["mean"] for row in those
            ),
            "within": sum(row["within"] for row in those),
            "of": len(those),
        }
        for (codec, workload, optimizer), those in sorted(groups.items(), key=lambda item: item[0][0], reverse=True)
    ]


def _condition(row: Row) -> tuple[str, str, str, int]:
    return row["workload"], row["optimizer"], row["method"], row["workers"]


def _method(name: str) -> str:
    return f"synchronous (`{FLUSHED}`)" if name == FLUSHED else name


def _value(row: Row | None) -> str:
    if row is None:
        return "–"
    if row["mean"] is None:
        return f"diverged {row['diverged']}/{row['n']}"
    text = number(row["mean"], row["std"], row["metric"])
    return f"**{text}**" if row["within"] else text


def _by_seed(row: Row | None) -> str:
    if row is None or row["by_seed"] is None:
        return "–"
    text = number(row["by_seed"], row["by_seed_std"], row["metric"])
    return text if text.startswith("-") else f"+{text}"
