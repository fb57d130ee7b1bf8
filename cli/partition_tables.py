"""Partitions as `fxpipe plan` shows them: a row a worker, then a row a partition; and as JSON."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fxpipe.cli.output import echo, print_table, size

from fxpipe.planner.links import Links

if TYPE_CHECKING:
    from fxpipe.planner.partition import Load, Partition
    from fxpipe.planner.profile import PlanInput, Profile
    from fxpipe.planner.setting import Setting


BESIDE = {"data_parallel": "data parallelism", "pipeline": "plain pipeline"}
"""What plans with replicas are compared with, by its name in JSON."""


@dataclass(frozen=True)
class TimedPartition:
    """A partition, the seconds of a minibatch with it, and the bubble, where it was simulated."""

    partition: Partition
    seconds: float
    bubble: float = 0.0


@dataclass(frozen=True)
class PlannedCuts:
    """The best partition of each kind of cuts.

    Attributes:
        found: by mode; None where nothing fits.
        processes: of all workers together, where these have replicas; else None, and minibatches are simulated.
        beside: as many processes without a choice, all replicas of one worker, or none: None where it does not fit, or
            has fewer microbatches than replicas.
    """

    subject: PlanInput
    setting: Setting
    found: dict[str, TimedPartition | None]
    processes: int | None = None
    beside: dict[str, TimedPartition | None] = field(default_factory=dict)

    @property
    def first(self) -> Partition:
        """That of the first kind of cuts that fits."""
        return next(timed for timed in self.found.values() if timed is not None).partition

    def as_json(self) -> dict[str, Any]:
        """One object: what was planned for, and each partition."""
        subject = self.subject
        shared = {"processes": self.processes, "shared_out_evenly": self.setting.evenly}
        return {
            "ideal_ms": 1e3 * self.first.ideal,
            "units": [u.name for u in subject.whole.units],
            "microbatches": subject.microbatches,
            **({} if self.processes is None else shared),
            **{name: self._json(timed) for name, timed in (self.found | self.beside).items()},
        }

    def _json(self, timed: TimedPartition | None) -> dict[str, Any] | None:
        from fxpipe.planner.replicated import notation

        if timed is None:
            return None
        partition, milliseconds = timed.partition, 1e3 * timed.seconds
        result: dict[str, Any] = _partition_json(partition)
        if self.processes is None:
            result |= {"simulated_ms": milliseconds / self.subject.microbatches, "bubble": timed.bubble}
        else:
            replicas = partition.replicas
            result |= {"replicas": list(replicas), "configuration": notation(replicas), "processes": sum(replicas)}
            result["minibatch_ms"] = milliseconds
        if self.subject.samples is not None:
            result["samples_per_second"] = self._rate(timed)
        return result

    def _rate(self, timed: TimedPartition) -> float:
        assert self.subject.samples is not None
        return self.subject.samples / timed.seconds if timed.seconds else math.inf

    def show(self) -> None:
        """A table a kind of cuts, with a row a worker; then what minibatches take."""
        from fxpipe.planner.replicated import notation

        subject, shared, shown = self.subject, self.processes is not None, dict[tuple[tuple[int, ...], ...], str]()
        for mode, timed in self.found.items():
            if timed is None:
                continue
            partition = timed.partition
            what = (partition.forward, partition.backward, partition.weights, partition.replicas)
            if what in shown:
                echo(f"{mode}: as {shown[what]}\n")
            else:
                of = f", {notation(partition.replicas)}: milliseconds of a process, a microbatch of the minibatch"
                title = mode + (of if shared else ", milliseconds a microbatch")
                _print_partition(subject.of(mode), partition, title)
            shown.setdefault(what, mode)
        time = ["minibatch"] if shared else ["simulated", "bubble"]
        headers = ["", "replicas", "processes"] if shared else ["cuts"]
        headers += ["slowest", "which", "efficiency", "best possible", *time]
        headers += [] if subject.samples is None else ["samples/s"]
        rows = [self._row(BESIDE.get(name, name), timed) for name, timed in (self.found | self.beside).items()]
        rows = [row + [""] * (len(headers) - len(row)) for row in rows]
        print_table(headers, rows, left=2 if shared else 1)
        ideal, units = f"ideal {1e3 * self.first.ideal:.2f} ms a microbatch", f"{len(subject.whole.units)} units"
        counted = [f"{subject.microbatches} microbatches a minibatch"] if shared else []
        machines = self.setting.machines
        where = f" between machines of {machines.size}, {_described_links(machines.inner)} in them" if machines else ""
        echo(" · ".join([ideal, *counted, units, f"{_described_links(self.setting.links)}{where}"]))
        multiple = math.lcm(*self.first.replicas)
        if shared and self.setting.evenly and subject.microbatches % multiple:
            echo(
                f"microbatches count as shared out evenly, which {notation(self.first.replicas)} can do with multiples "
                f"of {multiple}: --microbatches {multiple}"
            )

    def _row(self, name: str, timed: TimedPartition | None) -> list[str]:
        from fxpipe.planner.replicated import notation

        if timed is None:
            return [name, "does not fit"]
        partition, seconds = timed.partition, timed.seconds
        slowest = max(range(len(partition.loads)), key=lambda k: partition.loads[k].total)
        best = "proved" if partition.exact else f"≤ {partition.ideal / partition.lower_bound:.3f}"
        replicas = [notation(partition.replicas), str(sum(partition.replicas))] if self.processes is not None else []
        row = [name, *replicas, f"{1e3 * partition.bottleneck:.2f} ms", f"worker {slowest}"]
        row += [f"{partition.efficiency:.3f}", best]
        if self.processes is None:
            row += [f"{1e3 * seconds / self.subject.microbatches:.2f} ms", f"{100 * timed.bubble:.0f} %"]
        else:
            row.append(f"{1e3 * seconds:.1f} ms")
        return row if self.subject.samples is None else [*row, f"{self._rate(timed):.1f}"]


def _partition_json(partition: Partition) -> dict[str, Any]:
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


def _print_partition(profile: Profile, partition: Partition, title: str) -> None:
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
    echo(title)
    print_table([*named, "F", "B", "W", "update", "again", "exposed", "sum", "memory"], rows, left=len(named))
    if idle:
        echo(f"nothing to do for worker{'s' if len(idle) > 1 else ''} {', '.join(idle)}\n")


def _described_links(links: Links) -> str:
    """Links in a few words."""
    if links.free:
        return "no communication"
    if isinstance(links.bandwidth, tuple) or isinstance(links.latency, tuple):
        return "links by matrix"
    return f"links {links.bandwidth / 1e9:.4g} GB/s, {links.latency * 1e6:.4g} µs"


def _milliseconds(load: Load) -> dict[str, float]:
    return {name: value if name == "memory" else 1e3 * value for name, value in dataclasses.asdict(load).items()}
