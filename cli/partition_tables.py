"""Partitions as `fxpipe plan` shows them: a row a worker, and as JSON."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from fxpipe.cli.output import echo, print_table, size

from fxpipe.planner.links import Links

if TYPE_CHECKING:
    from fxpipe.planner.partition import Load, Partition
    from fxpipe.planner.profile import Profile


def partition_json(partition: Partition) -> dict[str, Any]:
    """A partition: cuts as unit numbers, times in milliseconds a microbatch, memory in bytes."""
    return {
        "forward_cuts": list(partition.forward[1:-1]),
        "backward_cuts": list(partition.backward[1:-1]),
        "weight_cuts": list(partition.weights[1:-1]),
        "recompute": [list(run) for run in partition.recompute],
        "bottleneck_ms": 1e3 * partition.bottleneck,
        "efficiency": partition.efficiency,
        "exact": partition.exact,
        "lower_bound_ms": 1e3 * partition.lower_bound,
        "memory_bytes": [load.memory for load in partition.loads],
        "workers": [_milliseconds(load) for load in partition.loads],
    }


def best_possible(partition: Partition) -> str:
    """Whether a partition is proved to be the best, or the efficiency that the best one could have."""
    return "proved" if partition.exact else f"≤ {partition.ideal / partition.lower_bound:.3f}"


def print_partition(profile: Profile, partition: Partition, title: str = "") -> None:
    """A row a worker; where workers have replicas, what one of them does."""
    three = partition.mode == "three-way"
    rows = []
    idle = []
    for k, load in enumerate(partition.loads):
        if all(cuts[k] == cuts[k + 1] for cuts in (partition.forward, partition.backward, partition.weights)):
            idle.append(str(k))
            continue
        row = [f"worker {k}", *([f"×{partition.replicas[k]}"] if partition.replicas else [])]
        for cuts in (partition.forward, partition.backward, *([partition.weights] if three else [])):
            first, end = cuts[k], cuts[k + 1]
            row.append(f"{profile.units[first].name} ({end - first})" if end > first else "–")
        for value in (load.forward, load.backward, load.weight, load.update, load.recompute, load.exposed, load.total):
            row.append(f"{1e3 * value:.2f}")
        rows.append([*row, size(load.memory)])
    where = ["F from (units)", "B from", *(["W from"] if three else [])]
    named = ["", *(["replicas"] if partition.replicas else []), *where]
    echo(title or f"{partition.mode}, milliseconds a microbatch")
    print_table([*named, "F", "B", "W", "update", "again", "exposed", "sum", "memory"], rows, left=len(named))
    if idle:
        echo(f"nothing to do for worker{'s' if len(idle) > 1 else ''} {', '.join(idle)}\n")


def described_links(links: Links) -> str:
    """Links in a few words."""
    if links.free:
        return "no communication"
    if isinstance(links.bandwidth, tuple) or isinstance(links.latency, tuple):
        return "links by matrix"
    return f"links {links.bandwidth / 1e9:.4g} GB/s, {links.latency * 1e6:.4g} µs"


def _milliseconds(load: Load) -> dict[str, float]:
    return {name: value if name == "memory" else 1e3 * value for name, value in dataclasses.asdict(load).items()}
