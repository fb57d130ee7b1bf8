"""Lowering: a captured program becomes a build, through the passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import nn

from fxpipe.builds.build import Build
from fxpipe.costs.codecs import codec_times
from fxpipe.costs.step_work import step_work
from fxpipe.errors import BackendError, BatchError, CutError, FxpipeError, ScheduleError, listed
from fxpipe.ir.program import Program
from fxpipe.ir.transform import Observer, rarely_collected
from fxpipe.lowering.captured_step import captured_step
from fxpipe.lowering.choose_codecs import emit_encoded
from fxpipe.lowering.choose_cuts import note_on_marks
from fxpipe.lowering.choose_engines import choose_engines
from fxpipe.lowering.choose_schedule import ChosenSchedule, choose_schedule
from fxpipe.lowering.emit import Emitter
from fxpipe.lowering.evaluation import Evaluations, capture_evaluations, with_evaluations, with_totals
from fxpipe.lowering.independent_replicas import with_replicas
from fxpipe.lowering.lowering import Lowering
from fxpipe.lowering.option_rules import check, setting_of
from fxpipe.lowering.options import AUTO, DEFAULTS, CompileOptions
from fxpipe.lowering.padding_doubts import padding_doubts
from fxpipe.lowering.shapes import CapturedShape, left_out, with_shape
from fxpipe.lowering.step_costs import has_no_values, step_costs, tried
from fxpipe.optimizer.per_worker import check_per_worker
from fxpipe.options import changed, taken
from fxpipe.passes.reduce import Reduce
from fxpipe.passes.whole_loss import WholeLoss
from fxpipe.plan.build_folder import ENGINES
from fxpipe.schedule import of_plan
from fxpipe.schedule.base import FLOAT16, check_loss_scaling
from fxpipe.task.batch import Batch
from fxpipe.task.hooks import Loss, Metrics, MetricsOfAll
from fxpipe.task.model_view import of_parameters, without_values
from fxpipe.task.step_hooks import StepHooks, uncompiled
from fxpipe.tracing.capture import one_at_a_time

Say = Callable[[str], None]


@one_at_a_time()
@rarely_collected()
def compile(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    options: CompileOptions = DEFAULTS,
    *,
    shapes: Iterable[Any] = (),
    last: Any = None,
    evaluation: tuple[Metrics, Iterable[Any]] | tuple[Metrics, Iterable[Any], MetricsOfAll | None] | None = None,
    observers: Sequence[Observer] = (),
    say: Say = lambda text: None,
    **changes: Any,
) -> Build:
    """Capture the training step, cut it, and emit each worker's stage: `compile(model, loss, batch, workers=4)`.

    Args:
        model, loss, batch: `loss(model, batch)` is the step; `batch` is one whole minibatch.
        options, changes: `fxpipe.lowering.options.CompileOptions` lists the options.
        shapes: more minibatches: if their shape or constants differ from `batch`, they get separate stages.
            Where batches are padded (`pad_to`), their padded shapes count.
        last: a smaller minibatch, such as the last of an epoch: likewise, or a warning says why not.
        evaluation: `metrics(model, batch)`, a dictionary of numbers and tensors of one element, and the whole batches
            that runs will evaluate on: read once here, for their shapes. With `metrics_of_all` after them, `metrics`
            may return tensors with dimensions, too.
        observers: are called for every pass.
        say: is called with the part of the work that begins.

    Raises:
        FxpipeError: as capture and `lower`; each names the place and what to do.
    """
    if changes.get("synchronous") and "schedule" not in changes:
        changes["schedule"] = AUTO
    options, model = changed(taken("options", options, CompileOptions), changes), uncompiled(model)
    _refuse_sync_batch_norm(model, options)
    _ = options.encoding  # an error comes before the work
    first, *others = (Batch.of(one, options.constant_batch) for one in (batch, *shapes))
    rest = None if last is None else Batch.of(last, options.constant_batch)
    first = first.with_floats_of(others)
    padding = options.padding([first, *others])
    doubts = padding_doubts(model, loss, [first, *others, *([rest] if rest else [])], padding, options)
    first, *others = (one.padded(padding) for one in (first, *others))
    bare, rest = _bare(model), rest and rest.padded(padding)
    options = replace(options, pad=None, pad_to=None, optimizer=of_parameters(options.optimizer, bare))
    chosen = None
    if options.schedule == AUTO:
        chosen = choose_schedule(model, loss, first, options, others, rest, say)
        step = chosen.step
    else:
        step = captured_step(model, loss, first, options, others, rest, say)
    evaluations = None
    if evaluation is not None:
        say("capturing the evaluation")
        metrics, held_out, *of_all = evaluation
        evaluations = capture_evaluations(
            model, metrics, held_out, step.program.device, options, of_all=next(iter(of_all), None), padding=padding
        )
    build = lower(
        step.program,
        step.options,
        whole_loss=step.whole_loss,
        shapes=step.shapes,
        evaluations=evaluations,
        chosen=chosen,
        observers=observers,
        say=say,
    )
    few = step.few.warning(of_plan(build.plan)) if step.few else ""
    plan = replace(build.plan, padding=padding)
    hooks = StepHooks.of_compiled(model, loss, options.loss_weight)
    return replace(
        build, model=bare, hooks=hooks, plan=plan, warnings=(*doubts, *([few] if few else []), *build.warnings)
    )


def _refuse_sync_batch_norm(model: nn.Module, options: CompileOptions) -> None:
    """Refuse a model that asks for statistics over all replicas: each replica would use only its own samples."""
    if not options.replicas and options.dp == 1:
        return
    found = [
        name or "the model"
        for name, module in model.named_modules()
        if isinstance(module, nn.SyncBatchNorm) and module.training
    ]
    if found:
        raise CutError(
            f"SyncBatchNorm ({listed(found, 3)}) would not see the samples of other replicas: each microbatch "
            "is normalised separately",
            hint="nn.BatchNorm1d, 2d or 3d does the same explicitly; nn.GroupNorm and nn.LayerNorm normalise one "
            "sample at a time",
        )


def _bare(model: nn.Module) -> Callable[[], nn.Module] | None:
    """A function that copies the model without values, for optimizers; None if the model cannot be copied."""
    with suppress(Exception):
        found = without_values(model)
        return lambda: found
    return None


def lower(
    program: Program,
    options: CompileOptions = DEFAULTS,
    *,
    whole_loss: WholeLoss | None = None,
    shapes: Sequence[CapturedShape] = (),
    evaluations: Evaluations | None = None,
    chosen: ChosenSchedule | None = None,
    reduce: Reduce | None = None,
    observers: Sequence[Observer] = (),
    say: Say = lambda text: None,
    **changes: Any,
) -> Build:
    """Cut a captured program for some workers and emit each worker's stage: `lower(program, workers=4)`.

    Args:
        program: captured on one microbatch.
        options, changes: `fxpipe.lowering.options.CompileOptions` lists the options.
        whole_loss: the result of `checked_loss`; by default what the options say, without comparing.
        shapes: results of `capture_shape` for batches of other shapes: cut as this program is.
        evaluations: results of `capture_evaluations`; they are cut where the weights will be.
        chosen: the result of the search, if it chose the schedule.
        reduce: in place of the options, the number of replicas of each worker; puts their gradients into buckets.
        observers: are called for every pass.
        say: is called with the part of the work that begins.

    Raises:
        CutError: the cuts asked for are impossible, or nothing fits into memory.
        ScheduleError, PolicyError: an unknown name, or a combination that makes no sense.
        TaskError: the optimizer cannot be used, or needs to be one for all workers, or asks for the model.
        BatchError: batches are to be padded, which must happen before capture.
        BackendError: the engine asked for is not available, cannot run a part, or computes something else; or costs or
            engines are to be measured, and parameters have no values (`fxpipe.task.meta`).
        FxpipeError: an option that does not exist.
    """
    options = changed(taken("options", options, CompileOptions), changes)
    if options.schedule == AUTO:
        raise ScheduleError(
            "schedule 'auto' chooses the number of microbatches, but this program was captured with one",
            hint="name the schedule, or give the model to fxpipe.compile, which captures",
        )
    check(options)
    check_loss_scaling(options.kind, program.autocast)
    if program.autocast == FLOAT16:
        options.encoding.check_scaled()
    if options.pad_to is not None:
        raise BatchError(
            "this program was captured with the lengths of its batch: it cannot be padded",
            hint="give pad and pad_to to fxpipe.compile, which captures",
        )
    options = replace(options, optimizer=of_parameters(options.optimizer, None))
    if reduce is None and options.processes > options.workers and options.outer is None:
        reduce = Reduce(options.replicas or (options.dp,) * options.stages, sharded=options.shard is not None)
    if reduce is not None:
        equal = len(set(reduce.replicas)) == 1
        options = replace(options, dp=reduce.replicas[0] if equal else 1, replicas=() if equal else reduce.replicas)
    _check_values(program, options)
    step = Lowering(program, options, observers=tuple(observers))
    step = step.front(whole_loss or options.whole_loss(), options.splits_backward)
    if note := note_on_marks(step.program, options):
        step = replace(step, program=replace(step.program, warnings=(*step.program.warnings, note)))
    say("costing (3 of 4)")
    work = step_work(step.program)
    costs = step_costs(step.program, options) if chosen is None else chosen.costs
    step = step.through([costs.of_nodes])
    setting = setting_of(options, program.device, costs.optimizer)
    times = codec_times(options.encoding.codecs, program.device, costs.nodes is not None, options.threads, costs.device)
    known = {} if chosen is None else chosen.known
    say("cutting and emitting (4 of 4)")
    program, build = emit_encoded(Emitter(step, costs, setting, times, known, reduce))
    build = _with_optimizer(replace(build, plan=build.plan.with_step(**work)), options)
    if chosen is not None:
        build = replace(build, costs=replace(build.costs, schedules=chosen.rows))
    if program.totals is not None:
        build = with_totals(build, program.totals, options)
    for number, shape in enumerate(shapes, 1):
        say(f"cutting the step of shape {number} of {len(shapes)}")
        try:
            build = with_shape(build, shape, options)
        except FxpipeError as error:
            if shape.last is None:
                raise
            build = replace(build, warnings=(*build.warnings, left_out(shape.last, error)))
    if evaluations is not None:
        build = with_evaluations(build, evaluations, options, observers)
    return with_replicas(build if options.backend == "eager" else _on_engines(build, program, options, say), options)


def _check_values(program: Program, options: CompileOptions) -> None:
    """Refuse to run parameters that have no values."""
    if not has_no_values(program):
        return
    without = "parameters on the meta device have no values"
    if options.cost == "measured":
        raise BackendError(f"cost='measured' runs the step, but {without}", hint="use cost='analytic'")
    if options.backend != "eager":
        raise BackendError(
            f"backend={options.backend!r} runs the stages to check them, but {without}",
            hint="compile with backend='eager'; a run of the build can take another engine",
        )


def _with_optimizer(build: Build, options: CompileOptions) -> Build:
    """The build for the optimizer that will train it, now that each parameter has an owner."""
    accepted = options.accept_optimizer_per_worker
    with tried(options):
        found = check_per_worker(build.plan, options.optimizer, options.lr_scheduler, accepted=accepted)
    return build if found is None else replace(build, warnings=(*build.warnings, found))


def _on_engines(build: Build, program: Program, options: CompileOptions, say: Say) -> Build:
    leaves = {b.leaf.name: program.example[b.node] for b in program.batch if b.node}
    known = options.known_costs.parent / ENGINES if options.known_costs else None
    return choose_engines(build, leaves, backend=options.backend, threads=options.threads, known=known, say=say)
