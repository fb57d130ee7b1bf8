"""What codecs cost: every condition with one beside the same condition without, over the same seeds."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from grids import CodecGrid, Results
from training import NONE, Run
from workloads import WORKLOADS

Row = dict[str, Any]


def codec_rows(grids: Iterable[CodecGrid], results: Results) -> list[Row]:
    """A row for every condition of which a run has a result, in the order of the grids; not all may have all seeds.

    Each row has the final values by seed, their mean and standard deviation, and how many diverged; and, compared with
    the row without a codec over the same seeds, what share was `lost`, whether that is `within` the standard deviation
    of the other's seeds, and the mean and standard deviation of what each seed lost, in the metric's unit. These four
    are None where there is no such row, where seeds are missing on one side, or where a seed diverged (`within` is then
    false, if it is the codec's).
    """
    groups: dict[tuple[Any, ...], list[Run]] = defaultdict(list)
    for run in dict.fromkeys(run for grid in grids for run in grid.runs(results)):
        if run in results:
            groups[run.workload, run.optimizer, run.method, run.workers, run.codec].append(run)
    rows = [_row(runs, results) for runs in groups.values()]
    plain = {_condition(row): row for row in rows if row["codec"] == NONE}
    return [row | _compared(row, plain.get(_condition(row))) for row in rows]


def runs_of(rows: Iterable[Row]) -> Iterator[tuple[Run, Row]]:
    """The runs of published rows with their results, but for the curves, which rows do not have."""
    for row in rows:
        for seed, final in row["finals"].items():
            run = Run(
                row["workload"],
                row["optimizer"],
                row["method"],
                row["workers"],
                row["microbatches"],
                row["rate"],
                int(seed),
                row["steps"],
                row["points"],
                row["codec"],
            )
            known: Row = {"diverged": 0} if final is None else {"final": final}
            yield run, known | {"curve": [], "seconds": 0.0}


def _condition(row: Row) -> tuple[Any, ...]:
    return row["workload"], row["optimizer"], row["method"], row["workers"]


def _row(runs: list[Run], results: Results) -> Row:
    first = runs[0]
    known = {str(run.seed): results[run].get("final") for run in runs}
    finals = {
        seed: None if final is None else round(final, 5) for seed, final in known.items()
    }  # all follows from them
    values = [final for final in finals.values() if final is not None]
    whole = len(values) == len(finals)
    return {
        "workload": first.workload,
        "optimizer": first.optimizer,
        "method": first.method,
        "workers": first.workers,
        "microbatches": first.microbatches,
        "codec": first.codec,
        "metric": WORKLOADS[first.workload].metric,
        "steps": first.steps,
        "points": first.points,
        "rate": first.rate,
        "finals": finals,
        "mean": round(statistics.mean(values), 5) if whole else None,
        "std": round(statistics.stdev(values), 5) if whole and len(values) > 1 else None,
        "n": len(finals),
        "diverged": len(finals) - len(values),
    }


def _compared(row: Row, plain: Row | None) -> Row:
    found: Row = {"lost": None, "within": None, "by_seed": None, "by_seed_std": None}
    if plain is None or row is plain or plain["mean"] is None or set(plain["finals"]) != set(row["finals"]):
        return found
    if row["mean"] is None:
        return found | {"within": False}
    sign = 1 if row["metric"] == "nats" else -1
    each = [sign * (row["finals"][seed] - final) for seed, final in plain["finals"].items()]
    return {
        "lost": round(sign * (row["mean"] - plain["mean"]) / plain["mean"], 5),
        "within": sign * (row["mean"] - plain["mean"]) <= (plain["std"] or 0.0),
        "by_seed": round(statistics.mean(each), 5),
        "by_seed_std": round(statistics.stdev(each), 5) if len(each) > 1 else None,
    }
