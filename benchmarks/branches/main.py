"""Branches side by side against a chain of workers: four branches simulated, two trained for real; see README.md."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from branched import branched
from commands import minibatch_seconds, run_fxpipe

from fxpipe.planner.branches import graph_of_cuts
from fxpipe.planner.partition import Partition, partitions
from fxpipe.planner.profile import Profile
from fxpipe.planner.setting import Setting
from fxpipe.schedule.graph import Graph
from fxpipe.schedule.versions import most_missed
from fxpipe.search.side_by_side import planned_side_by_side
from fxpipe.simulator.of_partition import scenario_of_partition
from fxpipe.simulator.simulate import simulate, steady_minibatches

HERE = Path(__file__).resolve().parent
LAYERS = {4: 4, 8: 4, 16: 8}
"""Of each of four branches, by the number of workers."""

WHERE = {"side by side": ("right.0", "head"), "chain": ("left.4.linear", "head")}
"""Where workers begin: with the second tower, or with the end of the first one, so that the second worker waits."""


def main() -> None:
    """Simulate and measure, print tables and keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="4 workers, and 1 round: only to see that it runs")
    options = parser.parse_args()
    counts = list(LAYERS)[:1] if options.quick else list(LAYERS)
    if options.quick:
        options.rounds, options.steps = 1, 6
    rows = [row for workers in counts for row in simulated(workers)]
    rows += measured(options.rounds, options.steps, (2,) if options.quick else (1, 2, 4))
    if not options.quick:
        (HERE / "result.json").write_text(json.dumps(rows, indent=1) + "\n")
    gains = [row["gain"] for row in rows if row["schedule"] == "1f1b" and row["microbatches"] <= 4]
    missed = [gain for gain in gains if gain < 1.2]
    print(f"missed: {len(missed)} of {len(gains)} below 1.2" if missed else "goals are met: 1.2 with few microbatches")


def simulated(workers: int) -> list[dict[str, Any]]:
    """Four equal branches: the planner's best chain, and with branches side by side."""
    profile, rows = branched(*[LAYERS[workers]] * 4), []
    for schedule, microbatches in (("1f1b", 1), ("1f1b", 2), ("1f1b", 4), ("1f1b", 8), ("zb-h1", 4), ("async", 1)):
        setting = Setting(schedule=schedule, microbatches=microbatches)
        chain = partitions(profile, setting.workers(workers), ("same",))["same"]
        plan = planned_side_by_side(profile, setting, workers, ("same",))["same"]
        found = [
            _forecast(profile, setting, one, graph)
            for one, graph in ((chain, ()), (plan, graph_of_cuts(profile, plan.cuts)))
        ]
        seconds, missed, held = zip(*found, strict=True)
        gain = seconds[0] / seconds[1]
        rows.append(
            {"workers": workers, "schedule": schedule, "microbatches": microbatches, "gain": gain}
            | {"ms": [1e3 * s for s in seconds], "missed": missed, "held": held}
        )
        print(
            f"| {workers} | {schedule} | {microbatches} | {1e3 * seconds[0]:.1f} | {1e3 * seconds[1]:.1f} | "
            f"{gain:.2f} | {missed[0]} → {missed[1]} | {held[0]} → {held[1]} |",
            flush=True,
        )
    return rows


def _forecast(profile: Profile, setting: Setting, partition: Partition, graph: Graph) -> tuple[float, int, int]:
    """Seconds of a minibatch, the most updates that a forward misses, and the most microbatches in flight."""
    workers = setting.workers(len(partition.loads), graph=graph)
    schedule = setting.schedule_of(workers.count).along(graph)
    scenario = scenario_of_partition(profile, partition, workers, schedule)
    run = simulate(schedule, scenario, steady_minibatches(schedule))
    return run.seconds_per_minibatch, most_missed(schedule), max(workers.in_flight)


def measured(rounds: int, steps: int, microbatches: tuple[int, ...]) -> list[dict[str, Any]]:
    """Two towers and a head on three workers, in turn."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="fxpipe_branches_") as name:
        folder = Path(name)
        for count in microbatches:
            for kind, begins in WHERE.items():
                at = [f"--fp-cut={path}" for path in begins]
                asked = ("-n", 3, "--schedule", "1f1b", "--microbatches", count, "--cost", "analytic", "--threads", 1)
                run_fxpipe("compile", HERE / "towers.py", *asked, *at, "-o", folder / f"{kind}-{count}")
            times: dict[str, list[float]] = {kind: [] for kind in WHERE}
            for _ in range(rounds):
                for kind in WHERE:
                    run_fxpipe(
                        "run", folder / f"{kind}-{count}", "--steps", steps, "--threads", 1, "--out", folder / "out"
                    )
                    times[kind].append(minibatch_seconds(folder / "out"))
            chain, branches = (1e3 * statistics.median(times[kind]) for kind in ("chain", "side by side"))
            gain = chain / branches
            rows.append({"workers": 3, "schedule": "1f1b", "microbatches": count, "gain": gain, "rounds": times})
            print(f"| real: 3 | 1f1b | {count} | {chain:.1f} | {branches:.1f} | {gain:.2f} |", flush=True)
    return rows


if __name__ == "__main__":
    main()
