"""Evaluation in the pipeline: `metrics(model, batch)` becomes a function for each worker, for every shape of batch.

It is captured in eval mode and cut as training distributes the weights, so every worker evaluates what it holds. If
that is impossible, the build says why, and runs evaluate the final weights in one process.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from fxpipe.builds.build import Build
from fxpipe.errors import BatchError, CaptureError, CutError, FxpipeError, TaskError, listed
from fxpipe.ir.program import Program
from fxpipe.ir.transform import Observer
from fxpipe.lowering.first_of_each import SHAPES, check_number, first_of_each, fits
from fxpipe.lowering.lowering import Lowering, name_constants
from fxpipe.lowering.options import DEFAULTS, CompileOptions
from fxpipe.lowering.padding_doubts import evaluation_doubts
from fxpipe.passes.codegen import TOTALS
from fxpipe.plan.plan import BufferSpec, Plan
from fxpipe.plan.spec import PadSpec, StageSpec, StepSpec
from fxpipe.random_state import random_state_kept
from fxpipe.task.batch import Batch, tensor_spec
from fxpipe.task.hooks import Metrics, MetricsOfAll
from fxpipe.task.loss_weights import weight_of
from fxpipe.tracing.evaluation import CapturedEvaluation, buffers_carried, capture_evaluation
from fxpipe.tracing.refusals import DATA_DEPENDENT

_TOO_MANY = ("eval_data() gives", "pad them (--pad-to), or use drop_last=True")


@dataclass(frozen=True)
class Evaluations:
    """The captured evaluations, one for each shape of batch, or the `reason` why there are none; warnings; and the
    names of numbers of all batches (`StepSpec.of_all`)."""

    captured: tuple[CapturedEvaluation, ...] = ()
    reason: str = ""
    doubts: tuple[str, ...] = ()
    of_all: tuple[str, ...] = ()


def capture_evaluations(
    model: nn.Module,
    metrics: Metrics,
    batches: Iterable[Any],
    device: str,
    options: CompileOptions = DEFAULTS,
    *,
    of_all: MetricsOfAll | None = None,
    padding: Sequence[PadSpec] = (),
) -> Evaluations:
    """Capture `metrics(model, batch)` for every shape of batch; where that fails, the reason.

    Args:
        batches: all batches of the evaluation; read once. Random generators are left unchanged.
        options: where they have a `loss_weight`, it is tried on one batch of each shape.
        of_all: makes numbers of the metrics with dimensions, gathered from all batches; without it, none may have any.
            If `metrics` has an attribute `names_of_all`, it returns the names of these numbers.
        padding: how runs will pad the batches; metrics are compared on batches that it changes.

    Raises:
        TaskError: the hook fails on a batch.
    """
    try:
        with random_state_kept():
            read = (Batch.of(batch, options.constant_batch) for batch in batches)
            unpadded = list(islice(first_of_each(read, padding), 2 * SHAPES * SHAPES))
            examples = list(first_of_each(batch.padded(padding) for batch in unpadded))
            check_number(list(first_of_each(examples, values=0)), *_TOO_MANY)
    except (BatchError, TaskError) as error:
        return Evaluations(reason=_reason(error))
    if not examples:
        return Evaluations(reason="eval_data() gave no batch")
    if options.loss_weight is not None:
        for example in examples:
            weight_of(options.loss_weight, example.given)
    compared = (batch.on(device) for batch in first_of_each(unpadded, padding, values=0))
    numbers = _as_numbers(metrics, of_all)
    doubts = evaluation_doubts(model, numbers, compared, padding, options.params) if padding else ()
    captured: list[CapturedEvaluation] = []
    how: dict[str, Any] = {"gathers": of_all is not None, "params": options.params, "hooks": options.hooks}
    try:
        for batch in (example.on(device) for example in examples):
            if not any(fits(one.program, batch) for one in captured):
                captured.append(capture_evaluation(model, metrics, batch, **how))
                check_number(captured, *_TOO_MANY)
    except (CaptureError, BatchError, TaskError) as error:
        return Evaluations(reason=_reason(error), doubts=doubts)
    carried = zip(captured, buffers_carried([one.program for one in captured]), strict=True)
    names: tuple[str, ...] = getattr(metrics, "names_of_all", tuple)()
    return Evaluations(tuple(dataclasses.replace(one, program=program) for one, program in carried), "", doubts, names)


def _as_numbers(metrics: Metrics, of_all: MetricsOfAll | None) -> Metrics:
    """The metrics of an evaluation that has one batch."""

    def measured(model: nn.Module, batch: Any) -> dict[str, Any]:
        values = dict(metrics(model, batch))
        gathered = {n: [v.cpu()] for n, v in values.items() if isinstance(v, torch.Tensor) and v.dim()}
        of_one = of_all(gathered) if of_all and gathered else {}
        return {**{name: value for name, value in values.items() if name not in gathered}, **of_one}

    return metrics if of_all is None else measured


_OF_METRICS = {
    "the step": "metrics(model, batch)",
    "loss(model(), batch)": "metrics(model(), batch)",
    "train_data()": "eval_data()",
}
"""What refusals say of a training step, and its words for an evaluation."""


def _reason(error: FxpipeError) -> str:
    cause = error.__cause__
    hint = error.hint
    if cause is not None and re.search(DATA_DEPENDENT, f"{type(cause).__name__}: {cause}"):
        hint = "return tensors from metrics(): without .item(), float() and `if` on their values"
    place = f" ({error.where})" if error.where else ""
    text = f"{error.what}{place}{f'; {hint}' if hint else ''}"
    for of_step, of_metrics in _OF_METRICS.items():
        text = text.replace(of_step, of_metrics)
    return text


def with_evaluations(
    build: Build, evaluations: Evaluations, options: CompileOptions, observers: Sequence[Observer] = ()
) -> Build:
    """The build with the files, the plan and the tensors for evaluating in its pipeline."""
    build = dataclasses.replace(build, warnings=(*build.warnings, *evaluations.doubts))
    if evaluations.reason:
        plan = dataclasses.replace(build.plan, not_evaluated=evaluations.reason)
        warning = f"runs evaluate the final weights only, in one process: {evaluations.reason}"
        return dataclasses.replace(build, plan=plan, warnings=(*build.warnings, warning))
    evaluating = build
    try:
        for shape in range(len(evaluations.captured)):
            evaluating = _with_evaluation(evaluating, evaluations, shape, options, observers)
        _check_carried(evaluating.plan)
    except CutError as error:
        return with_evaluations(build, Evaluations(reason=_reason(error)), options)
    return dataclasses.replace(evaluating, warnings=tuple(dict.fromkeys(evaluating.warnings)))


def _with_evaluation(
    build: Build, evaluations: Evaluations, shape: int, options: CompileOptions, observers: Sequence[Observer]
) -> Build:
    captured = evaluations.captured[shape]
    plan = build.plan
    owners = {p.name: p.owner for p in plan.parameters}
    owners |= {b.name: b.home for b in plan.buffers if b.home is not None}
    owners |= {name: min(workers) for name, workers in _carried_on(plan).items()}  # for batches of earlier shapes
    program = name_constants(captured.program, f"evaluate.{shape}", build.tensors)
    step = Lowering(program, options, shape, f"evaluate_{shape}_", tuple(observers)).forward_emitted(
        plan.workers, owners
    )
    program = step.program
    spec = dataclasses.replace(
        _spec_of(program),
        metrics=captured.metrics,
        constants=captured.constants,
        gathered=captured.gathered,
        of_all=evaluations.of_all if captured.gathered else (),
    )
    buffers = _buffers_read(plan, program, spec.stages)
    read = {b.name for b in buffers} - build.tensors.keys()
    tensors = {b.names[0]: program.values[b.node].detach().clone() for b in program.buffers if b.names[0] in read}
    plan = dataclasses.replace(plan, buffers=buffers, evaluations=(*plan.evaluations, spec)).watching(program.watched)
    return dataclasses.replace(
        step.added_to(build, plan, f"evaluation {shape}"),
        tensors={**build.tensors, **tensors},
        warnings=(*build.warnings, *(f"evaluation: {warning}" for warning in program.warnings)),
    )


def _carried_on(plan: Plan) -> dict[str, set[int]]:
    """By the name of each buffer that evaluations change, the workers that read or change it."""
    aliases = plan.first_names
    stages = [(worker, stage.forward) for spec in plan.evaluations for worker, stage in enumerate(spec.stages)]
    workers: dict[str, set[int]] = {aliases.get(name, name): set() for _, part in stages for name in part.updates}
    for worker, part in stages:
        for name in (aliases.get(name, name) for name in (*part.buffers, *part.updates)):
            if name in workers:
                workers[name].add(worker)
    return workers


def _check_carried(plan: Plan) -> None:
    """Refuse evaluations that would carry a buffer on several workers: each worker would see only its own changes."""
    scattered = sorted(name for name, workers in _carried_on(plan).items() if len(workers) > 1)
    if scattered:
        raise CutError(
            f"metrics(model, batch) changes {listed(scattered)} from batch to batch, and batches of different shapes "
            "would do so on different workers",
            hint="let eval_data() give batches of one shape: drop_last=True, or pad them",
        )


def with_totals(build: Build, totals: Program, options: CompileOptions, shape: int = 0) -> Build:
    """The build with the file and the plan's rows for computing totals; worker 0 reads their constants.

    Args:
        totals: of a minibatch, which its loss is divided by: what `WholeLoss` left of the training program.
        shape: the number of its batches' shape.
    """
    step = Lowering(totals, options, shape, f"totals_{shape}_" if shape else "totals_")
    step = step.forward_emitted(1, {}, TOTALS)
    spec = dataclasses.replace(_spec_of(step.program), metrics=tuple(step.program.metrics()))
    plan = dataclasses.replace(build.plan, buffers=_buffers_read(build.plan, step.program, spec.stages))
    return step.added_to(build, plan.with_step(totals=spec), f"totals of shape {shape}" if shape else "totals")


def _spec_of(program: Program) -> StepSpec:
    """What the plan says of a program with only forwards, whose stages are emitted; without its metrics."""
    return StepSpec(
        batch=tuple(b.leaf for b in program.batch),
        batch_spec=program.batch_spec,
        edges=program.edges,
        stages=tuple(
            StageSpec(stage.file, hashlib.sha256(stage.source.encode()).hexdigest(), stage.parts["F"].spec)
            for stage in program.stages
        ),
    )


def _buffers_read(plan: Plan, program: Program, stages: Sequence[StageSpec]) -> tuple[BufferSpec, ...]:
    """The plan's buffers, and those that only these stages read; their workers are among the readers."""
    readers: dict[str, tuple[int, ...]] = {}
    for worker, stage in enumerate(stages):
        for name in stage.forward.buffers:
            readers[name] = (*readers.get(name, ()), worker)
    rows = [row for row in program.buffers if row.names[0] in readers]
    specs = [(row.names, tensor_spec(program.values[row.node]), readers[row.names[0]]) for row in rows]
    return with_readers(plan.buffers, [BufferSpec(names, spec, (), None, workers) for names, spec, workers in specs])


def with_readers(buffers: Sequence[BufferSpec], more: Sequence[BufferSpec]) -> tuple[BufferSpec, ...]:
    """The buffers; those that no worker updates also get their readers in `more`, whose own buffers follow."""
    read = {b.name: b.workers for b in more}
    readers = {b.name: tuple(dict.fromkeys((*b.workers, *read.get(b.name, ())))) for b in buffers}
    shared = (b if b.home is not None else dataclasses.replace(b, workers=readers[b.name]) for b in buffers)
    return (*shared, *(b for b in more if b.name not in readers))
