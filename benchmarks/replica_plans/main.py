"""Replicas chosen on published profiles, in PipeDream's cost model and in fxpipe's; see README.md."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import sizes
from pipedream_model import Chain, best

from fxpipe.planner.links import Links
from fxpipe.planner.partition import partitions
from fxpipe.planner.pipedream import read_profile
from fxpipe.planner.profile import Profile, Unit, Value, backward_values
from fxpipe.planner.replicated import notation, replicated_partitions
from fxpipe.planner.setting import Setting

PAPER: dict[tuple[str, int], tuple[int, ...]] = {
    ("vgg16", 16): (15, 1),
    ("resnet50", 16): (16,),
    ("alexnet", 16): (15, 1),
    ("gnmt", 4): (1,) * 4,
    ("gnmt", 16): (1,) * 16,
    ("made-up", 4): (3, 1),
}
"""Of SOSP 2019, table 1, from memory (README.md); the made-up one is only there to see that this runs."""


def main() -> None:
    """Plan every profile of a folder and write a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="PipeDream graph.txt files, or fxpipe profiles")
    parser.add_argument("--gpus", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--models", nargs="+", default=["vgg16", "resnet50", "alexnet", "gnmt"])
    parser.add_argument("--gigabits", type=float, default=10.0, help="bandwidth between any two processes")
    parser.add_argument("--sizes", action="store_true", help="instead, how long plans of a GPT take, by its size")
    parser.add_argument("--quick", action="store_true", help="a small profile made up here: only to see that it runs")
    parser.add_argument("--out", type=Path, help="default: result.json here, or nowhere with --quick")
    options = parser.parse_args()
    if options.sizes or options.quick:
        for units, gpus in [(24, 8)] if options.quick else sizes.ALL:
            sizes.show(sizes.planned(units, gpus))
    if options.sizes:
        return
    if options.quick:
        profiles, options.gpus = {"made-up": made_up()}, [4]
    elif options.folder is None:
        parser.error("name a folder of profiles, or --quick")
    else:
        paths = {path.stem: path for path in sorted(options.folder.iterdir()) if path.suffix in (".txt", ".json")}
        if missing := [name for name in options.models if name not in paths]:
            parser.error(f"no profiles of {', '.join(missing)} in {options.folder}")
        profiles = {name: read_profile(paths[name]) for name in options.models}
    bandwidth, rows = options.gigabits * 1e9 / 8, []
    for name, profile in profiles.items():
        for gpus in options.gpus:
            row = {"profile": name, "gpus": gpus, "gigabits": options.gigabits}
            row |= in_their_model(name, profile, gpus, bandwidth)
            row |= in_ours(profile, gpus, bandwidth)
            rows.append(row)
            show(row)
    if out := options.out or (None if options.quick else Path(__file__).parent / "result.json"):
        out.write_text(json.dumps(rows, indent=1) + "\n")
    print("milliseconds a minibatch of PipeDream's, which is a microbatch of fxpipe's; * not proved to be the best")


def made_up(layers: int = 8) -> Profile:
    """A chain like VGG: layers that compute, and a last one that has the weights."""
    units = [Unit(f"layer{i}", 4.0 + i % 3, 8.0, output_bytes=1e6, parameter_bytes=1e5) for i in range(layers)]
    units.append(Unit("last", 2.0, 4.0, output_bytes=1e4, parameter_bytes=4e8))
    values = [Value(i, unit.output_bytes, (i + 1,)) for i, unit in enumerate(units[:-1])]
    return Profile(tuple(units), tuple(values), backward_values(units, values))


def in_their_model(name: str, profile: Profile, gpus: int, bandwidth: float) -> dict[str, Any]:
    """The best configuration of the released optimizer's cost model, and the paper's with its best cuts in it."""
    chain, found = Chain.of(profile), {}
    for key, activations in (("theirs", False), ("theirs_with_activations", True)):
        seconds, stages = best(chain, gpus, bandwidth, activations=activations)
        paper = PAPER.get((name, gpus))
        told = None if paper is None else 1e3 * best(chain, 0, bandwidth, replicas=paper, activations=activations)[0]
        data_parallel = 1e3 * best(chain, 0, bandwidth, replicas=(gpus,), activations=activations)[0]
        found[key] = {
            "replicas": [m for _, m in stages],
            "ms": 1e3 * seconds,
            "paper": paper,
            "paper_ms": told,
            "data_parallel_ms": data_parallel,
        }
    return found


def in_ours(profile: Profile, gpus: int, bandwidth: float) -> dict[str, Any]:
    """What fxpipe's planner finds for each kind of cuts; half of each backward is W."""
    profile = profile.split_backward(0.5)
    setting = Setting(links=Links(bandwidth), microbatches=gpus, evenly=True)
    begin = time.perf_counter()
    plans = replicated_partitions(profile, setting, gpus)
    found: dict[str, Any] = {"seconds": time.perf_counter() - begin}
    for mode, plan in plans.items():
        found[mode] = {"replicas": list(plan.replicas), "ms": 1e3 * plan.bottleneck, "exact": plan.exact}
    for key, replicas in (("data_parallel", (gpus,)), ("pipeline", (1,) * gpus)):
        workers = setting.workers(len(replicas), replicas)
        found[key] = 1e3 * partitions(profile, workers, ("same",))["same"].bottleneck
    return found


def show(row: dict[str, Any]) -> None:
    """One case, a line a cost model."""
    print(f"{row['profile']}, {row['gpus']} GPUs, {row['gigabits']:g} Gbit/s")
    for key, title in (("theirs", "PipeDream's model"), ("theirs_with_activations", "with activations")):
        made = row[key]
        line = f"  {title:<18} {notation(made['replicas']):<24}{made['ms']:9.2f}"
        line += f"  data parallel {made['data_parallel_ms']:9.2f}"
        if made["paper"] is not None:
            verdict = "found" if tuple(made["replicas"]) == tuple(made["paper"]) else "beaten"
            if verdict == "beaten" and made["ms"] >= made["paper_ms"] * (1 - 1e-9):
                verdict = "equalled"
            line += f"  paper's {notation(made['paper'])}: {made['paper_ms']:.2f}, {verdict}"
        print(line)
    for mode in ("same", "bidirectional", "three-way"):
        made = row[mode]
        gain = row["same"]["ms"] / made["ms"]
        star = "" if made["exact"] else "*"
        print(f"  fxpipe {mode:<14} {notation(made['replicas']):<24}{made['ms']:8.2f}{star:<2}{gain:.3f}×")
    rest = f"data parallel {row['data_parallel']:.2f}, plain pipeline {row['pipeline']:.2f}"
    print(f"  fxpipe {rest}; planned in {row['seconds']:.1f} s", flush=True)


if __name__ == "__main__":
    main()
