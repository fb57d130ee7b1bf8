"""`fxpipe plan`: how fast the best partitions would train, without writing a build."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from fxpipe.cli.command import AbsolutePath, WithArguments, group, option_fields
from fxpipe.cli.cost_options import CostOptions, typed_quantity
from fxpipe.cli.file_options import SettingsFile, compile_options_of, config, decide_schedule
from fxpipe.cli.output import note, put, working
from fxpipe.lowering.options import CompileOptions
from fxpipe.options import flags, option
from fxpipe.plan.limits import MOST_MICROBATCHES, MOST_WORKERS
from fxpipe.planner import quantity
from fxpipe.planner.links import NCCL_NODE, Links
from fxpipe.planner.workers import Machines
from fxpipe.schedule import to_csv
from fxpipe.task.model_options import ModelOptions

MODES = ("same", "bidirectional", "three-way")
_CHOSEN = ("workers", "virtual", "dp", "replicas")
"""What --gpus chooses."""
_UNPLANNED = (
    *("out", "like", "verify", "verbose"),
    *(name for name in flags(CompileOptions) if name.startswith(("outer", "shard"))),
)
"""Fields that matter only to a compile, or only between replicas."""


def _counts(text: str | tuple[int, ...]) -> tuple[int, ...]:
    """`1,2,4` as numbers."""
    parts = text.split(",") if isinstance(text, str) else map(str, text)
    counts = tuple(dict.fromkeys(int(part) if part.strip().isdecimal() and len(part) < 20 else 0 for part in parts))
    if not all(1 <= count <= MOST_MICROBATCHES for count in counts):
        what = f"{text!r} is not a number of microbatches from 1 to {MOST_MICROBATCHES}, nor a list of them: 1,2,4,8"
        raise click.BadParameter(what)
    return counts


@dataclass(frozen=True)
class PlanOptions:
    """The options that only `plan` has."""

    gpus: int | None = option(
        None, minimum=1, maximum=MOST_WORKERS, metavar="N", help="Choose stages and replicas for N processes."
    )
    machine: int | None = option(
        None,
        minimum=1,
        maximum=MOST_WORKERS,
        metavar="N",
        help="Number of processes on each machine; --bandwidth is then that between machines.",
    )
    inner_bandwidth: str | None = option(
        None, metavar="RATE", help="Bandwidth between processes of one machine. [default: that of PCIe]"
    )
    cuts: tuple[str, ...] = option((), choices=MODES, help="Only these kinds of cuts. [default: all]")
    compare: bool = option(False, help="Compare all schedules (each with its best cuts) in the simulator.")
    counts: tuple[int, ...] | None = option(
        None,
        "--microbatches",
        kind=_counts,
        metavar="M[,M…]",
        help="Microbatches in a minibatch; several, 1,2,4,8, are compared. [default: like `compile`]",
    )
    save_schedule: str | None = option(
        None,
        path="file",
        metavar="FILE.csv",
        help="Write the schedule (of several, the best) to a file that you can edit and give as --schedule.",
    )
    weight_fraction: float = option(
        0.0, minimum=0, below=1, help="For a profile with one time for backward: the share of weight gradients in it."
    )
    no_communication: bool = option(False, help="Plan for messages that take no time.")


@click.command("plan", cls=WithArguments)
@click.argument("target", type=AbsolutePath(dir_okay=False))
@group(
    "Workers and cuts",
    option_fields(CompileOptions, "workers", "virtual"),
    option_fields(PlanOptions, "cuts"),
    first="workers",
)
@group(
    "Replicas",
    option_fields(PlanOptions, "gpus"),
    option_fields(CompileOptions, "replicas", "dp"),
    option_fields(PlanOptions, "machine", "inner_bandwidth"),
    first="gpus",
)
@group(
    "Schedule and weights",
    option_fields(PlanOptions, "compare"),
    option_fields(CompileOptions, "schedule", "synchronous", "policy"),
    option_fields(PlanOptions, "counts", "save_schedule"),
    first="compare schedule synchronous counts",
)
@group(
    "Model and data",
    option_fields(CompileOptions, "autocast", "params"),
    option_fields(ModelOptions, "settings"),
    option_fields(CompileOptions, "pad_to"),
    option_fields(ModelOptions, meta="Give parameters no values, for a model larger than memory."),
)
@group(
    "Memory and speed",
    option_fields(CostOptions, "memory", "device_spec", "speed"),
    option_fields(CompileOptions, "recompute", "cost", "threads"),
    option_fields(PlanOptions, "weight_fraction"),
    first="memory device_spec",
)
@group(
    "Links between workers",
    option_fields(CostOptions, "bandwidth", "latency", "links"),
    option_fields(CompileOptions, "codec"),
    option_fields(PlanOptions, "no_communication"),
    first="bandwidth latency",
)
@group(
    "Output", click.option("--json", "as_json", is_flag=True, help="Print one JSON object."), config, first="as_json"
)
def plan_command(
    target: str,
    replicas: tuple[int, ...] | None,
    dp: int,
    meta: bool,
    config: str | None,
    settings: tuple[str, ...],
    arguments: tuple[str, ...] | None,
    as_json: bool,
    **option_values: Any,
) -> int:
    """Find the best cuts of three kinds, and simulate how fast they train. TARGET is a model file, an fxpipe profile
    (a build's profile.json), or one of PipeDream's published graph files. Nothing is written.

    \b
    fxpipe plan examples/gpt.py -n 8 --microbatches 1,4,8
    fxpipe plan examples/gpt.py -n 8 --compare --memory 4GB --bandwidth 10Gbit
    fxpipe plan examples/gpt.py -n 8 --bandwidth 10Gbit --latency 50us
    fxpipe plan vgg16.txt -n 4 --no-communication --weight-fraction 0.5
    fxpipe plan model.py -n 16 --device-spec h100 --bandwidth 400Gbit --memory 80GiB
    fxpipe plan build/profile.json -n 4 --speed 1,1,0.5,0.5 --json
    fxpipe plan examples/gpt.py -n 2 --schedule zb-v --microbatches 4 --save-schedule zb-v.csv
    fxpipe plan vgg16.txt --gpus 16 --bandwidth 10Gbit
    fxpipe plan vgg16.txt --gpus 16 --machine 4 --inner-bandwidth 10GB/s --bandwidth 10Gbit --microbatches 30
    fxpipe plan examples/gpt.py --replicas 2,1,1 --bandwidth 10Gbit
    fxpipe plan examples/gpt.py -n 2 --dp 4 --bandwidth 10Gbit --json

    Cuts are `same` for forward and backward (what PipeDream does), `bidirectional` (separate for forward and backward),
    or `three-way` (separate for input and weight gradients, too). Each is the best one by the planner's cost model, or
    is shown with a bound on how good the best one could be. Efficiency is the ideal time (all work divided by the
    workers' speeds) over the slowest worker's time.

    --compare prints a row for every schedule and number of microbatches: its time, its bubble, the memory it needs, and
    what it loses against the best and why. Several --microbatches without --compare print a row for each number.

    --gpus N also chooses the replicas of every worker: processes that have the same stage and share its microbatches.
    The plan gives their numbers as PipeDream writes them (15-1: fifteen processes for the first stage, one for the
    last), the time of a minibatch, and the times of plain data parallelism and of a plain pipeline with as many
    processes. --replicas 2,1,1 and --dp 4 choose cuts for given replicas. With --machine, each machine has one link for
    all its processes. --microbatches is the number in the whole minibatch; with --dp, in one replica of the pipeline,
    as for `compile`. --autocast, --params, --pad-to, --set, --meta, --cost, --device-spec and --threads are for model
    files only.

    An option that is not on the command line is taken from the table [compile] in fxpipe.toml, in the model file's
    folder; else from the model file's compile_options.
    """
    is_model = target.endswith(".py")
    plan = PlanOptions(**{name: option_values.pop(name) for name in flags(PlanOptions)})
    left = (*_UNPLANNED, *(_CHOSEN if plan.gpus else ()), *(("schedule", "policy") if plan.compare else ()))
    left += ("microbatches",) if plan.counts else ()
    defaults = SettingsFile.of(config, Path(target) if is_model else None).options("compile", left)
    settings = defaults.pop("settings", settings)
    option_values |= {name: defaults.pop(name) for name in flags(CostOptions) if name in defaults}
    costs = CostOptions.of(option_values)
    if plan.no_communication and (costs.bandwidth or costs.latency or costs.links):
        raise click.UsageError("--no-communication contradicts --bandwidth, --latency and --links")
    if meta and not is_model:
        raise click.UsageError("--meta is for models; a profile has no parameters")
    if plan.weight_fraction and is_model:
        raise click.UsageError("--weight-fraction is for profiles; for a model, W is known")
    setup, task = ModelOptions(settings=settings, arguments=arguments or ()), None
    if is_model:
        with working("reading the model"):
            task = setup.load(target)
        defaults |= compile_options_of(task, left)
    counted = defaults.pop("microbatches", None)
    counts = plan.counts or ((counted,) if counted else ())
    cuts = plan.cuts or tuple(mode for mode in [defaults.pop("cuts", "auto")] if mode in MODES)
    meta, dp, replicas = defaults.pop("meta", meta), defaults.pop("dp", dp), defaults.pop("replicas", replicas)
    setup = replace(setup, **{name: defaults.pop(name) for name in flags(ModelOptions) if name in defaults}, meta=meta)
    option_values |= defaults
    compare = decide_schedule(option_values, plan.compare) or plan.compare or len(counts) > 1
    replicas = _replicas(plan.gpus, replicas, dp, option_values["workers"])
    if processes := plan.gpus or sum(replicas):
        if compare or plan.save_schedule is not None:
            raise click.UsageError(
                "replicas are planned for one schedule and one number of microbatches: leave out --compare and "
                "--save-schedule, and give one number"
            )
        option_values["workers"] = plan.gpus or len(replicas)
    options = CompileOptions(**option_values, microbatches=dp * counts[0] if len(counts) == 1 else None)
    if (written := options.from_file) is not None:
        if compare:
            raise click.UsageError(f"--schedule {options.schedule} fixes the number of microbatches: give no other")
        options = options.of_microbatches(dp * written.microbatches)
    if not is_model:
        _refuse_model_options(options, costs)
    machines = _machines(plan.machine, plan.inner_bandwidth, processes)
    options = costs.applied(options, meta=meta)
    if plan.no_communication:
        options = replace(options, links=Links())
    modes = tuple(mode for mode in MODES if mode in cuts)
    from fxpipe.cli.partition_tables import PlannedCuts
    from fxpipe.cli.planned import Schedules, compare_schedules, of_model, of_profile, plan_replicas, planned

    with working("planning") as say:
        source = of_profile(target, plan.weight_fraction) if task is None else of_model(task, setup, options)
        outcome: PlannedCuts | Schedules
        if processes:
            outcome = plan_replicas(source, options, processes, replicas, machines, modes or MODES, is_model, say)
        elif compare:
            outcome = compare_schedules(source, options, counts, modes, say)
        else:
            subject = source.read(options.microbatches, not modes or "three-way" in modes, say)
            outcome = planned(subject, options, modes or MODES, say)
    put(outcome.facts(), as_json, outcome.show)
    if plan.save_schedule is not None:
        Path(plan.save_schedule).write_text(to_csv(outcome.schedule), encoding="utf-8")
        note(f"wrote {plan.save_schedule}")
    return 0


def _replicas(gpus: int | None, replicas: tuple[int, ...] | None, dp: int, workers: int) -> tuple[int, ...]:
    """The replicas of each worker, if they are given; refuses options that contradict each other."""
    source = click.get_current_context().get_parameter_source("workers")
    n = workers if source is click.core.ParameterSource.COMMANDLINE else None
    if (gpus is not None) + (replicas is not None) + (dp > 1) > 1:
        raise click.UsageError(
            "--gpus chooses replicas, --replicas gives each worker its own, --dp all: give one of them"
        )
    if gpus is not None and n is not None:
        raise click.UsageError("--gpus chooses the number of workers: leave out -n")
    if replicas is not None and n not in (None, len(replicas)):
        raise click.UsageError(f"--replicas has numbers for {len(replicas)} workers, but -n is {n}")
    return replicas or ((dp,) * workers if dp > 1 else ())


def _machines(size: int | None, inner_bandwidth: str | None, processes: int) -> Machines | None:
    """The machines, if the processes are on several."""
    if size is None and inner_bandwidth is not None:
        raise click.UsageError("--inner-bandwidth is within machines: give their processes with --machine")
    if size is None:
        return None
    if not processes:
        raise click.UsageError("--machine is for plans with replicas: give --gpus, --replicas or --dp")
    if inner_bandwidth is None:
        return Machines(size, NCCL_NODE)
    rate = typed_quantity(inner_bandwidth, "--inner-bandwidth", quantity.bandwidth)
    return Machines(size, Links(rate, NCCL_NODE.latency))


def _refuse_model_options(options: CompileOptions, costs: CostOptions) -> None:
    if costs.device_spec or options.cost:
        raise click.UsageError(
            "--cost and --device-spec are for models; a profile has its own times: compile with them, and plan that "
            "build's profile.json"
        )
    if options.autocast or options.params or options.threads:
        raise click.UsageError(
            "--autocast, --params and --threads are for models; a profile has its own times: leave them out"
        )
    if options.pad_to is not None:
        raise click.UsageError("--pad-to is for models; a profile has no batches")
