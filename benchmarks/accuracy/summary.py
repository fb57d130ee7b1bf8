"""From runs to conditions: over the seeds, at every rate, and at each method's best one."""

from __future__ import annotations

import json
import math
import platform
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from eager import EagerCheck
from journal import Journal
from prediction import PredictionError
from study import Study
from training import SYNCHRONOUS, Run
from workloads import WORKLOADS

WITHIN = 0.01  # of the synchronous result: near enough to have reached it

Row = dict[str, Any]


def summarize(study: Study, journal: Journal) -> dict[str, Any]:
    """Everything that tables and plots need, from those of the study's jobs that have a result.

    Returns:
        `conditions`: a row for every workload, optimizer, method and number of workers, with its grid, and mean,
        standard deviation and learning curve at its best rate; `prediction_errors`; `eager`; `environment`.
    """
    done = [(job, journal[job]) for job in study.jobs() if job in journal]
    groups: dict[tuple[Any, ...], list[tuple[Run, Row]]] = defaultdict(list)
    for job, result in done:
        if isinstance(job, Run):
            groups[job.workload, job.optimizer, job.method, job.workers, job.microbatches].append((job, result))
    conditions = [_condition(runs) for runs in groups.values()]
    _add_steps_to_reach(conditions)
    pairs = study.pairs
    return {
        "environment": {"python": platform.python_version(), "torch": torch.__version__},
        "conditions": sorted(conditions, key=lambda row: pairs.index((row["workload"], row["optimizer"]))),
        "prediction_errors": _prediction_errors([(j, r) for j, r in done if isinstance(j, PredictionError)]),
        "eager": [
            {"workload": job.workload, "optimizer": job.optimizer, "steps": job.steps, **result}
            for job, result in done
            if isinstance(job, EagerCheck)
        ],
    }


def write_summary(summary: dict[str, Any], path: Path) -> None:
    """As JSON, one line a row."""
    parts = []
    for name, value in summary.items():
        rows = value if isinstance(value, list) else None
        text = json.dumps(value) if rows is None else "[\n  " + ",\n  ".join(map(json.dumps, rows)) + "\n ]"
        parts.append(f' "{name}": {text}')
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def better(a: float, b: float, metric: str) -> bool:
    """Whether a is the better value: more accuracy, or fewer nats."""
    return a < b if metric == "nats" else a > b


def _condition(runs: Sequence[tuple[Run, Row]]) -> Row:
    first = runs[0][0]
    metric = WORKLOADS[first.workload].metric
    rates = sorted({run.rate for run, _ in runs})
    grid = [_at_rate(rate, [result for run, result in runs if run.rate == rate]) for rate in rates]
    best = None
    for row in grid:
        if row["mean"] is not None and (best is None or better(row["mean"], best["mean"], metric)):
            best = row
    curve = [] if best is None else _mean_curve([result for run, result in runs if run.rate == best["rate"]])
    return {
        "workload": first.workload,
        "optimizer": first.optimizer,
        "method": first.method,
        "workers": first.workers,
        "microbatches": first.microbatches,
        "metric": metric,
        "steps": first.steps,
        "rate": None if best is None else best["rate"],
        "mean": None if best is None else best["mean"],
        "std": None if best is None else best["std"],
        "n": len({run.seed for run, _ in runs}),
        "reached": None,
        "grid": grid,
        "curve": curve,
    }


def _at_rate(rate: float, results: Sequence[Row]) -> Row:
    """Over the seeds; no mean where a seed diverged, for such a rate is not one to choose."""
    finals = [result["final"] for result in results if "final" in result]
    diverged = len(results) - len(finals)
    whole = bool(finals) and not diverged
    return {
        "rate": rate,
        "mean": round(statistics.mean(finals), 5) if whole else None,
        "std": round(statistics.stdev(finals), 5) if whole and len(finals) > 1 else None,
        "diverged": diverged,
        "n": len(results),
        "finals": [round(final, 5) for final in finals],
    }


def _mean_curve(results: Sequence[Row]) -> list[tuple[int, float]]:
    steps = [step for step, _ in results[0]["curve"]]
    columns = zip(*([value for _, value in result["curve"]] for result in results), strict=True)
    return [(step, round(statistics.mean(values), 5)) for step, values in zip(steps, columns, strict=True)]


def _add_steps_to_reach(conditions: Sequence[Row]) -> None:
    """The first step at which a method's mean curve comes within WITHIN of the synchronous mean."""
    goals = {(row["workload"], row["optimizer"]): row["mean"] for row in conditions if row["method"] == SYNCHRONOUS}
    for row in conditions:
        goal = goals.get((row["workload"], row["optimizer"]))
        if goal is None:
            continue
        goal *= 1 + WITHIN if row["metric"] == "nats" else 1 - WITHIN
        reached = [step for step, value in row["curve"] if not better(goal, value, row["metric"])]
        row["reached"] = reached[0] if reached else None


def _prediction_errors(done: Sequence[tuple[PredictionError, Row]]) -> list[Row]:
    """Root mean squares over the seeds."""
    groups: dict[tuple[str, str, float], list[Row]] = defaultdict(list)
    for job, result in done:
        groups[job.workload, job.optimizer, job.rate].append(result)
    return [
        {
            "workload": workload,
            "optimizer": optimizer,
            "rate": rate,
            "n": len(results),
            **{what: _root_mean_squares([result[what] for result in results]) for what in ("stale", "predicted")},
        }
        for (workload, optimizer, rate), results in groups.items()
    ]


def _root_mean_squares(rows: Sequence[Sequence[float]]) -> list[float]:
    return [math.sqrt(statistics.mean(value**2 for value in column)) for column in zip(*rows, strict=True)]
