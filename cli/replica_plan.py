"""`fxpipe plan --gpus N`: how many processes each worker has, which cuts go with them, and what a minibatch takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click
from fxpipe.cli.output import echo, print_table
from fxpipe.cli.partition_tables import best_possible, described_links, partition_json, print_partition
from fxpipe.cli.planned import Say, Source
from fxpipe.cli.replica_options import ReplicaOptions

from fxpipe.lowering.options import AUTO, CompileOptions

if TYPE_CHECKING:
    from fxpipe.planner.partition import Partition
    from fxpipe.planner.profile import PlanInput
    from fxpipe.planner.setting import Setting


@dataclass(frozen=True)
class TimedPartition:
    """A partition, and seconds of a minibatch with it."""

    partition: Partition
    seconds: float


@dataclass(frozen=True)
class ReplicaPlan:
    """The best partition of each kind of cuts, and as many processes without a choice: all replicas, or none.

    Attributes:
        found: by mode; None where nothing fits.
        data_parallel, pipeline: None where it does not fit, or has fewer microbatches than replicas.
    """

    subject: PlanInput
    setting: Setting
    processes: int
    found: dict[str, TimedPartition | None]
    data_parallel: TimedPartition | None
    pipeline: TimedPartition | None


def plan_replicas(
    source: Source, options: CompileOptions, wanted: ReplicaOptions, modes: Sequence[str], is_model: bool, say: Say
) -> ReplicaPlan:
    """Plan with replicas, given or chosen.

    Raises:
        CutError: nothing fits into memory; processes differ; there are fewer microbatches than replicas.
        PolicyError: the policy makes no sense with so many microbatches.
    """
    from fxpipe.lowering.choose_codecs import PLAIN, ratios_of
    from fxpipe.planner.partition import TooLittleMemory, partitions
    from fxpipe.planner.replicated import replicated_partitions

    if options.schedule == AUTO:
        raise click.UsageError("replicas are planned for one schedule: name it")
    given = () if wanted.gpus else wanted.given(options.workers)
    processes = wanted.gpus or sum(given)
    asked = options.microbatches
    if asked is not None and wanted.dp:
        asked *= wanted.dp  # a minibatch is cut into as many for each replica
    if is_model and asked is None:
        asked = _microbatches(source, options, processes)
    subject = source.read(asked or processes, "three-way" in modes, say)
    counted = replace(options, microbatches=subject.microbatches)
    encoding = PLAIN if options.encoding.auto else options.encoding
    setting = replace(
        counted.setting(subject.device, subject.optimizer),
        ratios=ratios_of(encoding),
        machines=wanted.machines(),
        evenly=asked is None,
        speeds=tuple(options.speeds)[:1] if len(set(options.speeds)) == 1 else tuple(options.speeds),
    )

    def of_given(replicas: tuple[int, ...], wanted_modes: Sequence[str]) -> dict[str, Partition]:
        found: dict[str, Partition] = {}
        for profile, some in subject.profiles(wanted_modes):
            found |= partitions(profile, setting.workers(len(replicas), replicas), some, say)
        return found

    def alone(replicas: tuple[int, ...]) -> TimedPartition | None:
        if max(replicas) > subject.microbatches:
            return None
        try:
            return _timed(of_given(replicas, modes[-1:])[modes[-1]], setting)
        except TooLittleMemory:
            return None

    if given:
        found = of_given(given, modes)
    else:
        found = {}
        for profile, some in subject.profiles(modes):
            found |= replicated_partitions(profile, setting, processes, some, say)
    say("data parallelism and a pipeline for comparison")
    return ReplicaPlan(
        subject,
        setting,
        processes,
        {mode: _timed(found[mode], setting) if mode in found else None for mode in modes},
        alone((processes,)),
        alone((1,) * min(processes, len(subject.whole.units))),
    )


def _microbatches(source: Source, options: CompileOptions, processes: int) -> int:
    """Of a model's minibatch: a divisor, so that every process has one if there are enough."""
    counts = source.counts(options).first
    return min((count for count in counts if count >= processes), default=counts[-1])


def _timed(partition: Partition, setting: Setting) -> TimedPartition:
    from fxpipe.planner.replicated import minibatch_seconds

    count = len(partition.replicas)
    flush = setting.schedule_of(count).synchronous
    return TimedPartition(partition, minibatch_seconds(partition, setting.workers(count, partition.replicas), flush))


def replicas_json(plan: ReplicaPlan) -> dict[str, Any]:
    """One object: what was planned for, a partition for each mode, and the two to compare with."""
    subject = plan.subject
    first = next(timed for timed in plan.found.values() if timed is not None)
    return {
        "ideal_ms": 1e3 * first.partition.ideal,
        "units": [u.name for u in subject.whole.units],
        "processes": plan.processes,
        "microbatches": subject.microbatches,
        "shared_out_evenly": plan.setting.evenly,
        **{mode: _timed_json(timed, subject) for mode, timed in plan.found.items()},
        "data_parallel": _timed_json(plan.data_parallel, subject),
        "pipeline": _timed_json(plan.pipeline, subject),
    }


def _timed_json(timed: TimedPartition | None, subject: PlanInput) -> dict[str, Any] | None:
    from fxpipe.planner.replicated import notation

    if timed is None:
        return None
    partition = timed.partition
    result = {
        "replicas": list(partition.replicas),
        "configuration": notation(partition.replicas),
        "processes": sum(partition.replicas),
        "minibatch_ms": 1e3 * timed.seconds,
        **partition_json(partition),
    }
    if subject.samples is not None:
        result["samples_per_second"] = subject.samples / timed.seconds
    return result


def print_replicas(plan: ReplicaPlan) -> None:
    """A table a kind of cuts, with a row a worker; then what minibatches take."""
    from fxpipe.planner.replicated import notation

    subject, shown = plan.subject, dict[tuple[tuple[int, ...], ...], str]()
    for mode, timed in plan.found.items():
        if timed is None:
            continue
        partition = timed.partition
        what = (partition.forward, partition.backward, partition.weights, partition.replicas)
        if what in shown:
            echo(f"{mode}: as {shown[what]}\n")
        else:
            title = f"{mode}, {notation(partition.replicas)}: milliseconds of a process, a microbatch of the minibatch"
            print_partition(subject.of(mode), partition, title)
        shown.setdefault(what, mode)
    rows = [_row(mode, timed, subject) for mode, timed in plan.found.items()]
    rows += [_row("data parallelism", plan.data_parallel, subject), _row("plain pipeline", plan.pipeline, subject)]
    headers = ["", "replicas", "processes", "slowest", "which", "efficiency", "best possible", "minibatch", "samples/s"]
    end = None if subject.samples is not None else -1
    print_table(headers[:end], [row[:end] for row in rows], left=2)
    first = next(timed for timed in plan.found.values() if timed is not None).partition
    machines = plan.setting.machines
    where = f" between machines of {machines.size}, {described_links(machines.inner)} in them" if machines else ""
    echo(
        f"ideal {1e3 * first.ideal:.2f} ms a microbatch · {subject.microbatches} microbatches a minibatch · "
        f"{len(subject.whole.units)} units · {described_links(plan.setting.links)}{where}"
    )
    if plan.setting.evenly and (multiple := math.lcm(*first.replicas)) > 1 and subject.microbatches % multiple:
        echo(
            f"microbatches count as shared out evenly, which {notation(first.replicas)} can do with multiples of "
            f"{multiple}: --microbatches {multiple}"
        )


def _row(name: str, timed: TimedPartition | None, subject: PlanInput) -> list[str]:
    from fxpipe.planner.replicated import notation

    if timed is None:
        return [name, "does not fit", *[""] * 7]
    partition = timed.partition
    slowest = max(range(len(partition.loads)), key=lambda k: partition.loads[k].total)
    return [
        name,
        notation(partition.replicas),
        str(sum(partition.replicas)),
        f"{1e3 * partition.bottleneck:.2f} ms",
        f"worker {slowest}",
        f"{partition.efficiency:.3f}",
        best_possible(partition),
        f"{1e3 * timed.seconds:.1f} ms",
        "" if subject.samples is None else f"{subject.samples / timed.seconds:.1f}",
    ]
