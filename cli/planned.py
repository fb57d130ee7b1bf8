"""What `fxpipe plan` plans: a model or a profile, the best cuts of each kind, with replicas or without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import click

from fxpipe.cli.output import echo, warn
from fxpipe.cli.partition_tables import PlannedCuts, TimedPartition
from fxpipe.cli.terminal.overview import print_schedules
from fxpipe.inspection.sentences import cuts_text
from fxpipe.inspection.table import Json
from fxpipe.inspection.workers import partition_rows
from fxpipe.lowering.choose_codecs import PLAIN, WORTH, ratios_of
from fxpipe.lowering.choose_schedule import Comparison, Say, counts_of, for_count
from fxpipe.lowering.model_profile import profile_model
from fxpipe.lowering.option_rules import setting_of
from fxpipe.lowering.options import AUTO, CompileOptions
from fxpipe.lowering.step_costs import SharedCosts
from fxpipe.plan.cost_records import OptimizerCosts
from fxpipe.planner.partition import Partition, TooLittleMemory, partitions
from fxpipe.planner.pipedream import read_profile
from fxpipe.planner.profile import PlanInput
from fxpipe.planner.replicated import minibatch_seconds, notation, replicated_partitions
from fxpipe.planner.separate_cuts import why_shared
from fxpipe.planner.setting import MOMENTUM, Setting
from fxpipe.planner.workers import Machines
from fxpipe.runtime.process.device import reuse_freed_memory
from fxpipe.schedule import Schedule
from fxpipe.search import Candidate, Counts, Judge, Ranking, Sized
from fxpipe.search.side_by_side import planned_side_by_side
from fxpipe.task.batch import Batch
from fxpipe.task.model_file import Task
from fxpipe.task.model_options import ModelOptions

_HARDLY = 0.02
"""A simpler plan is preferred to the best one if it takes at most this share longer."""

_DEEPEST = 32
"""The most workers of a pipeline that plans are compared with: simulating more takes too long."""


Read = Callable[[int | None, bool, Say], PlanInput]
"""Reads the input of a plan: for a number of microbatches (None: as `compile` chooses), with three-way cuts or not."""


@dataclass(frozen=True)
class Source:
    """A model or a profile."""

    read: Read  # makes the input of a plan
    counts: Callable[[CompileOptions], Counts]  # the numbers of microbatches to compare if the options name none


def of_profile(path: str, weight_fraction: float) -> Source:
    """A profile: its microbatches have the same size, however many there are."""
    profile = read_profile(path)
    if weight_fraction:
        profile = profile.split_backward(weight_fraction)
    optimizer = OptimizerCosts(MOMENTUM, 0.0)  # its time is unknown
    return Source(
        lambda microbatches, three_way, say: PlanInput(profile, profile, microbatches or 1, None, optimizer),
        lambda options: Counts((2 * options.workers,)),  # with a flush, as many as keep workers busy most of the time
    )


def of_model(task: Task, setup: ModelOptions, options: CompileOptions) -> Source:
    """A model file: its batch is cut into microbatches, and the step is captured and costed on one of them."""
    reuse_freed_memory()
    model, batch = setup.make(task)
    task_options = options.for_task(task)
    whole = Batch.of(batch, task_options.constant_batch)
    warned = dict.fromkeys(task.warnings)
    for warning in warned:
        warn(warning)

    shared = SharedCosts()

    def read(microbatches: int | None, three_way: bool, say: Say) -> PlanInput:
        counted = replace(task_options, microbatches=microbatches)
        if task_options.schedule == AUTO and microbatches is not None:
            counted = for_count(task_options, microbatches)
        subject = profile_model(model, task.loss, whole, counted, three_way=three_way, say=say, shared=shared).input
        for warning in subject.warnings:
            if warning not in warned:
                warned[warning] = None
                warn(warning)
        return subject

    return Source(read, lambda options: counts_of(replace(task_options, synchronous=options.synchronous), [whole]))


def planned(subject: PlanInput, options: CompileOptions, modes: Sequence[str], say: Say) -> PlannedCuts:
    """Plan and simulate, with values in the size that their codecs give them; the time of the codecs does not count.

    Raises:
        PolicyError: the policy makes no sense with so many microbatches.
        CutError: nothing fits into memory.
    """
    counted = replace(options, microbatches=subject.microbatches)
    setting = setting_of(counted, subject.device, subject.optimizer)
    timed: dict[str, TimedPartition] = {}
    codecs = options.encoding
    for encoding in (PLAIN, *codecs.candidates) if codecs.auto else (codecs,):
        packed = replace(setting, ratios=ratios_of(encoding))
        for profile, some in subject.profiles(modes):
            for mode, partition in planned_side_by_side(profile, packed, options.stages, some, say).items():
                say(f"{mode}: simulating")
                candidate = Candidate(Sized(packed, profile, profile), setting.schedule, mode)
                trial = Judge(candidate, packed, packed.workers(options.stages)).trial(partition)
                if mode not in timed or trial.seconds < timed[mode].seconds * (1 - WORTH):
                    timed[mode] = TimedPartition(partition, trial.seconds, trial.simulation.bubble)
    return PlannedCuts(subject, setting, {mode: timed.get(mode) for mode in modes})


@dataclass(frozen=True)
class Schedules:
    """What was compared, the best first; for a model also the samples in a minibatch."""

    ranking: Ranking

    @property
    def schedule(self) -> Schedule:
        """The one to take."""
        return self.ranking.best.schedule

    def facts(self) -> Json:
        """One object a row."""
        best, compared = self.ranking.best.candidate, self.ranking.partitions
        return {
            "samples": best.sized.samples,
            "schedules": [asdict(row) for row in self.ranking.rows],
            "partitions": partition_rows(compared),
            "cuts_refused": why_shared(compared, best.profile),
        }

    def show(self, facts: Json) -> None:
        """The table, and what the best one's cuts gain over others and move."""
        print_schedules(self.ranking.rows, facts["samples"])
        cuts = self.ranking.best.candidate.mode
        echo(f"cuts: {cuts_text(cuts, facts['partitions'], facts['cuts_refused'])}")


def compare_schedules(
    source: Source, options: CompileOptions, counts: Sequence[int], modes: Sequence[str], say: Say
) -> Schedules:
    """Capture and cost the step for each number of microbatches, or for some that suit the schedules; plan and simulate
    every schedule, or the given one, with each kind of cuts, or with all that a schedule can use."""
    several = Counts(tuple(counts)) if counts else source.counts(options)
    return Schedules(_OfSource(options, several, say, modes, source=source).ranking())


@dataclass(kw_only=True)
class _OfSource(Comparison):
    """A comparison of schedules for a model or a profile, of which nothing is compiled."""

    source: Source

    def read(self, count: int, say: Say) -> PlanInput:
        return self.source.read(count, True, say)


def plan_replicas(
    source: Source,
    options: CompileOptions,
    processes: int,
    fixed: tuple[int, ...],
    machines: Machines | None,
    modes: Sequence[str],
    is_model: bool,
    say: Say,
) -> PlannedCuts:
    """Plan with replicas: `fixed` for each worker, or chosen. Each process has its own links, or all of a machine share
    one.

    Raises:
        CutError: nothing fits into memory; processes differ; there are fewer microbatches than replicas.
        PolicyError: the policy makes no sense with so many microbatches.
    """
    if options.schedule == AUTO:
        raise click.UsageError("replicas are planned for one schedule: give it with --schedule")
    microbatches = options.microbatches
    if is_model and microbatches is None:
        microbatches = _microbatches(source, options, processes)
    subject = source.read(microbatches or processes, "three-way" in modes, say)
    if not fixed and (warning := _of_no_gpu(subject.whole.device, is_model)):
        warn(warning)
    counted = replace(options, microbatches=subject.microbatches)
    encoding = PLAIN if options.encoding.auto else options.encoding
    setting = replace(
        setting_of(counted, subject.device, subject.optimizer),
        ratios=ratios_of(encoding),
        machines=machines,
        evenly=microbatches is None,
        speeds=tuple(options.speeds)[:1] if len(set(options.speeds)) == 1 else tuple(options.speeds),
    )

    def of_given(replicas: tuple[int, ...], wanted_modes: Sequence[str]) -> dict[str, Partition]:
        by_mode: dict[str, Partition] = {}
        for profile, some in subject.profiles(wanted_modes):
            by_mode |= partitions(profile, setting.workers(len(replicas), replicas), some, say)
        return by_mode

    def alone(replicas: tuple[int, ...], mode: str = modes[-1]) -> TimedPartition | None:
        if max(replicas) > subject.microbatches:
            return None
        try:
            return _timed(of_given(replicas, (mode,))[mode], setting)
        except TooLittleMemory:
            return None

    if fixed:
        by_mode = of_given(fixed, modes)
    else:
        by_mode = {}
        for profile, some in subject.profiles(modes):
            by_mode |= replicated_partitions(profile, setting, processes, some, say)
    timed = {mode: _timed(by_mode[mode], setting) if mode in by_mode else None for mode in modes}
    say("data parallelism and a pipeline for comparison")
    plain = {"data_parallel": alone((processes,))}
    if (pipeline := min(processes, len(subject.whole.units))) <= _DEEPEST:
        plain["pipeline"] = alone((1,) * pipeline)
    if not fixed:
        alike = partial(alone, mode=modes[0])
        timed = {m: best and _simplest(best, plain["data_parallel"], alike, processes) for m, best in timed.items()}
    return PlannedCuts(subject, setting, timed, processes, plain)


def _of_no_gpu(device: str, is_model: bool) -> str:
    """What is wrong with planning for GPUs with times of this device (see `Profile`); '' if nothing is."""
    if device and not device.startswith("cpu"):
        return ""
    whose = f"the times are of {device}" if device else "the profile does not name the device of its times"
    how = (
        "--device-spec NAME computes"
        if is_model
        else "a compile on a GPU, or with --device-spec NAME, writes a profile for"
    )
    return f"{whose}, but --gpus plans for GPUs: {how} {'those of a GPU' if is_model else 'it'}"


def _simplest(
    best: TimedPartition,
    data_parallel: TimedPartition | None,
    alike: Callable[[tuple[int, ...]], TimedPartition | None],
    processes: int,
) -> TimedPartition:
    """Data parallelism, or the same number of replicas for all workers, if that takes hardly longer than the best."""
    replicas = best.partition.replicas
    if replicas == (processes,):
        return best

    def plans() -> Iterator[TimedPartition | None]:
        yield data_parallel
        if len(set(replicas)) > 1:
            counts = [n for n in range(2, processes + 1) if processes % n == 0]
            for n in sorted(counts, key=lambda n: abs(n - len(replicas)))[:2]:
                yield alike((processes // n,) * n)

    for plan in plans():
        if plan is not None and plan.seconds <= best.seconds * (1 + _HARDLY):
            partition = replace(plan.partition, mode=best.partition.mode, lower_bound=best.partition.lower_bound)
            return replace(plan, partition=partition, faster=notation(replicas), longer=plan.seconds / best.seconds - 1)
    return best


def _microbatches(source: Source, options: CompileOptions, processes: int) -> int:
    """Microbatches of a model's minibatch: a divisor of its samples, so that every process has one if possible."""
    counts = source.counts(options).first
    return min((count for count in counts if count >= processes), default=counts[-1])


def _timed(partition: Partition, setting: Setting) -> TimedPartition:
    count = len(partition.replicas)
    flush = setting.schedule_of(count).synchronous
    return TimedPartition(partition, minibatch_seconds(partition, setting.workers(count, partition.replicas), flush))
