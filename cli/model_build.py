"""A build of a model file, in memory: what `compile` writes."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import click
from torch import nn

from fxpipe.builds.build import Build
from fxpipe.cli.cost_options import CostOptions
from fxpipe.cli.output import echo, put, warn, working
from fxpipe.cli.passes import after_pass
from fxpipe.errors import FxpipeError
from fxpipe.ir.printer import print_program
from fxpipe.ir.saved_program import file_of, read_programs
from fxpipe.ir.transform import run_passes
from fxpipe.lowering.first_of_each import batches_to_compile, open_end
from fxpipe.lowering.lower import compile
from fxpipe.lowering.options import CompileOptions
from fxpipe.measure.stages import measure_stages
from fxpipe.options import flags
from fxpipe.passes import every_pass
from fxpipe.planner.costs_file import BuildCosts
from fxpipe.planner.links import NCCL_NODE
from fxpipe.random_state import seed_everything
from fxpipe.runtime.process.device import reuse_freed_memory
from fxpipe.settings import pairs
from fxpipe.task.batch import Batch
from fxpipe.task.captured import captured_of
from fxpipe.task.model_file import Task, hook_raised
from fxpipe.task.model_options import ModelOptions
from fxpipe.task.splitter import splitter_of
from fxpipe.tracing.hook_state import BeforeModel

OFF = 1.3
"""How far the time of a stage may be from the sum of its operators' times without a warning."""

MANY_SHAPES = (
    "the first {} batches of train_data() have {} shapes, each with stages of its own; a batch of another shape gets "
    "its stages during the run (--new-shapes), in some seconds: --scan N finds more of them now, --pad-to needs fewer"
)

IN_COMMAND = (
    "workers", "cuts", "forward_at", "backward_at", "schedule", "synchronous", "virtual", "dp", "outer", "outer_every",
    "outer_lr", "outer_momentum", "outer_delay", "shard", "replicas", "microbatches", "codec", "recompute", "autocast",
    "params", "constant_batch", "pad_to", "scan",
)  # fmt: skip
"""Options that the command in the stages' headers has, in its order, where they differ from their defaults."""

NOTICEABLE = 5e-3
"""The least seconds of a stage's forward and backward for such a warning."""


@dataclass(frozen=True)
class ModelBuild:
    """A build, and what it was made from: the first batch, and the first of every further shape."""

    build: Build
    task: Task
    model: nn.Module
    example: Any
    shapes: tuple[Batch, ...]
    options: CompileOptions


def build_model(task: Task, setup: ModelOptions, options: CompileOptions, costs: CostOptions) -> ModelBuild:
    """Compile a model file, in memory; time its stages where times are measured."""
    assert task.path is not None
    path = task.path
    if setup.meta and options.backend != "eager":
        raise click.UsageError(
            f"--backend {options.backend} is tried on the stages, but --meta leaves parameters "
            "without values: leave it out, and give it to `fxpipe run`"
        )
    plain_options, options = options, costs.applied(options, meta=setup.meta)
    reuse_freed_memory()
    with working("reading the model"):
        _ = options.encoding  # refused before the work, and after the file, which may have codecs of its own
        before, calls_model = BeforeModel(task.hooks.of_run), []
        model, first = setup.make_with(task, options.scan, lambda: calls_model.append(before.changed()))
    if setup.device == "cuda" or any(p.device.type == "cuda" for p in model.parameters()):
        options = costs.applied(plain_options, NCCL_NODE, meta=setup.meta)
    for warning in task.warnings:
        warn(warning)
    options = dataclasses.replace(options.for_task(task), command=_command(path.name, setup, options))
    evaluation = None
    if task.validates:
        held_out = _batches("eval_data", task.eval_data, task, setup.seed)
        evaluation = task.metrics, held_out, task.metrics_of_all if task.gathers else None
    with working("compiling") as say:
        (batch, *shapes), last = batches_to_compile(first, options, setup.device)
        more: dict[str, Any] = {"shapes": shapes, "last": last, "evaluation": evaluation}
        build = compile(model, task.loss, batch, options, **more, say=say)
        padded = [one.padded(build.plan.padding) for one in (*shapes, *([] if last is None else [last]))]
        compiled = [next(filter(splitter_of(one).fits, padded)) for one in build.plan.of_shapes[1:]]
        seen = len([one for one in compiled if one in padded[: len(shapes)]]) + 1
        doubts = [MANY_SHAPES.format(len(first.batches), seen)] if seen > 2 else []
        doubts += open_end(first, 1 + len(compiled), options)
        if options.cost == "measured":
            build = _timed(build, first.batches[0], task, options.threads or 1, say)
    lines = [row.source for row in build.nodes.rows if row.source] if build.nodes else []
    captured = captured_of(path, pairs(setup.settings), setup.arguments, lines)
    read = dataclasses.replace(captured, run_options=task.run_options, calls_model=any(calls_model))
    plan = dataclasses.replace(build.plan, model_file=read)
    build = dataclasses.replace(build, plan=plan, warnings=(*build.warnings, *doubts))
    return ModelBuild(build, task, model, first.batches[0], tuple(compiled), options)


def _command(name: str, setup: ModelOptions, options: CompileOptions) -> str:
    """The command that makes this build again, without the paths that differ from machine to machine, and without the
    options that the model file gives."""
    parts, by_field = ["fxpipe compile", name], flags(CompileOptions)
    for field in IN_COMMAND:
        flag, value = by_field[field], getattr(options, field)
        if field == "schedule" and options.from_file:
            value = "FILE.csv"
        elif field not in ("workers", "schedule") and value in (None, (), flag.default):
            continue
        repeated = value if isinstance(flag.default, tuple) else [_text(value)]
        parts += [flag.names[0] if value is True else f"{flag.names[0]} {shlex.quote(text)}" for text in repeated]
    parts += ["--meta"] if setup.meta else []
    parts += [f"--set {shlex.quote(setting)}" for setting in setup.settings]
    parts += ["--", *map(shlex.quote, setup.arguments)] if setup.arguments else []
    return " ".join(parts)


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _batches(hook: str, data: Callable[[], Iterable[Any]], task: Task, seed: int) -> Iterator[Any]:
    """The batches that a hook gives; it is called when the first one is needed."""
    seed_everything(seed)
    try:
        yield from data()
    except FxpipeError:
        raise
    except Exception as error:
        raise hook_raised(hook, error, task.path) from error


def _timed(build: Build, example: Any, task: Task, threads: int, say: Callable[[str], None]) -> Build:
    say("timing the stages")
    times = measure_stages(build, example, optimizer=task.optimizer, threads=threads, say=say)
    costs = dataclasses.replace(build.costs, times=times)
    doubts = doubts_of(costs, build.plan.ranks, threads, build.plan.device)
    node_costs = None if list(_contradicted(costs)) else build.node_costs
    return dataclasses.replace(build, costs=costs, node_costs=node_costs, warnings=(*build.warnings, *doubts))


def _contradicted(costs: BuildCosts) -> Iterator[tuple[int, float]]:
    """The stages whose time is far from the sum of their operators' times, and the factor."""
    on_engines = {time.worker for time in costs.engines if time.chosen and time.engine != "eager"}
    for k, time in enumerate(costs.times):
        off = costs.correction(k)
        if off is not None and k not in on_engines and time.microbatch > NOTICEABLE and not 1 / OFF < off < OFF:
            yield k, off


def doubts_of(costs: BuildCosts, ranks: int, threads: int, device: str) -> Iterator[str]:
    """Reasons why a run may not reach what the times of the stages promise."""
    for k, off in _contradicted(costs):
        yield (
            f"stage {k} took {off:.2f} times the sum of its operators' times: the machine may have been busy while "
            "one was timed; the forecast uses the stage's time, the cuts those of the operators; compile again when it "
            "is not busy, which times both"
        )
    cores = os.cpu_count() or 1
    if device == "cpu" and ranks * threads > cores:
        yield (
            f"{ranks} workers of {threads} thread{'s' if threads > 1 else ''} share {cores} cores here: the "
            "forecast is for workers that have their own cores"
        )


def print_after(
    name: str, task: Task, setup: ModelOptions, options: CompileOptions, costs: CostOptions, as_json: bool
) -> None:
    """Print the program after a pass, as `fxpipe passes` does of a build."""
    texts = build_model(task, setup, options, costs).build.programs
    saved = after_pass(read_programs(file_of(texts), every_pass()), name)
    text = print_program(run_passes(saved.program, saved.passes))
    put({"after": name, "program": text}, as_json, lambda facts: echo(text, nl=False))
