"""Partitions as `fxpipe plan` shows them: a row for each worker, then a row for each partition; and as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field

from fxpipe.cli.output import echo, print_columns
from fxpipe.inspection.table import (
    CLOCK,
    COUNT,
    SHARE,
    SIZE,
    SPAN,
    TEXT,
    WORKERS,
    WRITTEN,
    Column,
    Json,
    ShownTable,
    TimeUnit,
    described_links,
    plural,
)
from fxpipe.inspection.tables import LOADS, WORKER
from fxpipe.inspection.workers import load_row
from fxpipe.planner.branches import graph_of_cuts
from fxpipe.planner.partition import Partition
from fxpipe.planner.profile import PlanInput, Profile
from fxpipe.planner.replicated import notation
from fxpipe.planner.setting import Setting
from fxpipe.schedule import Schedule
from fxpipe.schedule.graph import graph_text

PLAIN = {"data_parallel": "data parallelism", "pipeline": "plain pipeline"}
"""Titles of the plain plans that plans with replicas are compared with, by their names in JSON."""
BYTES = ("memory", "values")
"""What of a worker's load is no time."""


@dataclass(frozen=True)
class TimedPartition:
    """A partition, the seconds of a minibatch with it, and the bubble, where it was simulated."""

    partition: Partition
    seconds: float
    bubble: float = 0.0
    faster: str = ""  # the replicas of the plan that is faster, if this one was preferred because it is simpler
    longer: float = 0.0  # how much longer this one takes, as a share


@dataclass(frozen=True)
class PlannedCuts:
    """The best partition of each kind of cuts."""

    subject: PlanInput
    setting: Setting
    found: dict[str, TimedPartition | None]  # by mode; None where nothing fits
    # of all workers together, if workers have replicas; else None, and minibatches are simulated
    processes: int | None = None
    # plain data parallelism and, for few processes, a plain pipeline with as many processes. None for one that does not
    # fit, or has fewer microbatches than replicas
    plain: dict[str, TimedPartition | None] = field(default_factory=dict)

    @property
    def first(self) -> Partition:
        """The partition of the first kind of cuts that fits."""
        return next(timed for timed in self.found.values() if timed is not None).partition

    @property
    def schedule(self) -> Schedule:
        """The schedule of these workers, the same for all partitions."""
        return self.setting.schedule_of(len(self.first.loads))

    def facts(self) -> Json:
        """One object: what was planned for, and each partition."""
        subject = self.subject
        shared = {"processes": self.processes, "shared_out_evenly": self.setting.evenly}
        return {
            "ideal_ms": 1e3 * self.first.ideal,
            "units": [u.name for u in subject.whole.units],
            "microbatches": subject.microbatches,
            **({} if self.processes is None else shared),
            **{name: self._json(timed) for name, timed in (self.found | self.plain).items()},
        }

    def _json(self, timed: TimedPartition | None) -> Json | None:
        """A partition: cuts as unit numbers, times in milliseconds (a microbatch's, unless named), memory in bytes."""
        if timed is None:
            return None
        partition, milliseconds = timed.partition, 1e3 * timed.seconds
        result: Json = {
            "forward_cuts": list(partition.forward[1:-1]),
            "backward_cuts": list(partition.backward[1:-1]),
            "weight_cuts": list(partition.weights[1:-1]),
            "recompute": [list(run) for run in partition.recompute],
            "bottleneck_ms": 1e3 * partition.bottleneck,
            "efficiency": partition.efficiency,
            "exact": partition.exact,
            "lower_bound_ms": 1e3 * partition.lower_bound,
            "memory_bytes": [load.memory for load in partition.loads],
            "moved_bytes": partition.moved,
            "workers": [{n: v if n in BYTES else 1e3 * v for n, v in asdict(load).items()} for load in partition.loads],
        }
        if self.processes is None:
            result |= {"simulated_ms": milliseconds / self.subject.microbatches, "bubble": timed.bubble}
        else:
            replicas = partition.replicas
            result |= {"replicas": list(replicas), "configuration": notation(replicas), "processes": sum(replicas)}
            result["minibatch_ms"] = milliseconds
            result["instead_of"] = timed.faster or None
        if (samples := self.subject.samples) is not None:
            result["samples_per_second"] = samples / timed.seconds if timed.seconds else math.inf
        return result

    def show(self, facts: Json) -> None:
        """A table for each kind of cuts, with a row for each worker; then the times of minibatches."""
        subject, shared, shown = self.subject, self.processes is not None, dict[tuple[tuple[int, ...], ...], str]()
        for mode, timed in self.found.items():
            if timed is None:
                continue
            partition = timed.partition
            what = (partition.forward, partition.backward, partition.weights, partition.replicas)
            if what in shown:
                echo(f"{mode}: the same as {shown[what]}\n")
            else:
                of = f", {notation(partition.replicas)}: one process, per microbatch of the minibatch"
                title = mode + (of if shared else ", per microbatch")
                _print_partition(subject.of(mode), partition, title)
                if timed.faster:
                    echo(f"preferred because it is simpler: {timed.faster} takes only {timed.longer:.1%} less\n")
            shown.setdefault(what, mode)
        few = f"{self.processes} replicas, {subject.microbatches} microbatches"
        why = {"data_parallel": few} if shared and subject.microbatches < (self.processes or 0) else {}
        rows = [
            {"name": PLAIN.get(name, name) + ("" if timed else f": {why.get(name, 'does not fit')}")}
            | (facts[name] or {})
            for name, timed in (self.found | self.plain).items()
        ]
        print_columns(ShownTable(COLUMNS, rows).filled(), whole=True)
        ideal, time = 1e3 * self.first.ideal, TimeUnit([1e3 * self.first.ideal])
        size = "each as large as the profile's"
        if subject.samples is not None:
            size = f"of {plural(subject.samples // subject.microbatches, 'sample')}"
        counted = [f"{plural(subject.microbatches, 'microbatch', 'microbatches')} a minibatch, {size}"] * shared
        machines = self.setting.machines
        where = f" between machines of {machines.size}, {described_links(machines.inner)} in them" if machines else ""
        units, links = f"{len(subject.whole.units)} units", f"{described_links(self.setting.links)}{where}"
        echo(" · ".join([f"\nideal {time(ideal)} {time.unit} a microbatch", *counted, units, links]))
        multiple = math.lcm(*self.first.replicas)
        if shared and self.setting.evenly and subject.microbatches % multiple:
            echo(
                f"times are for evenly shared microbatches, which {notation(self.first.replicas)} has with multiples "
                f"of {multiple}: --microbatches {multiple}"
            )


def _slowest(row: Json) -> int | None:
    totals = [load["total"] for load in row.get("workers", ())]
    return totals.index(max(totals)) if totals else None


def _best_possible(row: Json) -> str | None:
    """Whether a partition is proved to be the best, or the efficiency that the best one could have."""
    if "exact" not in row:
        return None
    return "proved" if row["exact"] else f"≤ {row['efficiency'] * row['bottleneck_ms'] / row['lower_bound_ms']:.3f}"


COLUMNS = (
    Column("cuts", "name", TEXT), Column("replicas", "configuration", TEXT),
    Column("processes", "processes", COUNT), Column("slowest", "bottleneck_ms", SPAN),
    Column("worker", _slowest, WORKERS),
    Column("efficiency", "efficiency", CLOCK), Column("best possible", _best_possible, WRITTEN),
    Column("moved", "moved_bytes", SIZE),
    Column("simulated", "simulated_ms", SPAN), Column("minibatch", "minibatch_ms", SPAN),
    Column("bubble", "bubble", SHARE), Column("samples/s", "samples_per_second"),
)  # fmt: skip
"""The best cuts of each kind, from their JSON."""


def _print_partition(profile: Profile, partition: Partition, title: str) -> None:
    """A row for each worker; if workers have replicas, for one of them."""
    bounds = {"F": partition.forward, "B": partition.backward}
    bounds |= {"W": partition.weights} if partition.mode == "three-way" else {}

    def begin(cuts: tuple[int, ...], worker: int) -> str | None:
        first, end = cuts[worker], cuts[worker + 1]
        return f"{profile.units[first].name} ({end - first})" if first < end else None

    rows: list[Json] = [
        {"worker": k, **load_row(load), **{kind: begin(cuts, k) for kind, cuts in bounds.items()}}
        for k, load in enumerate(partition.loads)
    ]
    idle = [str(row["worker"]) for row in rows if not any(row[kind] for kind in bounds)]
    replicas = dict(enumerate(partition.replicas))
    columns = [WORKER, Column("replicas", lambda row: replicas.get(row["worker"]), COUNT)][: 1 + bool(replicas)]
    columns += [Column(f"{kind} from", kind, TEXT) for kind in bounds]
    echo(title)
    print_columns(ShownTable([*columns, *LOADS], [row for row in rows if str(row["worker"]) not in idle]), whole=True)
    if not partition.replicas and (text := graph_text(graph_of_cuts(profile, partition.cuts))):
        echo(text)
    echo(f"nothing to do for worker{'s' if len(idle) > 1 else ''} {', '.join(idle)}\n" if idle else "")
