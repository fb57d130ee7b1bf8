"""Shared cuts against distinct forward and backward cuts, trained for real on two workers; see README.md.

Each round runs every kind of cuts one after the other. What counts is the median over the rounds, and its ratio to
shared cuts. Each median stands beside the forecast that `fxpipe compile` made of it. Four workers are only forecast.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from commands import minibatch_seconds, run_fxpipe

HERE = Path(__file__).resolve().parent
MODELS = ("heavy_head", "vgg_like")
CUTS = ("same", "bidirectional", "three-way")
SCHEDULES = {"async": (), "1f1b": ("--schedule", "1f1b", "--microbatches", "4")}


def main() -> None:
    """Measure, print a table and keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--quick", action="store_true", help="one model, async, 1 round: only to see that it runs")
    parser.add_argument("--out", type=Path, help="default: result.json here, or nowhere with --quick")
    options = parser.parse_args()
    schedules, kinds = SCHEDULES, CUTS
    if options.quick:
        options.models, options.rounds, options.steps, schedules = MODELS[:1], 1, 10, {"async": ()}
        kinds = CUTS[::2]
    rows = []
    head = f"{'model':<12}{'schedule':<10}{'N':>2}  {'cuts':<14}"
    print(f"{head}{'samples/s':>10}{'of same':>9}{'forecast':>10}{'off by':>8}")
    with tempfile.TemporaryDirectory(prefix="fxpipe_balance_") as folder:
        for model in options.models:
            for schedule, arguments in schedules.items():
                rows += real(model, schedule, arguments, kinds, Path(folder), options.rounds, options.steps)
                rows += forecast_only(model, schedule, arguments, kinds, Path(folder))
    if out := options.out or (None if options.quick else HERE / "result.json"):
        out.write_text(json.dumps(rows, indent=1) + "\n")


def real(
    model: str,
    schedule: str,
    arguments: tuple[str, ...],
    kinds: tuple[str, ...],
    folder: Path,
    rounds: int,
    steps: int,
) -> list[dict[str, Any]]:
    """Two workers, every kind of cuts in turn, several rounds."""
    compiled = {cuts: compile_build(model, 2, cuts, arguments, folder) for cuts in kinds}
    rates: dict[str, list[float]] = {cuts: [] for cuts in kinds}
    for _ in range(rounds):
        for cuts in kinds:
            rates[cuts].append(run(folder / f"{model}-2-{cuts}", steps))
    same = statistics.median(rates["same"])
    rows = []
    for cuts in kinds:
        measured, forecast = statistics.median(rates[cuts]), compiled[cuts]["forecast"]["samples_per_second"]
        rows.append(row(model, schedule, 2, cuts, forecast, measured, measured / same, rates[cuts]))
    return rows


def forecast_only(
    model: str, schedule: str, arguments: tuple[str, ...], kinds: tuple[str, ...], folder: Path
) -> list[dict[str, Any]]:
    """Four workers, simulated from stage times that were measured one by one."""
    compiled = {cuts: compile_build(model, 4, cuts, arguments, folder) for cuts in kinds}
    rates = {cuts: found["forecast"]["samples_per_second"] for cuts, found in compiled.items()}
    return [row(model, schedule, 4, cuts, rates[cuts], None, rates[cuts] / rates["same"], []) for cuts in kinds]


def row(
    model: str,
    schedule: str,
    workers: int,
    cuts: str,
    forecast: float,
    measured: float | None,
    of_same: float,
    rounds: list[float],
) -> dict[str, Any]:
    """One line of the table, printed."""
    real = "–" if measured is None else f"{measured:.1f}"
    off = "" if measured is None else f"{100 * (forecast / measured - 1):+.0f} %"
    head = f"{model:<12}{schedule:<10}{workers:>2}  {cuts:<14}"
    print(f"{head}{real:>10}{of_same:>9.3f}{forecast:>10.1f}{off:>8}", flush=True)
    return {
        "model": model,
        "schedule": schedule,
        "workers": workers,
        "cuts": cuts,
        "samples_per_second": measured,
        "of_same": of_same,
        "forecast": forecast,
        "rounds": rounds,
    }


def compile_build(model: str, workers: int, cuts: str, arguments: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """What `fxpipe compile --json` says of it; one thread a worker."""
    build = folder / f"{model}-{workers}-{cuts}"
    options = ("-n", workers, "--cuts", cuts, "-o", build, "--threads", 1, "--json", *arguments)
    said: dict[str, Any] = json.loads(run_fxpipe("compile", HERE / f"{model}.py", *options))
    return said


def run(build: Path, steps: int) -> float:
    """Samples/s of a run."""
    out = build.parent / "out"
    run_fxpipe("run", build, "--steps", steps, "--threads", 1, "--json", "--out", out)
    plan = json.loads((build / "plan.json").read_text())
    leaves = plan["steps"][0]["batch"]
    batch: int = next(leaf["tensor"]["shape"][0] for leaf in leaves if leaf["tensor"]) * plan["microbatches"]
    return batch / minibatch_seconds(out)


if __name__ == "__main__":
    main()
