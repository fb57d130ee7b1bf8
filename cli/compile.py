"""`fxpipe compile`: a model file in, a build directory out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fxpipe.cli.command import AbsolutePath, WithArguments, group, option_fields
from fxpipe.cli.cost_options import CostOptions
from fxpipe.cli.file_options import (
    SettingsFile,
    Written,
    compile_options_of,
    config,
    config_text,
    decide_schedule,
    is_given,
    options_of,
    print_config,
    read_options,
    say_given,
    take,
    values,
)
from fxpipe.cli.output import echo, note, put, warn, working
from fxpipe.lowering.options import CompileOptions, options_like
from fxpipe.options import flags
from fxpipe.plan.build_folder import check_target, read_plan
from fxpipe.runtime.options import RunOptions
from fxpipe.task.model_options import ModelOptions

if TYPE_CHECKING:
    from fxpipe.task.model_file import Task


DIFFERS = (
    "do not train with this build; compile with --microbatches 1, then with -n 1, to see whether cutting the batch or "
    "the model is the cause; if you report it, attach the model file"
)


@click.command("compile", cls=WithArguments)
@click.argument("model", type=AbsolutePath(dir_okay=False))
@group(
    "Workers and cuts",
    option_fields(CompileOptions, "workers", "virtual", "cuts", "forward_at", "backward_at"),
    first="workers forward_at",
    also="backward_at",
)
@group(
    "Replicas",
    option_fields(CompileOptions, "dp", "replicas", "shard"),
    option_fields(CompileOptions, "outer", "outer_every", "outer_lr", "outer_momentum", "outer_delay"),
    first="dp",
)
@group(
    "Schedule and weights",
    option_fields(CompileOptions, "schedule", "synchronous", "policy", "microbatches"),
    click.option(
        "--like",
        type=AbsolutePath(file_okay=False),
        metavar="BUILD",
        help="Take options that are not given (schedule, policy, microbatches, …) from this build.",
    ),
    first="schedule synchronous microbatches",
    also="policy",
)
@group(
    "Model and data",
    option_fields(ModelOptions, "device"),
    option_fields(CompileOptions, "autocast", "params"),
    option_fields(ModelOptions, "settings", "seed", "meta"),
    option_fields(CompileOptions, "microbatch_dims", "accept_microbatch_loss", "constant_batch", "pad_to", "scan"),
    option_fields(CompileOptions, "accept_optimizer_per_worker"),
    first="device autocast settings",
)
@group(
    "Memory and speed",
    option_fields(CostOptions, "memory"),
    option_fields(CompileOptions, "recompute", "backend", "threads", "cost"),
    option_fields(CostOptions, "device_spec", "speed"),
    first="memory",
)
@group(
    "Links between workers",
    option_fields(CompileOptions, "codec"),
    option_fields(CostOptions, "bandwidth", "latency", "links"),
    also="codec bandwidth latency links",
)
@group(
    "Output",
    click.option("-o", "--out", type=AbsolutePath(), default="build", show_default=True, help="Folder for the build."),
    option_fields(CompileOptions, "outline"),
    click.option("--verify", is_flag=True, help="Compare one step of the stages with eager PyTorch."),
    click.option("-v", "--verbose", is_flag=True, help="Print what every pass changed."),
    click.option(
        "--after", metavar="PASS", help="Print the program after this pass, or after `capture`; write nothing."
    ),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
    config,
    print_config,
    first="out verify",
)
def compile_command(
    model: str,
    after: str | None,
    as_json: bool,
    config: str | None,
    print_config: bool,
    arguments: tuple[str, ...] | None,
    **option_values: Any,
) -> int:
    """Cut the training step of MODEL into stages and write them as Python. MODEL is a file of plain PyTorch with
    model(), loss(model, batch) and train_data(). `fxpipe run` trains what is written.

    \b
    fxpipe compile examples/gpt.py -n 2 -o build/ --verify
    fxpipe compile examples/gpt.py -n 4 --schedule 1f1b --microbatches 8 -o build/
    fxpipe compile examples/gpt.py -n 2 --fp-cut blocks.4 --bp-cut blocks.3 -o build/
    fxpipe compile examples/gpt.py -n 2 --synchronous --memory 200MB -o build/
    fxpipe compile examples/gpt.py -n 2 --backend auto -o build/
    fxpipe compile examples/gpt.py -n 8 --meta -o build/
    fxpipe compile examples/gpt.py -n 3 --like build/ -o smaller/
    fxpipe compile examples/gpt.py -n 2 --after cut

    Captures forward, loss and backward as one graph, chooses where to cut forward and backward, and writes stage_0.py,
    stage_1.py, … with their sends and receives. The planner uses times that are measured here, or computed for another
    device (--device-spec), and the speed of the links between workers. --cuts auto cuts forward and backward at
    different places where that gains more than 2%.

    --schedule is 1f1b, async, async-late, dualpipev, gpipe, interleaved, nf1b, v-half, v-min, wpipe, zb-h1, zb-h2,
    zb-v, one that the model file registers, or a file in torch's format. auto takes the schedule and the number of
    microbatches that are fastest in the simulator, and prints what the next three lose and why.

    --policy is for schedules whose forwards miss updates: 2bw, latest, lwp, pipeoptim, spectrain, stash, vertical,
    xgrad (which others take, too), xpipe, or one that the model file registers. Switches follow it, as in
    pipeoptim+keep or spectrain+ef.

    --codec auto sends int8 on the links that workers wait for, and only there. The build keeps the values of --set and
    what follows -- (the model file's own command line, for argparse). A run may change those that capture did not read.

    An option that is not on the command line is taken from the table [compile] in fxpipe.toml, in the model file's
    folder; else from --like; else from the model file's compile_options.
    """
    from fxpipe.cli.model_build import build_model, print_after
    from fxpipe.cli.written_build import WrittenBuild
    from fxpipe.costs.node_costs_file import NODE_COSTS
    from fxpipe.inspection.sentences import codec_facts
    from fxpipe.lowering.agreement import worst_agreement
    from fxpipe.lowering.codec_effect import codec_effect
    from fxpipe.lowering.compare_with_eager import compare_with_eager
    from fxpipe.plan.lock import build_lock, locked
    from fxpipe.stages.compare import EXACT

    option_values |= SettingsFile.of(config, Path(model)).options("compile")
    like, out, verify, verbose = (option_values.pop(name) for name in ("like", "out", "verify", "verbose"))
    costs = CostOptions.of(option_values)
    _check(option_values, verify, after)
    if after is None and not print_config:
        check_target(Path(out))
    with working("reading the model"):
        task = ModelOptions(settings=option_values["settings"], arguments=arguments or ()).load(model)
    if like is not None:
        option_values |= _like(like)
    option_values |= _given_by(task)
    if print_config:
        echo(config_text(), nl=False)
        return 0
    _check(option_values, verify, after)
    decide_schedule(option_values)
    setup = ModelOptions(**{name: option_values.pop(name) for name in flags(ModelOptions)}, arguments=arguments or ())
    options = CompileOptions(**option_values, known_costs=Path(out) / NODE_COSTS)
    if after is not None:
        print_after(after, task, setup, options, costs, as_json)
        return 0
    with locked(build_lock(out), out, "-o", again=True):  # at once: two compiles must not write one folder
        model_build = build_model(task, setup, options, costs)
        build = model_build.build.save(out, model_file=model)
    for line in build.passes if verbose else ():
        note(line)
    for warning in build.warnings:
        warn(warning)
    agreement = None
    if verify:
        with working("verifying"):
            agreement = worst_agreement(
                compare_with_eager(part, model_build.model, task.loss, b, seed=setup.seed, loss_weight=task.loss_weight)
                for part, b in zip(build.of_shapes, (model_build.example, *model_build.shapes), strict=True)
            )
    effect = None
    if verify and codec_facts(build.plan):
        with working("trying the codecs"):
            effect = codec_effect(build, model_build.example, seed=setup.seed, loss_weight=task.loss_weight)
    failed = agreement is not None and not agreement.largest <= EXACT
    finite = effect is None or effect.finite
    device = None if model_build.options.device is None else model_build.options.device.name
    written = WrittenBuild(build, out, device, agreement, effect)
    put(written.facts, as_json, written.show)
    if agreement is not None and failed:
        where, error = agreement.worst
        note(f"error: {where} differs from eager PyTorch: relative error {error:.1e} (limit {EXACT:g})")
        if agreement.cause:
            note(f"cause: {agreement.cause}")
        note(f"hint: {DIFFERS}")
    if not finite:
        note(
            "error: with codecs, this step is not finite: infinite numbers cross workers, as in masks; leave out their "
            "kind of edge, as in --codec activation=none,gradient=int8"
        )
    return 1 if failed or not finite else 0


def _check(option_values: Mapping[str, Any], verify: bool, after: str | None) -> None:
    """Refuse options that contradict each other."""
    if (cuts := option_values["cuts"]) != "auto" and (option_values["forward_at"] or option_values["backward_at"]):
        raise click.UsageError(
            f"--cuts {cuts} lets the planner choose, --fp-cut and --bp-cut set the cuts: give one of them"
        )
    if option_values["meta"] and verify:
        raise click.UsageError("--verify runs the step, but --meta leaves parameters without values")
    if after is not None and verify:
        raise click.UsageError("--after ends the compile before there are stages to verify: leave out --verify")


def _given_by(task: Task) -> dict[str, Any]:
    """The options that the model file gives; prints them, and those that it gives to runs."""
    runs = read_options("run_options", task.run_options, options_of("run", RunOptions), str(task.file))
    options = compile_options_of(task)
    say_given(str(task.file), runs, "runs")
    return options


def _like(folder: str) -> dict[str, Any]:
    """The options of another build, where nothing else gives them, so that its checkpoints can be resumed."""
    plan, context = read_plan(folder), click.get_current_context()
    theirs = options_like(plan)
    typed = {name for name in theirs if is_given(name)}
    if "schedule" in typed and context.params["schedule"] != plan.schedule:
        typed.add("policy")  # it belongs to the schedule
    if typed & {"dp", "replicas"}:
        typed |= {"dp", "replicas"}
    texts = {name: (",".join(map(str, one)) or None) if isinstance(one, tuple) else one for name, one in theirs.items()}
    flags = {name: option.opts[-1] for name, option in options_of("compile").items()}
    return values(take({name: Written(flags[name], texts[name], theirs[name]) for name in theirs}, folder, typed))
