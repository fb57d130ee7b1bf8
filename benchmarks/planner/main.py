"""Efficiency of shared, independent and three-way cuts on published profiles; see README.md."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from fxpipe.planner.links import Links
from fxpipe.planner.partition import Partition, partitions, repriced
from fxpipe.planner.pipedream import from_pipedream, read_profile
from fxpipe.planner.profile import Profile
from fxpipe.planner.separate_cuts import worth_messages
from fxpipe.planner.setting import Setting
from fxpipe.schedule import make
from fxpipe.simulator.of_partition import scenario_of_partition
from fxpipe.simulator.simulate import simulate

LINKS = {
    "none": Links(),
    "10 Gbit/s": Links(1.25e9, 50e-6),
    "100 Gbit/s": Links(12.5e9, 10e-6),
    "200 GB/s": Links(200e9, 2e-6),
}


def main() -> None:
    """Plan every profile of a folder and write a table of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="PipeDream graph.txt files, or fxpipe profiles")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--weight-fraction", type=float, default=0.5, help="part of backward that is W, for three-way")
    parser.add_argument("--quick", action="store_true", help="a small profile made up here: only to see that it runs")
    parser.add_argument("--out", type=Path, help="default: result.json here, or nowhere with --quick")
    options = parser.parse_args()
    if options.quick:
        profiles = {"made-up": from_pipedream(made_up())}
        options.workers = [2, 4]
    elif options.folder is None:
        parser.error("name a folder of profiles, or --quick")
    else:
        paths = sorted(p for p in options.folder.iterdir() if p.suffix in (".txt", ".json"))
        profiles = {path.stem: read_profile(path) for path in paths}
    if not profiles:
        parser.error(f"no profiles in {options.folder}")
    rows = []
    titles = f"{'same':>15}{'bidirectional':>15}{'three-way':>15}{'taken':>15}{'seconds':>9}"
    print(f"{'profile':<16}{'N':>3}  {'links':<11}{titles}")
    for stem, read in profiles.items():
        profile = read.split_backward(options.weight_fraction)
        for workers in options.workers:
            for name, links in LINKS.items():
                row = {"profile": stem, "workers": workers, "links": name, **plan(profile, workers, links)}
                rows.append(row)
                cells = "".join(f"{cell(row[mode]):>15}" for mode in ("same", "bidirectional", "three-way"))
                print(f"{stem:<16}{workers:>3}  {name:<11}{cells}{row['taken']:>15}{row['seconds']:>9.2f}", flush=True)
    if out := options.out or (None if options.quick else Path(__file__).parent / "result.json"):
        out.write_text(json.dumps(rows, indent=1) + "\n")
    print("taken: of same and bidirectional, by a compile that was given these links")
    print("efficiency: ideal time over the slowest worker's; * not proved to be the best; in brackets as simulated")


def made_up(layers: int = 10) -> str:
    """A chain in PipeDream's form, whose layers shrink in activations and grow in parameters."""
    lines = [
        f"node{i} -- Layer{i} -- forward_compute_time={1 + i % 3}.0, backward_compute_time={2 + i % 4}.0, "
        f"activation_size={1e6 / i}, parameter_size={1e5 * i}"
        for i in range(1, layers + 1)
    ]
    return "\n".join([*lines, *(f"\tnode{i} -- node{i + 1}" for i in range(1, layers))])


def plan(profile: Profile, workers: int, links: Links) -> dict[str, Any]:
    """Every mode's efficiency, planned and simulated, the mode that a compile takes, and the seconds of planning."""
    setting = Setting(links=links).workers(workers)
    begin = time.perf_counter()
    found = partitions(profile, setting)
    seconds = time.perf_counter() - begin

    def slowest(partition: Partition, over: Links) -> float:
        return repriced(profile, Setting(links=over).workers(workers), partition).bottleneck

    separate = worth_messages(found["bidirectional"], found["same"], slowest, links, profile.noise(workers))
    taken = "bidirectional" if separate else "same"
    return {
        "seconds": seconds,
        "taken": taken,
        **{mode: measure(profile, p, links, workers) for mode, p in found.items()},
    }


def measure(profile: Profile, partition: Partition, links: Links, workers: int) -> dict[str, Any]:
    """What a partition promises, and what the simulator makes of it."""
    setting, schedule = Setting(links=links).workers(workers), make("async", workers, 1)
    scenario = scenario_of_partition(profile, partition, setting, schedule)
    simulated = simulate(schedule, scenario, 6 * workers + 10).seconds_per_minibatch
    return {
        "efficiency": partition.efficiency,
        "exact": partition.exact,
        "simulated": partition.ideal / simulated,
        "recomputes": bool(partition.recompute),
        "moved_bytes": partition.moved,
    }


def cell(row: dict[str, Any]) -> str:
    """`0.994 (0.991)`, with a star where it is not proved."""
    return f"{row['efficiency']:.3f}{'' if row['exact'] else '*'} ({row['simulated']:.3f})"


if __name__ == "__main__":
    main()
