"""`fxpipe compile`: a model file in, a build directory out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from fxpipe.cli.command import group
from fxpipe.cli.cost_options import CostOptions
from fxpipe.cli.file_options import (
    Written,
    compile_options_of,
    is_given,
    options_of,
    read_options,
    say_given,
    take,
    values,
)
from fxpipe.cli.model_arguments import WithArguments
from fxpipe.cli.option_fields import AbsolutePath, option_fields
from fxpipe.cli.output import echo, emit_json, note, print_columns, print_table, stdout_console, warn, working
from fxpipe.cli.schedule_comparison import asked_schedule, print_schedules
from fxpipe.cli.settings_file import SettingsFile, config, config_text, print_config

from fxpipe.errors import listed
from fxpipe.inspection.tables import workers
from fxpipe.lowering.options import CompileOptions, options_like
from fxpipe.messages import plain
from fxpipe.observe.rates import samples_of
from fxpipe.options import flags
from fxpipe.plan.build_folder import check_target, read_plan
from fxpipe.plan.cost_records import EngineTime, WorkerSummary
from fxpipe.plan.spec import Plan
from fxpipe.policy.recipe import choose
from fxpipe.runtime.options import RunOptions
from fxpipe.schedule import of_plan
from fxpipe.schedule.graph import graph_text
from fxpipe.task.model_options import ModelOptions

if TYPE_CHECKING:
    from fxpipe.build.build import Build
    from fxpipe.inspection.staleness import Staleness
    from fxpipe.lowering.agreement import Agreement
    from fxpipe.lowering.codec_effect import CodecEffect
    from fxpipe.simulator.result import Simulation
    from fxpipe.task.model_file import Task


DIFFERS = (
    "do not train with this build; compile with --microbatches 1, then with -n 1, to see whether cutting the batch or "
    "the model is the cause; if you report it, attach the model file"
)

MOST_SHOWN = 4
"""How many of the compared schedules are shown: the best one and the next three."""


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
    **asked: Any,
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
    from fxpipe.cli.model_build import build_model
    from fxpipe.cli.program_after_pass import print_after

    from fxpipe.costs.node_costs_file import NODE_COSTS
    from fxpipe.inspection.codecs import codec_facts
    from fxpipe.inspection.staleness import staleness_of
    from fxpipe.lowering.agreement import LIMIT, worst_agreement
    from fxpipe.lowering.codec_effect import codec_effect
    from fxpipe.lowering.compare_with_eager import compare_with_eager
    from fxpipe.plan.lock import build_lock, locked
    from fxpipe.simulator.forecast import forecast

    asked |= SettingsFile.of(config, Path(model)).options("compile")
    like, out, verify, verbose = (asked.pop(name) for name in ("like", "out", "verify", "verbose"))
    costs = CostOptions.of(asked)
    _check(asked, verify, after)
    if after is None and not print_config:
        check_target(Path(out))
    with working("reading the model"):
        task = ModelOptions(settings=asked["settings"], arguments=arguments or ()).load(model)
    if like is not None:
        asked |= _like(like)
    asked |= _given_by(task)
    if print_config:
        echo(config_text(), nl=False)
        return 0
    _check(asked, verify, after)
    asked_schedule(asked)
    made_as = ModelOptions(**{name: asked.pop(name) for name in flags(ModelOptions)}, arguments=arguments or ())
    options = CompileOptions(**asked, known_costs=Path(out) / NODE_COSTS)
    if after is not None:
        print_after(after, task, made_as, options, costs, as_json)
        return 0
    with locked(build_lock(out), out, "-o"):  # at once: two compiles must not write one folder
        made = build_model(task, made_as, options, costs)
        simulation = forecast(made.build.plan, made.build.costs)
        recipe = choose(made.build.plan)
        staleness = staleness_of(recipe.policy, recipe.demand.versions)
        build = made.build.save(out, model_file=model)
    for line in build.passes if verbose else ():
        note(line)
    for warning in build.warnings:
        warn(warning)
    agreement = None
    if verify:
        with working("verifying"):
            agreement = worst_agreement(
                compare_with_eager(part, made.model, task.loss, b, seed=made_as.seed, loss_weight=task.loss_weight)
                for part, b in zip(build.of_shapes, (made.example, *made.shapes), strict=True)
            )
    effect = None
    if verify and codec_facts(build.plan):
        with working("trying the codecs"):
            effect = codec_effect(build, made.example, seed=made_as.seed, loss_weight=task.loss_weight)
    failed = agreement is not None and not agreement.largest <= LIMIT
    finite = effect is None or effect.finite
    if as_json:
        emit_json(_as_json(build, out, agreement, effect, simulation, staleness))
    else:
        _print(
            build,
            out,
            agreement,
            effect,
            simulation,
            staleness,
            None if made.options.device is None else made.options.device.name,
        )
    if agreement is not None and failed:
        where, error = agreement.worst
        note(f"error: {where} differs from eager PyTorch: relative error {error:.1e} (limit {LIMIT:g})")
        if agreement.cause:
            note(f"cause: {agreement.cause}")
        note(f"hint: {DIFFERS}")
    if not finite:
        note(
            "error: with codecs, this step is not finite: infinite numbers cross workers, as in masks; leave out their "
            "kind of edge, as in --codec activation=none,gradient=int8"
        )
    return 1 if failed or not finite else 0


def _check(asked: Mapping[str, Any], verify: bool, after: str | None) -> None:
    """Refuse options that contradict each other.

    Raises:
        click.UsageError: names them.
    """
    if asked["cuts"] != "auto" and (asked["forward_at"] or asked["backward_at"]):
        raise click.UsageError(
            f"--cuts {asked['cuts']} lets the planner choose, --fp-cut and --bp-cut set the cuts: give one of them"
        )
    if asked["meta"] and verify:
        raise click.UsageError("--verify runs the step, but --meta leaves parameters without values")
    if after is not None and verify:
        raise click.UsageError("--after ends the compile before there are stages to verify: leave out --verify")


def _given_by(task: Task) -> dict[str, Any]:
    """The options that the model file gives; prints them, and those that it gives to runs."""
    runs = read_options("run_options", task.run_options, options_of("run", RunOptions), str(task.file))
    found = compile_options_of(task)
    say_given(str(task.file), runs, "runs")
    return found


def _like(folder: str) -> dict[str, Any]:
    """The options of another build, where nothing else gives them, so that its checkpoints can be resumed."""
    plan, context = read_plan(folder), click.get_current_context()
    found = options_like(plan)
    given = {name for name in found if is_given(name)}
    if "schedule" in given and context.params["schedule"] != plan.schedule:
        given.add("policy")  # it belongs to the schedule
    if given & {"dp", "replicas"}:
        given |= {"dp", "replicas"}
    texts = {name: (",".join(map(str, one)) or None) if isinstance(one, tuple) else one for name, one in found.items()}
    flags = {name: option.opts[-1] for name, option in options_of("compile").items()}
    return values(take({name: Written(flags[name], texts[name], found[name]) for name in found}, folder, given))


def _print(
    build: Build,
    out: str,
    agreement: Agreement | None,
    effect: CodecEffect | None,
    simulation: Simulation,
    staleness: Staleness,
    device: str | None,
) -> None:
    from fxpipe.codecs.accuracy_warnings import not_studied, used_by
    from fxpipe.inspection.batches import microbatch_lines, shape_lines
    from fxpipe.inspection.codecs import codec_facts, codec_text, outer_facts, outer_text
    from fxpipe.inspection.evaluation import evaluation_facts, evaluation_text
    from fxpipe.inspection.subject import subject_of
    from fxpipe.inspection.workers import again_text, worker_rows
    from fxpipe.lowering.choose_cuts import lost_in_noise
    from fxpipe.lowering.own_rounding import rounding_text
    from fxpipe.simulator.forecast import late_instead

    plan = build.plan
    print_columns(workers({"workers": worker_rows(subject_of(build))}), stdout_console(), whole=True)
    _print_engines(build)
    if build.costs.schedules:
        print_schedules(build.costs.schedules, samples_of(plan), MOST_SHOWN)
    echo(
        f"{plan.schedule} · {plan.policy} · {plan.microbatches} microbatch{'es' if plan.microbatches > 1 else ''} · "
        + (f"{plan.dp} replicas of each worker · " if plan.dp > 1 else "")
        + ("" if plan.outer is None else f"{plan.outer} · ")
        + (f"{listed([str(count) for count in plan.replicas])} replicas · " if plan.crossing else "")
        + f"{len(plan.edges)} edges"
    )
    for line in (*microbatch_lines(plan), *shape_lines(plan)):
        echo(line)
    schedule = of_plan(plan)
    if text := graph_text(schedule.after):
        echo(text)
    if not schedule.synchronous:
        echo(f"staleness: {staleness}")
    if build.costs.partitions:
        *others, chosen = build.costs.partitions
        text = ", ".join(f"{p.mode} {p.efficiency:.3f}" for p in others)
        lost = build.profile and lost_in_noise(build.costs.partitions, build.profile)
        echo(
            f"cuts: {chosen.mode}, {chosen.efficiency:.3f} of ideal{f' ({text})' if text else ''}"
            + (f"; {lost}" if lost else "")
        )
    if again := again_text(build.costs):
        echo(again)
    if not build.costs.times:
        echo(f"costs: computed{'' if device is None else f' for {device}'}, not measured")
    echo(
        f"forecast: {simulation.samples_per_second(samples_of(plan)):.1f} samples/s, "
        f"bubble {100 * simulation.bubble:.0f} %"
    )
    if faster := late_instead(plan, build.costs, simulation.seconds_per_minibatch):
        name, seconds = faster
        echo(
            f"updates wait for sums over replicas: with --schedule {name}, one update later, "
            f"{samples_of(plan) / seconds:.1f} samples/s"
        )
    if outer := outer_facts(plan):
        echo(outer_text(outer))
    if codecs := codec_facts(plan, build.costs):
        text = codec_text(codecs)
        if codecs["plain_seconds"] and codecs["seconds"]:
            rates = [samples_of(plan) / codecs[key] for key in ("seconds", "plain_seconds")]
            text += "; by the operators' costs {:.1f} samples/s, {:.1f} without codecs and cut for that".format(*rates)
        echo(text)
        if unknown := not_studied(used_by(plan)):
            note(unknown)
    if agreement is not None:
        name, error = agreement.worst_gradient
        if agreement.not_compared:
            note(f"loss and gradients were not compared: {agreement.not_compared}")
        if agreement.not_finite:
            warn(f"infinite or NaN in eager PyTorch too, so only partly compared: {listed(agreement.not_finite, 6)}")
        if agreement.rounding:
            note(rounding_text(agreement))
        for text in agreement.notes:
            note(text)
        if agreement.zero:
            note(f"zero for the example batch in eager PyTorch: the gradients of {listed(agreement.zero, 6)}")
        plainly = ", without codecs" if effect else ""
        if plan.batch_norm and plan.microbatches > 1:
            plainly += f", with batch norm on microbatches of {samples_of(plan) // plan.microbatches}"
        echo(
            f"against eager PyTorch{plainly}: loss {agreement.loss:.1e}, "
            f"largest gradient error {error:.1e} ({plain(name)}), "
            f"largest buffer error {max(agreement.buffers.values(), default=0.0):.1e}"
            + (f", largest metric error {max(agreement.metrics.values()):.1e}" if agreement.metrics else "")
        )
    if effect is not None:
        name, error = effect.worst
        echo(
            f"codecs change the loss of this batch by {effect.loss:.1e}, its gradients by {effect.gradients:.1e} "
            f"(most: {plain(name)}, {error:.1e})"
        )
    if plan.meta:
        echo("weights: none (--meta); a run calls model() to make them on each worker, or reads --weights")
    if plan.evaluations:
        echo(evaluation_text(evaluation_facts(plan)))
    echo(f"wrote {out}: {', '.join(s.file for s in plan.stages)}, plan.json, weights.safetensors")


def _print_engines(build: Build) -> None:
    """The time of each part on each engine, the chosen one marked; why an engine was left out."""
    if not build.costs.engines:
        return
    engines = list(dict.fromkeys(t.engine for t in build.costs.engines))
    parts: dict[str, dict[str, EngineTime]] = {}
    for t in build.costs.engines:
        parts.setdefault(t.part, {})[t.engine] = t
    rows = []
    for part, times in parts.items():
        row = [part]
        for name in engines:
            found = times.get(name)
            if found is None or found.seconds is None:
                row.append("–")
            else:
                row.append(f"{1e3 * found.seconds:.1f} ms{' ←' if found.chosen else ''}")
        rows.append(row)
    print_table(["", *engines], rows)
    reasons: dict[str, list[str]] = {}
    for t in build.costs.engines:
        if t.reason:
            reasons.setdefault(f"{t.engine} left out: {t.reason}", []).append(t.part)
    for reason, names in reasons.items():
        note(reason if len(names) == len(parts) else f"{', '.join(names)}: {reason}")


def _milliseconds(worker: WorkerSummary) -> dict[str, Any]:
    """The worker's record with times in milliseconds, under names that say so."""
    times = ("forward", "backward", "weight", "update", "again")
    row = dataclasses.asdict(worker)
    return {f"{name}_ms" if name in times else name: 1e3 * v if name in times else v for name, v in row.items()}


def _as_json(
    build: Build,
    out: str,
    agreement: Agreement | None,
    effect: CodecEffect | None,
    simulation: Simulation,
    staleness: Staleness,
) -> dict[str, Any]:
    from fxpipe.inspection.codecs import codec_facts
    from fxpipe.inspection.facts import build_facts
    from fxpipe.inspection.subject import subject_of

    plan, facts = build.plan, build_facts(subject_of(build))
    result: dict[str, Any] = {
        "out": out,
        **{name: facts[name] for name in ("schedule", "policy", "microbatches")},
        "dp": plan.dp,
        **{name: facts[name] for name in ("outer", "outer_step", "microbatch_loss", "shapes", "padding")},
        "forward_cuts": [_unit(plan, s.forward_units[0]) for s in plan.stages[1:]],
        "backward_cuts": [_unit(plan, s.backward_units[0]) for s in plan.stages[1:]],
        "weight_cuts": [_unit(plan, s.weight_units[0]) for s in plan.stages[1:]],
        "partitions": {p.mode: p.efficiency for p in build.costs.partitions},
        "cuts": facts["cuts"],
        "forecast": {
            "samples_per_second": simulation.samples_per_second(facts["samples"]),
            "milliseconds": 1e3 * simulation.seconds_per_minibatch,
            "bubble": simulation.bubble,
        },
        "staleness": dataclasses.asdict(staleness),
        "evaluation": facts["evaluation"],
        "workers": [_milliseconds(w) for w in build.costs.workers],
        "times": [
            {**dataclasses.asdict(measured), "nodes": [w.time.forward, w.time.backward + w.time.weight]}
            for measured, w in zip(build.costs.times, build.costs.workers, strict=False)
        ],
        "engines": [dataclasses.asdict(t) for t in build.costs.engines],
        "codecs": codec_facts(plan, build.costs),
        "warnings": list(build.warnings),
        "schedules": [dataclasses.asdict(row) for row in build.costs.schedules],
    }
    if agreement is not None:
        result["verify"] = dataclasses.asdict(agreement)
    if effect is not None:
        result["codec_effect"] = dataclasses.asdict(effect)
    return result


def _unit(plan: Plan, position: int) -> str | None:
    """The module path after a cut; None for a cut at the end."""
    return plan.units[position] if position < len(plan.units) else None
