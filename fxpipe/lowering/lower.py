"""Lowering: a captured program becomes a build, through the passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import nn

from fxpipe.build.build import Build
from fxpipe.errors import BackendError, BatchError, FxpipeError
from fxpipe.ir.program import Buffer, Parameter, Program
from fxpipe.ir.program_table import table_of
from fxpipe.ir.transform import Observer, PassLines, run_passes
from fxpipe.lowering.captured_step import captured_step
from fxpipe.lowering.choose_cuts import Choice, choose_cuts
from fxpipe.lowering.evaluation import Evaluations, capture_evaluations, with_evaluations
from fxpipe.lowering.make_plan import make_plan
from fxpipe.lowering.options import CompileOptions
from fxpipe.lowering.padding_doubts import padding_doubts
from fxpipe.lowering.shapes import CapturedShape, with_shape
from fxpipe.lowering.step_costs import StepCosts, has_no_values, step_costs
from fxpipe.lowering.totals import with_totals
from fxpipe.measure.engines import choose_engines
from fxpipe.optimizer.per_worker import check_per_worker
from fxpipe.options import changed
from fxpipe.passes import back_passes, front_passes
from fxpipe.passes.analysis.edge_timings import edge_timings
from fxpipe.passes.analysis.metric_nodes import without_metrics
from fxpipe.passes.analysis.profile import profile_of
from fxpipe.passes.analysis.summary import summarize
from fxpipe.passes.whole_loss import WholeLoss
from fxpipe.plan.build_folder import ENGINES
from fxpipe.plan.spec import Plan
from fxpipe.planner.costs_file import BuildCosts
from fxpipe.planner.profile import Profile
from fxpipe.planner.setting import Setting
from fxpipe.policy import make as make_policy
from fxpipe.policy.demand import Demand
from fxpipe.schedule import make as make_schedule
from fxpipe.schedule.check import in_flight
from fxpipe.schedule.loss_scaling import check_loss_scaling
from fxpipe.task.model_view import of_parameters, without_values
from fxpipe.task.padding import padded
from fxpipe.task.step_hooks import StepHooks
from fxpipe.tracing.capture import Loss, Metrics

Say = Callable[[str], None]
DEFAULTS = CompileOptions()


def compile(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    options: CompileOptions = DEFAULTS,
    *,
    shapes: Iterable[Any] = (),
    last: Any = None,
    evaluation: tuple[Metrics, Iterable[Any]] | None = None,
    say: Say = lambda text: None,
    **changes: Any,
) -> Build:
    """Capture the training step, cut it, and emit each worker's stage: `compile(model, loss, batch, workers=4)`.

    Args:
        model, loss, batch: `loss(model, batch)` is the step; `batch` is one whole minibatch.
        options, changes: what is asked; `fxpipe.lowering.options.CompileOptions` says what there is.
        shapes: more minibatches: those of another shape than `batch`, or with other constants, get stages of their own.
            Where batches are padded (`pad_to`), their padded shapes count.
        last: a smaller minibatch, such as comes last in an epoch: likewise, or a warning says why not.
        evaluation: `metrics(model, batch)`, a dictionary of numbers and tensors of one element, and the batches, whole
            ones, that runs will evaluate on: read once here, for their shapes.
        say: is told which part is being put onto engines.

    Raises:
        FxpipeError: as capture and `lower`; each names the place and what to do.
    """
    options, batches = changed(options, changes), [batch, *shapes]
    padding = options.padding(batches)
    doubts = padding_doubts(model, loss, [*batches, *([] if last is None else [last])], padding, options)
    batch, *batches = (padded(one, padding) for one in batches)
    options = replace(options, pad=None, pad_to=None)
    step = captured_step(model, loss, batch, options, batches, padded(last, padding))
    bare = _bare(model)
    options = replace(step.options, optimizer=of_parameters(step.options.optimizer, bare))
    evaluations = None
    if evaluation is not None:
        evaluations = capture_evaluations(
            model,
            *evaluation,
            step.program.device,
            loss_weight=options.loss_weight,
            constant_batch=options.constant_batch,
            padding=padding,
        )
    build = lower(
        step.program, options, whole_loss=step.whole_loss, shapes=step.shapes, evaluations=evaluations, say=say
    )
    plan = replace(build.plan, padding=padding)
    hooks = StepHooks.of_compiled(model, loss, options.loss_weight)
    return replace(build, model=bare, hooks=hooks, plan=plan, warnings=(*doubts, *build.warnings))


def _bare(model: nn.Module) -> Callable[[], nn.Module] | None:
    """Gives the model without values, for an optimizer that asks for it; None of a module that cannot be copied."""
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
    observers: Sequence[Observer] = (),
    say: Say = lambda text: None,
    **changes: Any,
) -> Build:
    """Cut a captured program for some workers and emit each worker's stage: `lower(program, workers=4)`.

    Args:
        program: captured on one microbatch.
        options, changes: what is asked; `fxpipe.lowering.options.CompileOptions` says what there is.
        whole_loss: what `checked_loss` found; by default what the options ask for, without comparing.
        shapes: what `capture_shape` made of batches of other shapes: cut as this program is.
        evaluations: what `capture_evaluations` made of the validation hooks; they are cut where the weights will be.
        observers: are told of every pass.
        say: is told which part is being put onto engines.

    Raises:
        CutError: the cuts asked for are impossible, or nothing fits into memory.
        ScheduleError, PolicyError: an unknown name, or a combination that makes no sense.
        TaskError: the optimizer cannot be used, or not with one for each worker; or it asks for the model.
        BatchError: batches are to be padded, which is done before a step is captured.
        BackendError: the engine asked for is not there, cannot run a part, or computes something else; or costs or
            engines are to be measured where parameters have no values (`fxpipe.task.meta`).
        FxpipeError: an option that does not exist.
    """
    options = changed(options, changes)
    options.check()
    check_loss_scaling(options.schedule, program.autocast)
    if options.pad_to is not None:
        raise BatchError(
            "a captured program has the lengths of its batch: there is nothing to pad",
            hint="give pad and pad_to to fxpipe.compile, which captures, too",
        )
    options = replace(options, optimizer=of_parameters(options.optimizer, None))
    _check_values(program, options)
    lines = PassLines()
    observers = (*observers, lines)
    front = front_passes(
        options.splits_backward, whole_loss or options.whole_loss(), bool(program.metrics()), program.scales_loss
    )
    program = run_passes(program, front, observers)
    costs = step_costs(program, options)
    program = run_passes(program, [costs.of_nodes], observers, first=len(front) + 1)
    planned = without_metrics(program)
    profile = profile_of(planned, costs.optimizer.seconds_per_byte)
    setting = options.setting(program.device, costs.optimizer)
    choice = choose_cuts(planned, profile, options, setting)
    program = run_passes(program, back_passes(choice.cuts, options.command), observers, first=len(front) + 2)
    build = _with_optimizer(_build(program, costs, profile, setting, choice, lines), options)
    if program.totals is not None:
        build = with_totals(build, program.totals, options.command)
    for shape in shapes:
        try:
            build = with_shape(build, shape, options)
        except FxpipeError as error:
            if shape.left_out is None:
                raise
            build = replace(build, warnings=(*build.warnings, shape.left_out.format(error.what)))
    if evaluations is not None:
        build = with_evaluations(build, evaluations, options.command)
    return build if options.backend == "eager" else _on_engines(build, program, options, say)


def _check_values(program: Program, options: CompileOptions) -> None:
    """Refuse to run parameters that have no values."""
    if not has_no_values(program):
        return
    without = "parameters on the meta device have no values"
    if options.cost == "measured":
        raise BackendError(f"cost='measured' runs the step, but {without}", hint="use cost='analytic'")
    if options.backend != "eager":
        raise BackendError(
            f"backend={options.backend!r} is tried on the stages, but {without}",
            hint="compile with backend='eager'; a run of the build can take another engine",
        )


def _build(
    program: Program, costs: StepCosts, profile: Profile, setting: Setting, choice: Choice, lines: PassLines
) -> Build:
    """The build of an emitted program."""
    plan = make_plan(program, setting)
    schedule = make_schedule(plan.schedule, plan.workers, plan.microbatches)
    held, demand = in_flight(schedule), Demand(plan, schedule, make_policy(plan.policy))
    rows: tuple[Parameter | Buffer, ...] = (*program.parameters, *program.buffers)
    tensors = {row.names[0]: program.values[row.node] for row in rows if not program.values[row.node].is_meta}
    return Build(
        plan=plan,
        files=program.files,
        tensors={name: t.detach().clone() for name, t in tensors.items()},
        costs=BuildCosts(
            workers=tuple(summarize(program, plan, held, demand, costs.optimizer.seconds_per_byte)),
            timings=edge_timings(program),
            partitions=choice.partitions,
            links=setting.links,
            speeds=setting.speeds,
            optimizer_bytes=costs.optimizer.state_bytes,
            policy_times=costs.optimizer.policy,
        ),
        profile=profile,
        nodes=table_of(program, plan),
        passes=tuple(lines.lines),
        node_costs=None if costs.nodes is None else costs.nodes.to_json(),
        warnings=(*program.warnings, *costs.warnings, *(_idle(plan) if choice.partitions else ())),
    )


def _with_optimizer(build: Build, options: CompileOptions) -> Build:
    """The build, now that it is known who owns which parameters, for the optimizer that will train them."""
    accepted = options.accept_optimizer_per_worker
    found = check_per_worker(build.plan, options.optimizer, options.lr_scheduler, accepted=accepted)
    return build if found is None else replace(build, warnings=(*build.warnings, found))


def _on_engines(build: Build, program: Program, options: CompileOptions, say: Say) -> Build:
    leaves = {b.leaf.name: program.example[b.node] for b in program.batch if b.node}
    known = options.known_costs.parent / ENGINES if options.known_costs else None
    return choose_engines(build, leaves, backend=options.backend, threads=options.threads, known=known, say=say)


def _idle(plan: Plan) -> tuple[str, ...]:
    idle = [
        k
        for k, s in enumerate(plan.stages)
        if all(first == end for first, end in (s.forward_units, s.backward_units, s.weight_units))
    ]
    if not idle:
        return ()
    workers = f"workers {', '.join(map(str, idle))} have" if len(idle) > 1 else f"worker {idle[0]} has"
    return (f"{workers} nothing to do: on these links more workers make nothing faster",)
