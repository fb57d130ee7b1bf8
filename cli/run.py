"""`fxpipe run`: train a build, with one process for each stage."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from fxpipe.cli.command import AbsolutePath, WithArguments, group, option_fields
from fxpipe.cli.file_options import (
    SettingsFile,
    config,
    config_text,
    options_of,
    print_config,
    read_options,
    say_given,
    take,
    values,
)
from fxpipe.cli.output import echo, note, print_columns, put, show_error, warn, working
from fxpipe.cli.signals import end_at_once
from fxpipe.errors import FxpipeError, PeerLost
from fxpipe.inspection import tables
from fxpipe.inspection.run_comparison import SMOOTH, smoothed
from fxpipe.observe.rates import rates_text, steps_made
from fxpipe.options import option
from fxpipe.plan.build_folder import load_plan, model_path, read_plan
from fxpipe.plan.plan import Plan
from fxpipe.policy import check_policy
from fxpipe.runtime.options import KEPT, RunOptions
from fxpipe.schedule import of_plan


@dataclass(frozen=True)
class _Flags(RunOptions):
    local: bool = option(False, help="Run all workers in this one process: the same numbers, easy to debug.")


@click.command("run", cls=WithArguments)
@click.argument("build", type=AbsolutePath())
@group("Length", option_fields(_Flags, "steps", "epochs", "steps_per_epoch"), first="steps epochs")
@group(
    "Evaluation",
    option_fields(_Flags, "eval_every", "save_best", "patience", "patience_metric", "min_delta"),
    first="eval_every save_best",
    also="patience",
)
@group(
    "Training",
    option_fields(_Flags, "settings", "seed", "clip_norm", "schedule", "policy", "ema", "weights"),
    option_fields(_Flags, "loss_scale", "loss_scale_interval", "accept_optimizer_per_worker", "keep_going"),
    first="settings seed clip_norm",
    also="schedule policy",
)
@group(
    "Checkpoints",
    option_fields(_Flags, "checkpoint_every", "keep", "resume", "max_restarts", "on_loss"),
    first="checkpoint_every resume",
)
@group(
    "Processes and memory",
    option_fields(_Flags, "local", "backend", "offload", "threads", "new_shapes", "throttle", "stall_timeout"),
    option_fields(_Flags, "rebalance"),
    first="local",
    also="throttle",
)
@group(
    "Output",
    option_fields(_Flags, "out", "model_file", "trace", "profile", "nvtx", "log", "log_staleness", "peak"),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
    config,
    print_config,
    first="out trace",
)
def run_command(build: str, as_json: bool, config: str | None, print_config: bool, **option_values: Any) -> int:
    """Train BUILD, a folder that `fxpipe compile` wrote, for --steps, --epochs or one epoch, with a process for each
    stage. Writes weights, under the model's own names, and metrics to OUT. Under torchrun, joins its processes.

    \b
    fxpipe run build/ --steps 500
    fxpipe run build/ --steps 40 --eval-every 10 --save-best loss --patience 3
    fxpipe run build/ --steps 500 --policy pipeoptim --clip-norm 1.0
    fxpipe run build/ --steps 40 --eval-every 20 --json
    fxpipe run build/ --steps 50 --local --json
    fxpipe run build/ --steps 40 --trace trace.json --out run/
    fxpipe run build/ --steps 500 --backend onnxruntime
    torchrun --nproc-per-node 2 --no-python fxpipe run build/ --steps 500

    Writes OUT/metrics.jsonl line by line, OUT/model.safetensors, and OUT/run.json: what the run was and where its time
    went (`fxpipe compare`, `fxpipe inspect BUILD --run OUT`). The averaged weights of --ema are evaluated last.

    If the model file has eval_data() and metrics(model, batch), the workers evaluate the weights at the end, and after
    every --eval-every steps, through the pipeline, in eval mode. This does not change training. A metric whose name
    ends in loss, error, perplexity, ppl, mse, mae, nll, bpc, wer, cer or fid is better if it is lower, any other if it
    is higher; +METRIC (higher) and -METRIC (lower) override this.

    The model file's on_step(step, loss, run), on_eval(step, metrics, run) and on_epoch(epoch, run) are called in every
    process with the same numbers. If one returns a true value, the run ends some steps later. run.set_lr(RATE) sets the
    learning rates of the next updates; run.save() makes a checkpoint.

    --set, and what follows -- (the model file's own command line), replace the build's values. Values that capture did
    not read, such as a learning rate, need no new compile; nor do changes of optimizer, scheduler, data and callbacks.

    With schedule async, --policy chooses the weights of each action: 2bw, latest, lwp, pipeoptim, spectrain, stash,
    vertical, xgrad, xpipe, or one that the model file registers. Switches follow it, as in pipeoptim+keep. --clip-norm
    is exact with other schedules. With async no worker waits for norms, so those of earlier workers are some
    minibatches old.

    An option that is not on the command line is taken from the table [run] in fxpipe.toml, in the model file's folder;
    else from the model file's run_options. With --resume, the checkpoint's options are kept.
    """
    from fxpipe.runtime.wires.meeting import has_place, widen_queues

    _check(option_values)
    option_values |= _given_to_run(build, option_values, config)
    _check(option_values)
    if print_config:
        echo(config_text(load_plan(build).model_file), nl=False)
        return 0
    local = option_values.pop("local")
    options = RunOptions(build, **option_values, progress=not as_json or sys.stderr.isatty())
    joined = has_place()
    if joined:
        widen_queues()
        end_at_once()
    with ExitStack() as held:
        summary = _train(options, local, joined, held)
        _finish(options, summary, as_json)
    if joined:
        from fxpipe.runtime.process.ends import end_process

        end_process(0)
    return 0


def _check(option_values: Mapping[str, Any]) -> None:
    if option_values["steps"] is not None and option_values["epochs"] is not None:
        raise click.UsageError("--steps and --epochs both set the length of the run: give one of them")


def _given_to_run(build: str, option_values: Mapping[str, Any], config: str | None) -> dict[str, Any]:
    """The options that fxpipe.toml and the build's model file give where the command line does not; printed, too.

    A resumed run takes from its checkpoint the options that its numbers depend on.
    """
    plan = load_plan(build)
    left = (*KEPT, "settings", "weights") if option_values["resume"] is not None else ()
    from_file = SettingsFile.of(config, model_path(plan, build, option_values["model_file"])).options("run", left)
    file = plan.model_file.name
    from_model = read_options("run_options", plan.model_file.run_options, options_of("run", RunOptions), file)
    taken = take(from_model, file, left)
    say_given(file, taken)
    return from_file | values(taken)


def _finish(options: RunOptions, summary: dict[str, Any] | None, as_json: bool) -> None:
    """Evaluate what was trained, if the workers did not, and print the summary."""
    if summary is not None:  # else this is a worker other than the first, under torchrun
        from fxpipe.observe.out_folder import AVERAGED_WEIGHTS, FINAL_WEIGHTS
        from fxpipe.observe.run_json import RunJson

        if lost := summary["not_finite"]["losses"]:
            first = next(i for i, loss in enumerate(summary["losses"], start=1) if not math.isfinite(loss))
            warn(f"{lost} losses are not finite, first at step {first}")
        options = replace(options, build=summary["build"]["folder"])  # a move may have changed it
        digest = summary["build"]["digest"]
        if "evaluation" not in summary and (evaluated := _evaluate(options, digest, FINAL_WEIGHTS)):
            run = RunJson.of(summary)
            run.evaluated(evaluated)
            if averaged := _evaluate(options, digest, AVERAGED_WEIGHTS):
                run.averages_evaluated(averaged)
            summary = run.to_json()
        put(summary, as_json, _print)


def _train(options: RunOptions, local: bool, joined: bool, held: ExitStack) -> dict[str, Any] | None:
    """Train; the summary, on worker 0. `held` gets the lock of the output folder."""
    from fxpipe.runtime.process.check_run import writing
    from fxpipe.runtime.process.resume import resumed_options

    if joined:
        from fxpipe.cli.output import give_stdout_back
        from fxpipe.runtime.process.ends import end_process

        with working("loading torch") if os.environ["RANK"] == "0" else nullcontext():
            from fxpipe.runtime.process.start import join_by_command

        if node := _other_node(options.build):
            note(f"{node} running here; the node of worker 0 shows progress and results")
        try:
            summary = join_by_command(options, give_stdout_back)
        except PeerLost as error:  # another worker failed first, perhaps on another machine
            if os.environ.get("LOCAL_RANK", "0") == "0":
                show_error(str(error))
            end_process(1)
        if node:
            note(f"{node} done: training has ended")
        return summary
    plan = _checked_plan(options)
    held.enter_context(writing(options.out, again=True))
    options = resumed_options(replace(options, plan_digest=plan.digest), options.out)
    flushes = options.schedule not in (None, plan.schedule) and of_plan(plan, options.schedule).synchronous
    if flushes and plan.microbatches == 1 and plan.workers > 1:
        warn(
            f"the build has one microbatch, so {options.schedule} runs its workers one after the other; "
            f"compile with --schedule {options.schedule} --microbatches {2 * plan.workers} to overlap them"
        )
    if local:
        with working("loading torch"):
            from fxpipe.runtime.process.start import run_local

        return run_local(options)
    from fxpipe.runtime.process.launch import launch

    return launch(options, plan.processes, plan.mesh)


def _other_node(build: str) -> str | None:
    """In the first process of a machine without worker 0: the processes of that machine, in words. Elsewhere None."""
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    if local or not rank or os.environ.get("GROUP_RANK") in (None, "0"):
        return None
    try:
        noun = read_plan(build).mesh.noun
    except FxpipeError:  # reported later, with all other errors
        noun = "worker"
    last = rank + int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1
    return f"{noun} {rank} is" if last == rank else f"{noun}{'es' if noun == 'process' else 's'} {rank} to {last} are"


def _checked_plan(options: RunOptions) -> Plan:
    """The build's plan, after checking that it can do what is asked, is whole and current, and the output can be
    written."""
    from fxpipe.runtime.process.best_weights import Goal
    from fxpipe.runtime.process.check_run import check_evaluation, check_run

    plan, _ = check_run(options)
    if options.eval_every is not None:
        check_evaluation(plan, "--eval-every")
    Goal.of(options, plan)
    Goal.to_go_on(options, plan)
    schedule = of_plan(plan, options.schedule)
    check_policy(options.policy, schedule)
    return plan


def _evaluate(options: RunOptions, digest: str, weights: str) -> dict[str, float]:
    """The metrics of a weights file of the run's folder, computed here; none if there is no such file."""
    plan = read_plan(options.build)
    path = model_path(plan, options.build, options.model_file)
    if path is None or options.out is None or not (Path(options.out) / weights).is_file():
        return {}
    if plan.digest != digest:
        warn("the final weights are not evaluated: the build was replaced while they were trained")
        return {}
    if plan.model_file.sources and not plan.not_evaluated:  # the file is unchanged, and has nothing to evaluate
        return {}
    from fxpipe.task.evaluate_weights import evaluate
    from fxpipe.task.model_file import task_of_build

    task = task_of_build(plan, options.build, options.model_file, options.settings, options.arguments)
    if plan.weights.meta:
        if task.validates:
            warn("the final weights are not evaluated: they may be larger than this process's memory (--meta)")
        return {}
    with working("evaluating"):
        return evaluate(task, plan, Path(options.out) / weights)


def _print(summary: dict[str, Any]) -> None:
    from fxpipe.observe.out_folder import AVERAGED_WEIGHTS, BEST_WEIGHTS
    from fxpipe.observe.progress import held_out

    losses = summary["losses"]
    last = smoothed(losses)
    if summary["seconds"]:
        echo(
            f"{steps_made(summary)} in {summary['seconds']:.1f} s · {rates_text(summary).replace('  ', ' · ')} · "
            f"loss {losses[0]:.4f} → {math.nan if last is None else last:.4f} "
            f"(mean of the last {min(len(losses), SMOOTH)})"
        )
        print_columns(tables.paces(summary["workers"]))
        _print_time(summary)
    else:
        echo(f"no step was left to do: the checkpoint is of step {summary['steps']}, the last one")
    stale = [{"worker": w["worker"], **row} for w in summary["workers"] for row in w.get("staleness", ())]
    if any("staleness" in w for w in summary["workers"]) and not stale:
        echo("staleness: too few steps to compare a forward with its update")
    if stale:
        print_columns(tables.staleness(stale))
    if scaling := summary.get("loss_scaling"):
        echo(f"loss scale {scaling['scale']:g}, steps without an update (overflow): {scaling['skipped_steps']}")
    if "evaluation" in summary:
        echo(held_out(summary["evaluation"]))
    if "averaged_evaluation" in summary:
        echo(f"average  {held_out(summary['averaged_evaluation'])}")
    for restart in summary["restarts"]:
        echo(f"restart  after step {restart['step']}: {restart['cause']}")
    if summary["moves"]:
        print_columns(tables.moves(summary["moves"]))
    if summary["trace"] is not None:
        echo(f"trace    {summary['trace']}")
    for name in dict.fromkeys(row.get("profile") for row in (*summary["workers"], *summary["replicas"])):
        if name is not None:
            echo(f"profile  {Path(summary['out']) / name}")
    echo(f"metrics  {Path(summary['out']) / 'metrics.jsonl'}")
    echo(f"weights  {Path(summary['out']) / 'model.safetensors'}")
    if best := summary.get("best"):
        where = f"{Path(summary['out']) / BEST_WEIGHTS}, of" if best["kept"] else "not kept, because of an error:"
        echo(f"best     {where} step {best['step']}: {best['metric']} {best['value']:.4f}")
    if (average := Path(summary["out"]) / AVERAGED_WEIGHTS).is_file():
        echo(f"average  {average}")


def _print_time(summary: dict[str, Any]) -> None:
    """The bubble, the forecast, and what took most of the time that was lost."""
    if summary["bubble"] is None:
        return
    if summary["forecast"] is not None and not summary["forecast"]["measured"]:
        echo("The build's costs were computed, not measured: its forecast may be far from this machine.")
    text = f"bubble {100 * summary['bubble']:.0f} %"
    if summary["forecast"] is not None:
        text += f" (forecast {100 * summary['forecast']['bubble']:.0f} %)"
    if summary["efficiency"] is not None:
        forecast = summary["forecast"]["samples_per_second"]
        text += f" · {100 * summary['efficiency']:.0f} % of the forecast's {forecast:.1f} samples/s"
    echo(text)
    for loss in summary["time_losses"]:
        echo(f"lost     {loss['text']}")
