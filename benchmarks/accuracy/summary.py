"""From runs to conditions: over the seeds, at every rate, and at each method's best one."""

from __future__ import annotations

import functools
import json
import math
import platform
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from codec_rows import codec_rows
from eager import EagerCheck
from grids import best_first
from journal import Journal
from prediction import PredictionError
from study import Study
from training import FLUSHED, SYNCHRONOUS, Run
from workloads import WORKLOADS

from fxpipe.schedule import make as make_schedule
from fxpipe.simulator.scenario import Scenario, StageTime
from fxpipe.simulator.simulate import simulate, steady_minibatches

WITHIN = 0.01  # of the synchronous result: near enough to have reached it

Row = dict[str, Any]


def summarize(study: Study, journal: Journal) -> dict[str, Any]:
    """Everything that tables and plots need, from those of the study's jobs that have a result.

    Returns:
        `conditions`: a row for every workload, optimizer, method, number of workers and of microbatches, with its grid,
        and mean, standard deviation and learning curve at the rate that was best for its first seed; what it lost of
        the synchronous result, and how long it takes; `codecs`, as `codec_rows`; `prediction_errors`; `eager`;
        `environment`.
    """
    groups: dict[tuple[Any, ...], list[tuple[Run, Row]]] = defaultdict(list)
    for run in dict.fromkeys(run for grid in study.grids for run in grid.runs(journal)):  # grids may share some
        if run in journal:
            key = (run.workload, run.optimizer, run.method, run.workers, run.microbatches)
            groups[key].append((run, journal[run]))
    conditions = [_condition(runs) for runs in groups.values()]
    _compare_with_synchronous(conditions)
    once = [(job, journal[job]) for job in study.once() if job in journal]
    pairs = [(w.name, o) for w in WORKLOADS.values() for o in w.rates]
    return {
        "environment": {"python": platform.python_version(), "torch": torch.__version__},
        "conditions": sorted(conditions, key=lambda row: pairs.index((row["workload"], row["optimizer"]))),
        "codecs": codec_rows(study.codecs, journal),
        "prediction_errors": _prediction_errors([(j, r) for j, r in once if isinstance(j, PredictionError)]),
        "eager": [
            {"workload": job.workload, "optimizer": job.optimizer, "steps": job.steps, **result}
            for job, result in once
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
    results = dict(runs)
    seed = min(run.seed for run in results)
    best = best_first([run for run in results if run.seed == seed], results)[0]
    chosen = [result for run, result in runs if run.rate == best.rate]
    at = _at_rate(best.rate, chosen)
    return {
        "workload": first.workload,
        "optimizer": first.optimizer,
        "method": first.method,
        "workers": first.workers,
        "microbatches": first.microbatches,
        "metric": metric,
        "steps": first.steps,
        "rate": best.rate,
        "mean": at["mean"],
        "std": at["std"],
        "n": at["n"],
        "diverged": at["diverged"],
        "curve": [] if at["mean"] is None else _mean_curve(chosen),
        "grid": grid,
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


def _compare_with_synchronous(conditions: Sequence[Row]) -> None:
    """Add to each row what it lost, its first step near enough to the synchronous result, and how long that takes."""
    alone = {(row["workload"], row["optimizer"]): row for row in conditions if row["method"] == SYNCHRONOUS}
    for row in conditions:
        row |= {"lost": None, "within": None, "reached": None, "time": None}
        synchronous = alone.get((row["workload"], row["optimizer"]))
        if synchronous is None or synchronous["mean"] is None:
            continue
        goal, sign = synchronous["mean"], 1 if row["metric"] == "nats" else -1
        if row["mean"] is not None:
            row["lost"] = round(sign * (row["mean"] - goal) / goal, 5)
            row["within"] = sign * (row["mean"] - goal) <= (synchronous["std"] or 0.0)
        near = goal * (1 + sign * WITHIN)
        reached = [step for step, value in row["curve"] if not better(near, value, row["metric"])]
        row["reached"] = reached[0] if reached else None
        if reached:
            row["time"] = round(reached[0] / speedup(row["method"], row["workers"], row["microbatches"]), 3)


@functools.cache
def speedup(method: str, workers: int, microbatches: int) -> float:
    """How many times as fast equal workers train as one of them, without messages: simulated; a backward is two F."""
    name = "async" if method not in (SYNCHRONOUS, FLUSHED) else "1f1b"
    schedule = make_schedule(name, workers, microbatches)
    cost = StageTime(1 / (workers * microbatches), 2 / (workers * microbatches))
    simulated = simulate(schedule, Scenario((cost,) * workers), steady_minibatches(schedule))
    return 3 / simulated.seconds_per_minibatch


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
