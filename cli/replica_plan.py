"""`fxpipe plan --gpus N`: how many processes each worker has, which cuts go with them, and what a minibatch takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click
from fxpipe.cli.partition_tables import PlannedCuts, TimedPartition
from fxpipe.cli.planned import Say, Source

from fxpipe.lowering.options import AUTO, CompileOptions

if TYPE_CHECKING:
    from fxpipe.planner.partition import Partition
    from fxpipe.planner.setting import Setting


def plan_replicas(
    source: Source,
    options: CompileOptions,
    processes: int,
    given: tuple[int, ...],
    modes: Sequence[str],
    is_model: bool,
    say: Say,
) -> PlannedCuts:
    """Plan with replicas, given or chosen.

    Args:
        processes: of all workers together.
        given: how many of them each worker has; empty if that is to be chosen.

    Raises:
        CutError: nothing fits into memory; processes differ; there are fewer microbatches than replicas.
        PolicyError: the policy makes no sense with so many microbatches.
    """
    from fxpipe.lowering.choose_codecs import PLAIN, ratios_of
    from fxpipe.planner.partition import TooLittleMemory, partitions
    from fxpipe.planner.replicated import replicated_partitions

    if options.schedule == AUTO:
        raise click.UsageError("replicas are planned for one schedule: name it")
    asked = options.microbatches
    if is_model and asked is None:
        asked = _microbatches(source, options, processes)
    subject = source.read(asked or processes, "three-way" in modes, say)
    counted = replace(options, microbatches=subject.microbatches)
    encoding = PLAIN if options.encoding.auto else options.encoding
    setting = replace(
        counted.setting(subject.device, subject.optimizer),
        ratios=ratios_of(encoding),
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
    pipeline = (1,) * min(processes, len(subject.whole.units))
    return PlannedCuts(
        subject,
        setting,
        {mode: _timed(found[mode], setting) if mode in found else None for mode in modes},
        processes,
        {"data_parallel": alone((processes,)), "pipeline": alone(pipeline)},
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
