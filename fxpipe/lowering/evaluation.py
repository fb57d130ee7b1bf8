"""Evaluation in the pipeline: `metrics(model, batch)` becomes a function for each worker, for every shape of batch.

It is captured in eval mode and cut as training distributes the weights, so every worker evaluates what it holds. If
that is impossible, the build says why, and runs evaluate the final weights in one process.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from fxpipe.build.build import Build
from fxpipe.errors import BatchError, CaptureError, CutError, FxpipeError, TaskError, listed
from fxpipe.ir.program import Program
from fxpipe.ir.transform import Observer, PassLines, run_passes
from fxpipe.lowering.first_of_each import SHAPES, check_number, first_of_each, fits
from fxpipe.lowering.name_constants import name_constants
from fxpipe.lowering.padding_doubts import evaluation_doubts
from fxpipe.passes import evaluation_passes
from fxpipe.passes.codegen import TOTALS
from fxpipe.plan.spec import BufferSpec, PadSpec, Plan, StageSpec, StepSpec, TensorSpec
from fxpipe.random_state import random_state_kept
from fxpipe.task.batch import Batch, tensor_spec
from fxpipe.task.hooks import Metrics, MetricsOfAll
from fxpipe.task.loss_weights import LossWeight, weight_of
from fxpipe.tracing.capture import CapturedEvaluation, capture_evaluation
from fxpipe.tracing.carried_buffers import buffers_carried
from fxpipe.tracing.refusals import DATA_DEPENDENT

_TOO_MANY = ("eval_data() gives", "pad them (--pad-to), or use drop_last=True")


@dataclass(frozen=True)
class Evaluations:
    """The captured evaluations, one for each shape of batch, or the `reason` why there are none; and warnings.

    Attributes:
        of_all: see `StepSpec`.
    """

    captured: tuple[CapturedEvaluation, ...] = ()
    reason: str = ""
    doubts: tuple[str, ...] = ()
    of_all: tuple[str, ...] = ()


def capture_evaluations(
    model: nn.Module,
    metrics: Metrics,
    batches: Iterable[Any],
    device: str,
    *,
    of_all: MetricsOfAll | None = None,
    loss_weight: LossWeight | None = None,
    constant_batch: Sequence[str] = (),
    padding: Sequence[PadSpec] = (),
    params: str | None = None,
) -> Evaluations:
    """Capture `metrics(model, batch)` for every shape of batch; where that fails, the reason.

    Args:
        batches: all batches of the evaluation; read once. Random generators are left unchanged.
        device: where the model is.
        of_all: makes numbers of the metrics with dimensions, gathered from all batches; without it, none may have any.
            If `metrics` has an attribute `names_of_all`, it returns the names of these numbers.
        loss_weight: the hook that will weigh the batches: tried on one batch of each shape.
        constant_batch: tensors of a batch that are constants of its capture: other values count as another shape.
        padding: how runs will pad the batches; metrics are compared on batches that it changes.
        params: as in `capture`.

    Raises:
        TaskError: the hook fails on a batch.
    """
    try:
        with random_state_kept():
            read = (Batch.of(batch, constant_batch) for batch in batches)
            given = list(islice(first_of_each(read, padding), 2 * SHAPES * SHAPES))
            examples = list(first_of_each(batch.padded(padding) for batch in given))
            check_number(list(first_of_each(examples, values=0)), *_TOO_MANY)
    except (BatchError, TaskError) as error:
        return Evaluations(reason=_reason(error))
    if not examples:
        return Evaluations(reason="eval_data() gave no batch")
    if loss_weight is not None:
        for example in examples:
            weight_of(loss_weight, example.given)
    numbers = _as_numbers(metrics, of_all)
    told = (batch.on(device) for batch in first_of_each(given, padding, values=0))
    doubts = evaluation_doubts(model, numbers, told, padding, params) if padding else ()
    captured: list[CapturedEvaluation] = []
    try:
        for batch in (example.on(device) for example in examples):
            if not any(fits(one.program, batch) for one in captured):
                captured.append(capture_evaluation(model, metrics, batch, gathers=of_all is not None, params=params))
                check_number(captured, *_TOO_MANY)
    except (CaptureError, BatchError, TaskError) as error:
        return Evaluations(reason=_reason(error), doubts=doubts)
    programs = buffers_carried([one.program for one in captured])
    rows = zip(captured, programs, strict=True)
    names: tuple[str, ...] = getattr(metrics, "names_of_all", tuple)()
    return Evaluations(tuple(dataclasses.replace(one, program=program) for one, program in rows), "", doubts, names)


def _as_numbers(metrics: Metrics, of_all: MetricsOfAll | None) -> Metrics:
    """The metrics of an evaluation that has one batch."""

    def measured(model: nn.Module, batch: Any) -> dict[str, Any]:
        found = dict(metrics(model, batch))
        gathered = {n: [v.cpu()] for n, v in found.items() if isinstance(v, torch.Tensor) and v.dim()}
        of_it = of_all(gathered) if of_all and gathered else {}
        return {**{name: value for name, value in found.items() if name not in gathered}, **of_it}

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


def with_evaluations(build: Build, evaluations: Evaluations, command: str, observers: Sequence[Observer] = ()) -> Build:
    """The build with the files, the plan and the tensors for evaluating in its pipeline.

    Args:
        command: for the files' headers.
        observers: are called for every pass.
    """
    build = dataclasses.replace(build, warnings=(*build.warnings, *evaluations.doubts))
    if evaluations.reason:
        plan = dataclasses.replace(build.plan, not_evaluated=evaluations.reason)
        warning = f"runs evaluate the final weights only, in one process: {evaluations.reason}"
        return dataclasses.replace(build, plan=plan, warnings=(*build.warnings, warning))
    found = build
    try:
        for shape, captured in enumerate(evaluations.captured):
            found = _with_evaluation(found, captured, evaluations.of_all, shape, command, observers)
        check_carried(found.plan)
    except CutError as error:
        return with_evaluations(build, Evaluations(reason=_reason(error)), command)
    return dataclasses.replace(found, warnings=tuple(dict.fromkeys(found.warnings)))


def _with_evaluation(
    build: Build,
    captured: CapturedEvaluation,
    of_all: tuple[str, ...],
    shape: int,
    command: str,
    observers: Sequence[Observer],
) -> Build:
    plan = build.plan
    owners = {p.name: p.owner for p in plan.parameters}
    owners |= {b.name: b.home for b in plan.buffers if b.home is not None}
    owners |= {name: min(workers) for name, workers in carried_on(plan).items()}  # for batches of earlier shapes
    program = name_constants(captured.program, f"evaluate.{shape}", build.tensors)
    passes, lines = evaluation_passes(plan.workers, owners, shape, command), PassLines()
    program = run_passes(program, passes, [*observers, lines], dumped_as=f"evaluate_{shape}_")
    spec = spec_of(program, captured.metrics, captured.constants, captured.gathered)
    spec = dataclasses.replace(spec, of_all=of_all if spec.gathered else ())
    buffers = buffers_read(plan, program, spec.stages)
    read = {b.name for b in buffers} - build.tensors.keys()
    own = {b.names[0]: program.values[b.node].detach().clone() for b in program.buffers if b.names[0] in read}
    return dataclasses.replace(
        build,
        plan=dataclasses.replace(plan, buffers=buffers, evaluations=(*plan.evaluations, spec)),
        files={**build.files, **program.files},
        tensors={**build.tensors, **own},
        passes=(*build.passes, *(f"evaluation {shape}: {line}" for line in lines.lines)),
        warnings=(*build.warnings, *(f"evaluation: {warning}" for warning in program.warnings)),
    )


def carried_on(plan: Plan) -> dict[str, set[int]]:
    """By the name of each buffer that evaluations change, the workers that read or change it."""
    aliases = plan.first_names
    stages = [(worker, stage.forward) for spec in plan.evaluations for worker, stage in enumerate(spec.stages)]
    found: dict[str, set[int]] = {aliases.get(name, name): set() for _, part in stages for name in part.updates}
    for worker, part in stages:
        for name in (aliases.get(name, name) for name in (*part.buffers, *part.updates)):
            if name in found:
                found[name].add(worker)
    return found


def check_carried(plan: Plan) -> None:
    """Refuse evaluations that would carry a buffer on several workers: each worker would see only its own changes.

    Raises:
        CutError: names the buffers.
    """
    scattered = sorted(name for name, workers in carried_on(plan).items() if len(workers) > 1)
    if scattered:
        raise CutError(
            f"metrics(model, batch) changes {listed(scattered)} from batch to batch, and batches of different shapes "
            "would do so on different workers",
            hint="let eval_data() give batches of one shape: drop_last=True, or pad them",
        )


def spec_of(
    program: Program,
    metrics: tuple[str, ...],
    constants: dict[str, float],
    gathered: Mapping[str, TensorSpec] = MappingProxyType({}),
) -> StepSpec:
    """What the plan says of an evaluation whose stages are emitted."""
    return StepSpec(
        batch=tuple(b.leaf for b in program.batch),
        batch_spec=program.batch_spec,
        metrics=metrics,
        constants=constants,
        gathered=dict(gathered),
        edges=program.edges,
        stages=tuple(
            StageSpec(stage.file, hashlib.sha256(stage.source.encode()).hexdigest(), stage.parts["F"].spec)
            for stage in program.stages
        ),
    )


def with_totals(build: Build, totals: Program, command: str, shape: int = 0) -> Build:
    """The build with the file and the plan's rows for computing totals; worker 0 reads their constants.

    Args:
        totals: of a minibatch, which its loss is divided by: what `WholeLoss` left of the training program.
        command: for the file's header.
        shape: the number of its batches' shape.
    """
    passes, lines = evaluation_passes(1, {}, shape, command, TOTALS), PassLines()
    program = run_passes(totals, passes, [lines], dumped_as=f"totals_{shape}_" if shape else "totals_")
    spec = spec_of(program, tuple(program.metrics()), {})
    return dataclasses.replace(
        build,
        plan=dataclasses.replace(build.plan, totals=spec, buffers=buffers_read(build.plan, program, spec.stages)),
        files={**build.files, **program.files},
        passes=(*build.passes, *(f"totals: {line}" for line in lines.lines)),
    )


def buffers_read(plan: Plan, program: Program, stages: Sequence[StageSpec]) -> tuple[BufferSpec, ...]:
    """The plan's buffers, and those that only evaluation reads; workers that evaluate are among the readers."""
    readers: dict[str, tuple[int, ...]] = {}
    for worker, stage in enumerate(stages):
        for name in stage.forward.buffers:
            readers[name] = (*readers.get(name, ()), worker)
    return with_readers(
        plan.buffers,
        [
            BufferSpec(row.names, tensor_spec(program.values[row.node]), False, None, readers[row.names[0]])
            for row in program.buffers
            if row.names[0] in readers
        ],
    )


def with_readers(buffers: Sequence[BufferSpec], more: Sequence[BufferSpec]) -> tuple[BufferSpec, ...]:
    """The buffers; those that no worker updates also get their readers in `more`, whose own buffers follow."""
    read = {b.name: b.workers for b in more}
    readers = {b.name: tuple(dict.fromkeys((*b.workers, *read.get(b.name, ())))) for b in buffers}
    shared = (b if b.home is not None else dataclasses.replace(b, workers=readers[b.name]) for b in buffers)
    return (*shared, *(b for b in more if b.name not in readers))
