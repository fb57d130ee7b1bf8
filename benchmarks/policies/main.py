"""What every policy costs beside `latest`, in time and memory. See README.md beside this file.

Every side runs in turn in one run, and what counts is the median ratio to `latest` of the same round. Three parts: the
time of a minibatch, all workers in one process; the rate of two processes; the peak memory of four.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minibatch import SideBySide
from runs import compile_build, peaks, run_time

from fxpipe import policy as policies
from fxpipe import schedule as schedules
from fxpipe.plan.build_folder import read_plan

HERE = Path(__file__).resolve().parent
MODEL = HERE.parent / "efficiency" / "model.py"
WORKERS = 4
POLICIES = {
    1: ("latest", "stash", "vertical", "spectrain", "pipeoptim", "pipeoptim+keep", "lwp", "xpipe"),
    4: (
        *("latest", "stash", "2bw", "spectrain", "pipeoptim", "xpipe"),
        *("latest+ef", "spectrain+ef", "2bw+predict", "2bw+predict+ef"),
    ),
}
"""Those compared, by the number of microbatches; `2bw` needs N−1 of them."""
REAL = ("latest", "stash", "spectrain", "pipeoptim")
AGAIN = "latest again"
CHEAP = ("spectrain", "pipeoptim")
SLOWER = 0.03
FED_BACK = ("spectrain+ef", "2bw+predict", "2bw+predict+ef")
SLOWER_FED_BACK = 0.04

Rows = dict[str, dict[str, Any]]


def main() -> int:
    """Measure, print the tables and keep the numbers; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="of all pipelines side by side")
    parser.add_argument("--runs", type=int, default=5, help="of two processes, of each policy")
    parser.add_argument("--steps", type=int, default=40, help="minibatches of such a run")
    parser.add_argument(
        "--quick", action="store_true", help="few policies, 1 run of 10 steps: only to see that it runs"
    )
    parser.add_argument("--out", type=Path, help="default: result.json here, or nowhere with --quick")
    options = parser.parse_args()
    rounds, runs, steps = (2, 1, 10) if options.quick else (options.rounds, options.runs, options.steps)
    compared = {1: REAL} if options.quick else POLICIES
    with tempfile.TemporaryDirectory(prefix="fxpipe_policies_") as scratch:
        result: dict[str, Any] = {
            "memory": {m: memory(Path(scratch), m, names) for m, names in compared.items()},
            "processes": processes(Path(scratch), runs, steps),
            "time": {m: minibatch_times(m, names, rounds) for m, names in compared.items()},
        }
    result["missed"] = missed(result)
    report(result)
    if out := options.out or (None if options.quick else HERE / "result.json"):
        out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["missed"] and not options.quick else 0


def minibatch_times(microbatches: int, compared: Sequence[str], rounds: int, steps: int = 2) -> Rows:
    """The time of a minibatch, all workers' work together, against `latest` of the same round."""
    say(f"time, {microbatches} microbatches: filling the pipelines")
    names = {**{policy: policy for policy in compared}, AGAIN: "latest"}
    pipelines = SideBySide(MODEL, names, WORKERS, microbatches)
    found: dict[str, list[float]] = defaultdict(list)
    for i in range(rounds):
        say(f"time, {microbatches} microbatches: round {i + 1} of {rounds}")
        for name, seconds in pipelines.round(steps).items():
            found[name].append(seconds)
    return {name: against(found[name], found["latest"]) for name in names}


def processes(scratch: Path, runs: int, steps: int) -> Rows:
    """The seconds that two processes take for a minibatch, against `latest` of the same round."""
    build = compile_build(MODEL, scratch / "two", "-n", "2", "--cuts", "same")
    found: dict[str, list[float]] = defaultdict(list)
    for i in range(runs):
        for policy in REAL if i % 2 == 0 else REAL[::-1]:
            say(f"two processes, run {i + 1} of {runs}: {policy}")
            found[policy].append(run_time(build, policy, steps))
    return {policy: against(found[policy], found["latest"]) for policy in REAL}


def memory(scratch: Path, microbatches: int, names: Sequence[str], steps: int = 12) -> Rows:
    """The peak of every worker above that of `latest`, and the copies of its own weights that explain it."""
    cuts = ("-n", str(WORKERS), "--microbatches", str(microbatches), "--cuts", "same", "--cost", "analytic")
    build = compile_build(HERE / "watched.py", scratch / f"four-{microbatches}", *cuts)
    plan = read_plan(build)
    owned = [sum(p.tensor.bytes for p in plan.owned(k) if p.trained) for k in range(WORKERS)]
    schedule = schedules.make("async", WORKERS, microbatches)
    found: Rows = {}
    for policy in names:
        say(f"memory, {microbatches} microbatches: {policy}")
        peak = peaks(build, policy, steps)
        copies = policies.copies(policies.make(policy), schedule)
        found[policy] = {
            "peak": peak,
            "more": [mine - base for mine, base in zip(peak, found.get("latest", {"peak": peak})["peak"], strict=True)],
            "copies": [int(count * size) for count, size in zip(copies, owned, strict=True)],
        }
    return found


def against(mine: list[float], base: list[float]) -> dict[str, Any]:
    """The median ratio over the rounds, and the range in which its middle half lies."""
    ratios = [a / b for a, b in zip(mine, base, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "ratio": statistics.median(ratios),
        "low": low,
        "high": high,
        "milliseconds": 1000 * statistics.median(mine),
        "rounds": [round(1000 * seconds, 2) for seconds in mine],
    }


def missed(result: dict[str, Any]) -> list[str]:
    """Every goal that these numbers miss, in words."""
    found = []
    places = {f"microbatches: {m}": rows for m, rows in result["time"].items()} | {"processes": result["processes"]}
    room = result["memory"][1]
    for policy in CHEAP:
        for place, rows in places.items():
            if rows[policy]["ratio"] > 1 + SLOWER:
                found.append(f"{policy} is slower than latest by {percent(rows[policy]['ratio'])} ({place})")
        for what, of in (("in all", sum), ("on the worst worker", max)):
            mine, other = of(room[policy]["more"]), of(room["stash"]["more"])
            if mine >= other:
                found.append(f"{policy} needs {mb(mine)} MB more than latest {what}, stash {mb(other)} MB")
    for policy in FED_BACK:
        ratio = result["time"].get(4, {}).get(policy, {"ratio": 1.0})["ratio"]
        if ratio > 1 + SLOWER_FED_BACK:
            found.append(f"{policy} is slower than latest by {percent(ratio)} (microbatches: 4)")
    return found


def report(result: dict[str, Any]) -> None:
    """The tables of README.md, and the verdict."""
    for microbatches, rows in result["time"].items():
        room = result["memory"][microbatches]
        table(
            f"{WORKERS} workers, microbatches: {microbatches}",
            ["ms", "time", "middle half", "MB more", "worst worker", "copies, MB", "worst worker"],
            {
                name: [*against_latest(row), *(more_memory(room[name]) if name in room else ())]
                for name, row in rows.items()
            },
        )
    rows = {name: against_latest(row) for name, row in result["processes"].items()}
    table("2 workers, 2 processes", ["ms", "time", "middle half"], rows)
    print(*(result["missed"] or ["all goals are met"]), sep="\n")


def table(title: str, head: list[str], rows: dict[str, list[str]]) -> None:
    """Print a table in Markdown."""
    lines = [["policy", *head], *([name, *row] + [""] * (len(head) - len(row)) for name, row in rows.items())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"{title}\n")
    for number, line in enumerate(lines):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    print(flush=True)


def against_latest(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['milliseconds']:.1f}",
        percent(row["ratio"]),
        f"{percent(row['low'])} to {percent(row['high'])}",
    ]


def more_memory(row: dict[str, Any]) -> list[str]:
    return [mb(of(row[what])) for what in ("more", "copies") for of in (sum, max)]


def percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def mb(size: float) -> str:
    return f"{size / 1e6:.1f}"


def say(line: str) -> None:
    """Progress."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
