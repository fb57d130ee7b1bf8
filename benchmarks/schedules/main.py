"""Forecasts of synchronous schedules, next to what two workers take, and what half the memory costs; see README.md.

Each round runs every schedule one after the other, in processes of their own. Four and eight workers are only forecast.
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
MODEL, LARGE, TINY = (HERE / f"gpt_pieces{more}.py" for more in ("", "_large", "_tiny"))
MICROBATCHES = 8
FXPIPE = {
    "fxpipe 1f1b": ("--schedule", "1f1b"),
    "fxpipe zb-h1": ("--schedule", "zb-h1"),
    "fxpipe zb-h2": ("--schedule", "zb-h2"),
    "fxpipe zb-v": ("--schedule", "zb-v"),
    "fxpipe auto": ("--schedule", "auto", "--synchronous"),
}
AUTO = "fxpipe auto"
AS_MANY, CHOSEN = "as many microbatches", "as many as auto chooses"
OFF, HALF = 0.03, 1.2
"""The goals: how far the forecast of auto may be off, and what half the memory may cost."""


def main() -> None:
    """Measure, print the tables and keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--only-half", action="store_true", help="only what half the memory costs; kept nowhere")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="1 round of 4 steps of two schedules, kept nowhere: to see that it runs",
    )
    options = parser.parse_args()
    ours, more, model, large = dict(FXPIPE), (4, 8), MODEL, LARGE
    if options.quick:
        options.rounds, options.steps, more, model, large = 1, 4, (4,), TINY, TINY
        ours = {name: FXPIPE[name] for name in ("fxpipe zb-h1", AUTO)}
    with tempfile.TemporaryDirectory(prefix="fxpipe_schedules_") as scratch:
        folder = Path(scratch)
        if options.only_half:
            print(json.dumps(half_memory(large, folder, max(4, options.steps // 2), options.rounds)))
            return
        builds = {
            name: compile_build(model, arguments, 2, folder / f"2-{i}")
            for i, (name, arguments) in enumerate(ours.items())
        }
        rounds = []
        for number in range(options.rounds):
            rounds.append({name: seconds(found, options.steps) for name, found in builds.items()})
            print(
                f"round {number + 1}  " + "  ".join(f"{n} {1e3 * s:.0f} ms" for n, s in rounds[-1].items()), flush=True
            )
        rows = table(rounds, builds)
        taken = builds[AUTO]["schedules"][0]
        known = builds[AUTO] if large == model else None
        half = half_memory(large, folder, max(4, options.steps // 2), options.rounds, known)
        forecasts = [forecast(model, ours, workers, folder) for workers in more]
    met = verdict(rows, half)
    result = {"rows": rows, "rounds": rounds, "taken": taken, "half": half, "forecasts": forecasts, "missed": met}
    if not options.quick:
        (HERE / "result.json").write_text(json.dumps(result, indent=1) + "\n")


def compile_build(
    model: Path, arguments: tuple[str, ...], workers: int, build: Path, microbatches: int | None = MICROBATCHES
) -> dict[str, Any]:
    """What `fxpipe compile --json` says, and where the build is; one thread a worker. None: it chooses how many."""
    cut = () if microbatches is None else ("--microbatches", microbatches)
    given = ("-n", workers, *cut, "--threads", 1, "-o", build, "--json", *arguments)
    found: dict[str, Any] = json.loads(run_fxpipe("compile", model, *given))
    return found | {"folder": str(build)}


def seconds(found: dict[str, Any], steps: int) -> float:
    """Of a minibatch in a run of a build."""
    build = Path(found["folder"])
    out = build.parent / "out"
    run_fxpipe("run", build, "--steps", steps, "--threads", 1, "--out", out)
    return minibatch_seconds(out)


def table(rounds: list[dict[str, float]], builds: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each schedule, printed: median and forecast."""
    rows = []
    print(f"\n{'two workers, 8 microbatches':<30}{'ms a minibatch':>15}{'forecast':>10}{'off by':>8}")
    for name, found in builds.items():
        measured = statistics.median(r[name] for r in rounds)
        expected = found["forecast"]["milliseconds"] / 1e3
        off = expected / measured - 1
        label = f"{name} ({found['schedule']})" if name == AUTO else name
        print(f"{label:<30}{1e3 * measured:>15.0f}{1e3 * expected:>10.0f}{f'{100 * off:+.1f} %':>8}")
        rows.append({"name": name, "seconds": measured, "forecast": expected, "off": off})
    return rows


def half_memory(
    model: Path, folder: Path, steps: int, rounds: int, roomy: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What auto takes in half of the memory that it takes by itself, and how much longer that takes.

    With as many microbatches as before, and with the number that auto chooses for that memory.

    Args:
        roomy: auto's build in all of the memory; None where there is none yet.
    """
    arguments = ("--schedule", "auto", "--synchronous")
    roomy = roomy or compile_build(model, arguments, 2, folder / "roomy")
    whole = max(row["memory_bytes"] for row in roomy["schedules"][:1])
    limit = whole / 2
    print(f"\nof {model.name}, {roomy['schedule']} takes {whole / 2**20:.1f} MiB a worker; in half of that:")
    found: dict[str, dict[str, Any]] = {}
    for label, microbatches in ((AS_MANY, MICROBATCHES), (CHOSEN, None)):
        try:
            given = (*arguments, "--memory", f"{limit:.0f}B")
            found[label] = compile_build(model, given, 2, folder / f"half {label}", microbatches)
        except SystemExit as error:
            text = str(error)
            if "memory" not in text:
                raise
            print(f"{label}: nothing fits: {text.splitlines()[-1]}")
    sides = [("roomy", roomy), *found.items()]
    rows = []
    for number in range(rounds):  # all sides in turn, again, and every other time backwards
        rows.append({name: seconds(one, steps) for name, one in sides[:: -1 if number % 2 else 1]})
    result: dict[str, Any] = {"limit": limit, "roomy": roomy["schedule"], "bytes": whole, "seconds": rows, "taken": {}}
    for label, one in found.items():
        ratio = statistics.median(row[label] / row["roomy"] for row in rows)
        count = one["schedules"][0]["microbatches"]
        print(f"{label}: {one['schedule']} with {count} microbatches, {ratio:.3f} times the time")
        result["taken"][label] = {"schedule": one["schedule"], "microbatches": count, "ratio": ratio}
    return result


def forecast(model: Path, ours: dict[str, tuple[str, ...]], workers: int, folder: Path) -> dict[str, Any]:
    """What more workers would do, each on a core of its own: simulated from stages timed one by one."""
    found = {
        name: compile_build(model, arguments, workers, folder / f"{workers}-{i}")
        for i, (name, arguments) in enumerate(ours.items())
    }
    times = {name: one["forecast"]["milliseconds"] for name, one in found.items()}
    print(f"\n{workers} workers, forecast:")
    for name, one in found.items():
        label = f"{name} ({one['schedule']})" if name == AUTO else name
        bubble = 100 * one["forecast"]["bubble"]
        print(f"{label:<30}{times[name]:>15.0f} ms{bubble:>10.0f} % bubble")
    return {"workers": workers, "milliseconds": times, "schedule": found[AUTO]["schedule"]}


def verdict(rows: list[dict[str, Any]], half: dict[str, Any]) -> list[str]:
    """Which goals were missed, printed."""
    auto = next(row for row in rows if row["name"] == AUTO)
    missed = []
    if abs(auto["off"]) > OFF:
        missed.append(f"the forecast of auto is off by {100 * auto['off']:+.1f} %, goal {100 * OFF:.0f} %")
    if not half["taken"]:
        missed.append("nothing fits in half the memory")
    elif (least := min(taken["ratio"] for taken in half["taken"].values())) > HALF:
        missed.append(f"half the memory costs {least:.3f} times the time, goal {HALF}")
    print("\n" + ("missed: " + "; ".join(missed) if missed else "all goals are met"))
    return missed


if __name__ == "__main__":
    main()
