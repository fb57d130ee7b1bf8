"""Branches side by side against a chain of workers: four branches simulated, two trained for real; see README.md."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
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

FXPIPE = "from fxpipe.cli.main import main; main()"
COMPILES = {
    "chain": f"from fxpipe.passes.analysis import branches; branches.LEAST = 2.0; {FXPIPE}",
    "side by side": FXPIPE,
}
"""`fxpipe`, and the same where no branch has enough work to be put together: then units are in the order of the code,
each worker gets half of both towers, and the second one waits for the first."""


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
    """Two towers and a head on two workers, with the planner's cuts, in turn."""
    rows = []
    asked = ["--workers=2", "--schedule=1f1b", "--cost=analytic", "--threads=1"]
    with tempfile.TemporaryDirectory(prefix="fxpipe_branches_") as name:
        out = Path(name) / "out"
        for count in microbatches:
            builds = {kind: Path(name) / f"{kind}-{count}" for kind in COMPILES}
            for kind, build in builds.items():
                command = ["compile", HERE / "towers.py", *asked, f"--microbatches={count}", "-o", build]
                subprocess.run([sys.executable, "-c", COMPILES[kind], *command], check=True, stdout=subprocess.DEVNULL)
            times: dict[str, list[float]] = {kind: [] for kind in builds}
            for _ in range(rounds):
                for kind, build in builds.items():
                    run_fxpipe("run", build, "--steps", steps, "--threads", 1, "--out", out)
                    times[kind].append(minibatch_seconds(out))
            chain, branches = (1e3 * statistics.median(times[kind]) for kind in ("chain", "side by side"))
            gain = chain / branches
            rows.append({"workers": 2, "schedule": "1f1b", "microbatches": count, "gain": gain, "rounds": times})
            print(f"| real: 2 | 1f1b | {count} | {chain:.1f} | {branches:.1f} | {gain:.2f} |", flush=True)
    return rows


if __name__ == "__main__":
    main()
