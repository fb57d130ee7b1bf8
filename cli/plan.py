"""`fxpipe plan`: what a partition would achieve, without writing it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click
from fxpipe.cli.cost_options import CostOptions, cost_options
from fxpipe.cli.option_fields import option_fields
from fxpipe.cli.output import emit_json, print_table, size, warn, working

from fxpipe.lowering.options import CompileOptions
from fxpipe.planner.links import Links
from fxpipe.task.model_options import ModelOptions

if TYPE_CHECKING:
    from fxpipe.planner.partition import Load, Partition
    from fxpipe.planner.profile import Profile
    from fxpipe.planner.workers import Workers
    from fxpipe.schedule.base import Schedule
    from fxpipe.simulator.result import Simulation

MODES = ("same", "bidirectional", "three-way")


@click.command("plan")
@click.argument("target", type=click.Path(dir_okay=False))
@option_fields(CompileOptions, "workers")
@click.option("--cuts", type=click.Choice(MODES), multiple=True, help="Only these kinds of cuts. [default: all three]")
@option_fields(
    CompileOptions,
    "schedule",
    "policy",
    microbatches="Pieces of a minibatch. [default: like `compile`]",
    autocast="Run a model's step under torch.autocast.",
)
@click.option("--no-communication", is_flag=True, help="Balance computation alone: messages cost nothing.")
@click.option(
    "--weight-fraction",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    show_default=True,
    help="For a profile with one time for backward: the share of it that is W.",
)
@option_fields(CompileOptions, "threads")
@option_fields(ModelOptions, meta="For a model larger than memory: its parameters get no values.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@option_fields(CompileOptions, "cost")
@cost_options
def plan_command(
    target: str,
    cuts: tuple[str, ...],
    no_communication: bool,
    weight_fraction: float,
    meta: bool,
    as_json: bool,
    costs: CostOptions,
    **asked: Any,
) -> int:
    """Compare the best cuts of three kinds, and simulate what they would do.

    TARGET is a model file, an fxpipe profile (JSON, `fxpipe compile --save-profile`), or one of PipeDream's published
    graph files. Cuts are `same` for forward and backward (what PipeDream does), `bidirectional` (separate for forward
    and backward), or `three-way` (separate for input and weight gradients, too). Each is the best one for the cost
    model of fxpipe/planner/cost_model.py, or is shown with a bound on how good the best one could be. Efficiency is the
    ideal time (all work divided by the workers' speeds) over the slowest worker's.

    \b
    fxpipe plan examples/gpt.py -n 8 --bandwidth 10Gbit --latency 50us
    fxpipe plan vgg16.txt -n 4 --no-communication --weight-fraction 0.5
    fxpipe plan model.py -n 16 --device-spec h100 --bandwidth 400Gbit --memory 80GiB
    fxpipe plan profile.json -n 4 --speed 1,1,0.5,0.5 --json
    """
    from fxpipe.planner.advice import advised_partitions
    from fxpipe.schedule import make

    if no_communication and (costs.bandwidth or costs.latency or costs.links):
        raise click.UsageError("--no-communication contradicts --bandwidth, --latency and --links")
    is_model = target.endswith(".py")
    if meta and not is_model:
        raise click.UsageError("--meta is for models; a profile has no parameters")
    if weight_fraction and is_model:
        raise click.UsageError("--weight-fraction is for profiles; for a model, W is known")
    options = CompileOptions(**asked)
    if not is_model:
        _refuse_model_options(options, costs)
    options = costs.applied(options, meta=meta)
    if no_communication:
        options = replace(options, links=Links())
    cuts = tuple(mode for mode in MODES if mode in cuts)
    workers = options.workers
    with working("planning") as say:
        if is_model:
            subject = _profile_model(target, ModelOptions(meta=meta), options, not cuts or "three-way" in cuts, say)
        else:
            subject = _read_profile(target, options.microbatches or 1, weight_fraction)
        setting = replace(options, microbatches=subject.microbatches).setting(subject.device, subject.optimizer_bytes)
        found: dict[str, Partition] = {}
        for profile, modes in subject.profiles(cuts or MODES):
            found.update(advised_partitions(profile, setting, workers, modes, say))
        order = make(setting.schedule, workers, setting.microbatches)
        simulated = {}
        for mode, partition in found.items():
            say(f"{mode}: simulating")
            simulated[mode] = _simulate(subject, partition, setting.workers(workers), order)
    if as_json:
        emit_json(_as_json(subject, found, simulated, cuts or MODES))
    else:
        _print(subject, found, simulated, setting.links, workers, cuts or MODES)
    return 0


@dataclass(frozen=True)
class PlanInput:
    """What is planned: a profile with W as part of B, and one for three-way cuts, which may be the same."""

    whole: Profile
    apart: Profile
    microbatches: int
    samples: int | None
    optimizer_bytes: float
    device: str = "cpu"

    def profiles(self, modes: tuple[str, ...]) -> list[tuple[Profile, list[str]]]:
        """Which profile serves which modes."""
        if self.apart is self.whole:
            return [(self.whole, list(modes))]
        groups = [(p, [m for m in modes if self.of(m) is p]) for p in (self.whole, self.apart)]
        return [(profile, wanted) for profile, wanted in groups if wanted]

    def of(self, mode: str) -> Profile:
        """The profile of a mode."""
        return self.apart if mode == "three-way" else self.whole


def _refuse_model_options(options: CompileOptions, costs: CostOptions) -> None:
    if costs.device_spec or options.cost:
        raise click.UsageError("--cost and --device-spec are for models; a profile has its own times")
    if options.autocast or options.threads:
        raise click.UsageError("--autocast and --threads are for models; a profile has its own times")


def _read_profile(path: str, microbatches: int, weight_fraction: float) -> PlanInput:
    from fxpipe.planner.pipedream import read_profile
    from fxpipe.planner.setting import MOMENTUM

    profile = read_profile(path)
    if weight_fraction:
        profile = profile.split_backward(weight_fraction)
    return PlanInput(profile, profile, microbatches, None, MOMENTUM)


def _profile_model(
    path: str, made: ModelOptions, options: CompileOptions, three_way: bool, say: Callable[[str], None]
) -> PlanInput:
    from fxpipe.lowering.model_profile import profile_model
    from fxpipe.runtime.process.allocator import reuse_freed_memory
    from fxpipe.task.model_file import load_task

    reuse_freed_memory()
    task = load_task(path)
    for warning in task.warnings:
        warn(warning)
    model, batch = made.make(task)
    found = profile_model(model, task.loss, batch, options.for_task(task, batch), three_way=three_way, say=say)
    for warning in found.warnings:
        warn(warning)
    return PlanInput(found.whole, found.apart, found.microbatches, found.samples, found.optimizer_bytes, found.device)


def _simulate(subject: PlanInput, partition: Partition, workers: Workers, schedule: Schedule) -> Simulation:
    from fxpipe.simulator.of_partition import scenario_of_partition
    from fxpipe.simulator.simulate import simulate, steady_minibatches

    scenario = scenario_of_partition(subject.of(partition.mode), partition, workers, schedule)
    return simulate(schedule, scenario, steady_minibatches(schedule))


def _as_json(
    subject: PlanInput, found: dict[str, Partition], simulated: dict[str, Simulation], modes: tuple[str, ...]
) -> dict[str, Any]:
    first = next(iter(found.values()))
    result: dict[str, Any] = {
        "ideal_ms": 1e3 * first.ideal,
        "units": [u.name for u in subject.whole.units],
        "microbatches": subject.microbatches,
    }
    for mode in modes:
        result[mode] = _mode_as_json(subject, found[mode], simulated[mode]) if mode in found else None
    return result


def _milliseconds(load: Load) -> dict[str, float]:
    import dataclasses

    return {name: value if name == "memory" else 1e3 * value for name, value in dataclasses.asdict(load).items()}


def _mode_as_json(subject: PlanInput, partition: Partition, simulation: Simulation) -> dict[str, Any]:
    result = {
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
        "simulated_ms": 1e3 * simulation.seconds_per_minibatch / subject.microbatches,
        "bubble": simulation.bubble,
    }
    if subject.samples is not None:
        result["samples_per_second"] = simulation.samples_per_second(subject.samples)
    return result


def _print(
    subject: PlanInput,
    found: dict[str, Partition],
    simulated: dict[str, Simulation],
    links: Links,
    workers: int,
    modes: tuple[str, ...],
) -> None:
    shown: dict[tuple[tuple[int, ...], ...], str] = {}
    for mode, partition in found.items():
        cuts = (partition.forward, partition.backward, partition.weights)
        if cuts in shown:
            click.echo(f"{mode}: as {shown[cuts]}\n")
        else:
            _print_partition(subject.of(mode), partition)
        shown.setdefault(cuts, mode)
    rows = []
    for mode in modes:
        if mode not in found:
            rows.append([mode, "does not fit", *[""] * 6])
            continue
        partition, simulation = found[mode], simulated[mode]
        slowest = max(range(workers), key=lambda k: partition.loads[k].total)
        rows.append(
            [
                mode,
                f"{1e3 * partition.bottleneck:.2f} ms",
                f"worker {slowest}",
                f"{partition.efficiency:.3f}",
                "proved" if partition.exact else f"≤ {partition.ideal / partition.lower_bound:.3f}",
                f"{1e3 * simulation.seconds_per_minibatch / subject.microbatches:.2f} ms",
                f"{100 * simulation.bubble:.0f} %",
                "" if subject.samples is None else f"{simulation.samples_per_second(subject.samples):.1f}",
            ]
        )
    headers = ["cuts", "slowest", "which", "efficiency", "best possible", "simulated", "bubble", "samples/s"]
    print_table(
        headers if subject.samples is not None else headers[:-1],
        [r[: len(headers)] if subject.samples is not None else r[:-1] for r in rows],
    )
    ideal = next(iter(found.values())).ideal
    click.echo(f"ideal {1e3 * ideal:.2f} ms a microbatch · {len(subject.whole.units)} units · {_described(links)}")


def _print_partition(profile: Profile, partition: Partition) -> None:
    three = partition.mode == "three-way"
    rows = []
    idle = []
    for k, load in enumerate(partition.loads):
        if all(cuts[k] == cuts[k + 1] for cuts in (partition.forward, partition.backward, partition.weights)):
            idle.append(str(k))
            continue
        row = [f"worker {k}"]
        for cuts in (partition.forward, partition.backward, *([partition.weights] if three else [])):
            first, end = cuts[k], cuts[k + 1]
            row.append(f"{profile.units[first].name} ({end - first})" if end > first else "–")
        for value in (load.forward, load.backward, load.weight, load.update, load.recompute, load.exposed, load.total):
            row.append(f"{value:.2f}")
        rows.append([*row, size(load.memory)])
    where = ["F from (units)", "B from", *(["W from"] if three else [])]
    click.echo(f"{partition.mode}, milliseconds a microbatch")
    print_table(["", *where, "F", "B", "W", "update", "again", "exposed", "sum", "memory"], rows, left=1 + len(where))
    if idle:
        click.echo(f"nothing to do for worker{'s' if len(idle) > 1 else ''} {', '.join(idle)}\n")


def _described(links: Links) -> str:
    if links.free:
        return "no communication"
    if isinstance(links.bandwidth, tuple) or isinstance(links.latency, tuple):
        return "links by matrix"
    return f"links {links.bandwidth / 1e9:.4g} GB/s, {links.latency * 1e6:.4g} µs"
