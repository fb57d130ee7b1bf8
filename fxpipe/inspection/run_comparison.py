"""Compares runs, as plain JSON: settings, speed, loss, where their time went, and which is faster.

A run is what `fxpipe.observe.run_folder.read_run` reads. The builds may differ.
"""

from __future__ import annotations

import math
import shlex
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from statistics import mean, median, stdev
from typing import Any

from fxpipe.observe.rates import RATES
from fxpipe.runtime.options import SHOWN

Json = dict[str, Any]
Pair = list[Any]
"""The values of the first and of the second run; None where one is missing."""

SETTINGS = (
    "schedule",
    "policy",
    "microbatches",
    *SHOWN,
    "arguments",
    "threads",
    "transport",
    "throttle",
    "device",
    "samples",
)

SMOOTH = 20
"""A smoothed loss is the mean of this many last steps, or of all in a shorter run."""

ALIKE = 0.01
"""Throughputs that differ by a smaller fraction count as equal."""


def comparison(first: Json, second: Json) -> Json:
    """Compare two runs. Lists of two have one item per run.

    settings     those that differ: {name: [·, ·]}
    speed        {the rates (`fxpipe/observe/rates.py`), efficiency, bubble, step_ms, seconds}: pairs; step_ms is a
                 median, bubble the share of time in which workers wait, read data or pause
    loss         {raw: of the last step, smoothed, same_time: {seconds, smoothed}}: pairs, None if the loss is not
                 finite; same_time is None if a run has no steps
    evaluation   {metric: [·, ·]}
    workers      [{worker, busy, seconds, spent: {kind: share of the worker's time}}]
    time_losses  the rows of both
    faster       0 or 1; None if both are equally fast, or if that is unknown
    ratio        the second run's throughput divided by the first's
    verdict      sentences
    problems     of both
    """
    runs = [first, second]
    speed: dict[str, Pair] = {
        **{name: [_throughput(run, name) for run in runs] for name in RATES},
        **{name: [run.get(name) for run in runs] for name in ("efficiency", "bubble")},
        "step_ms": [_step_ms(run) for run in runs],
        "seconds": [_seconds(run) for run in runs],
    }
    rates = speed["samples_per_second"]
    ratio = rates[1] / rates[0] if all(rates) else None
    comparison: Json = {
        "runs": [run["folder"] for run in runs],
        "settings": settings_that_differ(runs),
        "speed": speed,
        "loss": _losses(runs),
        "evaluation": _evaluations(runs),
        "workers": _workers(runs),
        "time_losses": [run.get("time_losses") or [] for run in runs],
        "faster": None if ratio is None or abs(ratio - 1) < ALIKE else int(ratio > 1),
        "ratio": ratio,
        "problems": [run["problems"] for run in runs],
    }
    return comparison | {"verdict": _verdict(runs, comparison)}


def _throughput(run: Json, name: str) -> float | None:
    """The rate in the summary, else the harmonic mean over the steps."""
    if run.get(name) is not None:
        return float(run[name])
    rates = [rate for rate in run["metrics"].get(name) or () if rate]
    return len(rates) / sum(1 / rate for rate in rates) if rates else None


def _seconds(run: Json) -> float | None:
    """Of all steps; those of `run.json` begin where the run went on from a checkpoint."""
    return max((value for value in run["metrics"]["seconds"] if value is not None), default=run.get("seconds"))


def _step_ms(run: Json) -> float | None:
    ends = [0.0, *(value for value in run["metrics"]["seconds"] if value is not None)]
    return 1e3 * median(b - a for a, b in pairwise(ends)) if len(ends) > 1 else None


def settings_that_differ(runs: Sequence[Json]) -> dict[str, list[Any]]:
    """The settings that differ: by name, the value of each run, None where it has none."""
    differing: dict[str, list[Any]] = {}
    builds = [run.get("build") or {} for run in runs]
    if len({build.get("digest") for build in builds}) > 1:
        differing["build"] = [_build_name(build) for build in builds]
    counts = [len(run["workers"]) if run.get("workers") else None for run in runs]
    engines = [_engines(run) for run in runs]
    steps = [run.get("steps") or len(run["metrics"]["step"]) for run in runs]
    rates = [_rate(run) for run in runs]
    values: dict[str, list[Any]] = {"workers": counts, "engines": engines, "learning_rate": rates}
    settings = [run.get("settings") or {} for run in runs]
    values |= {f"setting {name}": [one.get(name) for one in settings] for one in settings for name in one}
    values |= {name: [run.get(name) for run in runs] for name in SETTINGS} | {"steps": steps}
    values["arguments"] = [None if line is None else shlex.join(line) for line in values["arguments"]]
    return {name: row for name, row in values.items() if any(value != row[0] for value in row)} | differing


def outcome(run: Json) -> dict[str, float | None]:
    """The results of a run: the mean of its last losses, its speed, its duration, and its last evaluation."""
    held_out = {f"held out {name}": value for name, value in (run.get("evaluation") or {}).items()}
    speed = {"samples_per_second": _throughput(run, "samples_per_second"), "seconds": _seconds(run)}
    return {"loss": smoothed(run["metrics"]["loss"]), **speed, **held_out}


def _rate(run: Json) -> str | None:
    """The first group's learning rate at the first step, and at the last one if it differs."""
    rates = [rate for rate in run["metrics"].get("lr") or () if rate is not None]
    if not rates:
        return None
    return f"{rates[0]:.3g}" if rates[0] == rates[-1] else f"{rates[0]:.3g} to {rates[-1]:.3g}"


def _build_name(build: Json) -> str | None:
    return f"{build.get('folder')} ({str(build['digest'])[:8]})" if build.get("digest") else None


def _engines(run: Json) -> str | None:
    names = dict.fromkeys(name for row in run.get("workers") or () for name in row.get("engines") or ())
    return ", ".join(names) or None


def _losses(runs: Sequence[Json]) -> Json:
    losses = [run["metrics"]["loss"] for run in runs]
    ends = [[value or 0.0 for value in run["metrics"]["seconds"]] for run in runs]
    until = min((times[-1] for times in ends if times), default=0.0) if all(ends) else 0.0
    last = [bisect_right(times, until) for times in ends]
    return {
        "raw": [next(iter(row[-1:]), None) for row in losses],
        "smoothed": [smoothed(row) for row in losses],
        "same_time": {"seconds": until, "smoothed": [smoothed(row[:n]) for row, n in zip(losses, last, strict=True)]}
        if until
        else None,
    }


def smoothed(losses: Sequence[float | None]) -> float | None:
    """The mean of the last `SMOOTH` losses that are finite; None if the last one is not, or there is none."""
    finite = [loss for loss in losses[-SMOOTH:] if loss is not None and math.isfinite(loss)]
    return sum(finite) / len(finite) if finite and finite[-1] == losses[-1] else None


def _diverged(run: Json) -> int | None:
    """The step from which on no loss of a run is finite; None if the last one is finite."""
    first = None
    for step, loss in zip(run["metrics"]["step"], run["metrics"]["loss"], strict=True):
        first = None if loss is not None else int(step) if first is None else first
    return first


def _evaluations(runs: Sequence[Json]) -> dict[str, Pair]:
    rows = [run.get("evaluation") or {} for run in runs]
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(n for row in rows for n in row)}


def _workers(runs: Sequence[Json]) -> list[Json]:
    rows = [{row["worker"]: row for row in run.get("workers") or ()} for run in runs]
    return [
        {
            "worker": rank,
            "busy": [of_run.get(rank, {}).get("busy") for of_run in rows],
            "seconds": [of_run.get(rank, {}).get("seconds") for of_run in rows],
            "spent": [_shares(of_run.get(rank, {})) for of_run in rows],
        }
        for rank in sorted(rows[0].keys() | rows[1].keys())
    ]


def _shares(row: Json) -> dict[str, float] | None:
    spent, seconds = row.get("spent"), row.get("seconds")
    return {kind: value / seconds for kind, value in spent.items()} if spent and seconds else None


def _verdict(runs: Sequence[Json], comparison: Json) -> list[str]:
    sentences = []
    if comparison["ratio"] is None:
        sentences.append("Which is faster is unknown: the throughput of one is missing.")
    elif comparison["faster"] is None:
        sentences.append("They are equally fast.")
    else:
        fast = comparison["faster"]
        ratio, rates = max(comparison["ratio"], 1 / comparison["ratio"]), comparison["speed"]["samples_per_second"]
        sentences.append(
            f"Run {fast + 1} is {ratio:.2f} times as fast ({rates[fast]:.1f} samples/s against {rates[1 - fast]:.1f})."
        )
    diverged = [_diverged(run) for run in runs]
    for number, step in enumerate(diverged, start=1):
        if step is not None:
            sentences.append(f"Run {number}'s loss is not finite from step {step} on.")
    then = comparison["loss"]["same_time"]
    if then and diverged == [None, None] and None not in then["smoothed"]:
        losses = then["smoothed"]
        better = int(losses[1] < losses[0])
        if abs(losses[0] - losses[1]) > 1e-3 * max(map(abs, losses)):
            sentences.append(
                f"After the same time ({then['seconds']:.3g} s) run {better + 1} has the lower loss: "
                f"{losses[better]:.4g} against {losses[1 - better]:.4g}."
            )
    return sentences


def run_table(runs: Sequence[Json], *, seeds: bool = False) -> Json:
    """Runs, as `fxpipe.observe.run_folder.read_run` reads them, in one dict of plain JSON. With `seeds`, those that
    differ only in the seed share a row.

    settings  the names of those that differ
    outcomes  the names of the results: loss (the mean of the last steps), samples_per_second, seconds, and metrics of
              the last evaluation, as `held out accuracy`
    rows      {runs: folders, seeds, settings: {name: value}, outcomes: {name: [mean, deviation]}}: the standard
              deviation of a sample, None for one run; both are None where a run has no finite value
    problems  of each run
    """
    differ = settings_that_differ(runs)
    if any(name.startswith("setting ") for name in differ):
        differ.pop("learning_rate", None)  # it follows from these settings
    if seeds:
        differ.pop("seed", None)
    groups: dict[str, list[int]] = {}
    for number in range(len(runs)):
        key = repr([values[number] for values in differ.values()]) if seeds else str(number)
        groups.setdefault(key, []).append(number)
    of_runs = [outcome(run) for run in runs]
    outcomes = list(dict.fromkeys(name for one in of_runs for name in one))
    return {
        "settings": list(differ),
        "outcomes": outcomes,
        "rows": [
            {
                "runs": [runs[number]["folder"] for number in group],
                "seeds": [runs[number].get("seed") for number in group],
                "settings": {name: values[group[0]] for name, values in differ.items()},
                "outcomes": {name: _spread([of_runs[number].get(name) for number in group]) for name in outcomes},
            }
            for group in groups.values()
        ],
        "problems": [run["problems"] for run in runs],
    }


def _spread(values: Sequence[float | None]) -> list[float | None]:
    """The mean and the deviation."""
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values):
        return [None, None]
    return [mean(numbers), stdev(numbers) if len(numbers) > 1 else None]
