"""Adds one more shape of batch to an existing build, from the user's model and loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.builds.build import Build, load
from fxpipe.errors import BatchError, BuildError, TaskError
from fxpipe.ir.program import Program
from fxpipe.lowering.options import CompileOptions, options_like
from fxpipe.lowering.shapes import capture_shape, with_shape
from fxpipe.plan.plan import Plan
from fxpipe.planner.cuts import Cuts
from fxpipe.task.batch import Batch, tensor_spec
from fxpipe.task.meta import on_meta
from fxpipe.task.step_hooks import StepHooks
from fxpipe.task.wrapped_tensors import plain_tensors
from fxpipe.tracing.hook_state import undone

COMMAND = "a shape of batch that a run met"
"""What stages have in the place of a compile's command."""


def folder_with_new_shape(
    folder: Path, digest: str, plan: Plan, constants: Mapping[str, Tensor], batch: Any, hooks: StepHooks
) -> Build:
    """The build in a folder, with the shapes added by a run and one more.

    `digest` is of the build's plan when the run began; `plan` and `constants` have the shapes made so far.

    Raises:
        BuildError: another build is in the folder.
    """
    build = load(folder)
    if build.plan.digest != digest:
        raise BuildError("the build was replaced since the run began", where=str(folder))
    return with_new_shape(replace(build, plan=plan, tensors={**build.tensors, **constants}), batch, hooks)


def with_new_shape(build: Build, batch: Any, hooks: StepHooks) -> Build:
    """The build with stages for the shape of a batch, the same as from a compile that meets the batch.

    The step is captured, compared with eager PyTorch, and cut where the first shape's is. Random generators move.

    Raises:
        FxpipeError: as `capture_shape` and `with_shape`; or it is not the model that was compiled.
    """
    plan = build.plan
    constants = [leaf.name for leaf in plan.step.given if leaf.tensor is None and leaf.read]
    read = replace(Batch.of(batch), constants=tuple(constants))
    options = options_of(plan, read, hooks)
    with undone(options.hooks):  # model() may leave the new model where hooks look for that of the run
        model = hooks.model() if hooks.same else _made(plan, hooks)
        if plan.device != "cpu":
            read = read.on(plan.device)
        captured = capture_shape(model, hooks.loss, read, options)
    _check_model(plan, captured.program)
    made = with_shape(build, captured, options)
    if unseen := made.plan.watched[len(plan.watched) :]:
        raise BatchError(f"with this batch the step reads {unseen[0].place}, which hooks reach", hint=_AGAIN)
    known = {buffer.name for buffer in plan.buffers}
    more = [buffer for buffer in made.plan.buffers if buffer.name not in known]
    if kept := [buffer.name for buffer in more if buffer.saved]:
        raise BatchError(f"the model has a buffer {kept[0]}, which the build does not know", hint=_AGAIN)
    if more and not hooks.same and (name := _other_value(build, model)):
        raise TaskError(
            f"the step has constants of its own, and model() gives other values than when it was compiled, such as "
            f"those of {name}: the constants may differ as well",
            hint=f"set the random seed in model(); or {_AGAIN}",
        )
    return made


_AGAIN = "compile with a batch of this shape (--scan N; in Python shapes=...)"


def options_of(plan: Plan, batch: Batch, hooks: StepHooks) -> CompileOptions:
    """The options a plan was compiled with, as far as they matter for one more shape.

    Leaves are cut along the same dimensions as in the first shape, if the batch has the same leaves; else these are
    found again.
    """
    dims = {leaf.name: leaf.dim if leaf.tensor else None for leaf in plan.step.given}
    cuts = Cuts.of(plan)
    return CompileOptions(
        **options_like(plan),
        workers=plan.ranks,
        virtual=None if plan.rows else plan.workers // plan.ranks,
        microbatch_dims=dims if list(batch.dims) == list(dims) and plan.microbatches > 1 else None,
        constant_batch=batch.constants,
        loss_weight=hooks.loss_weight if plan.loss.weighted else None,
        hooks=hooks.between if plan.watched else {},
        split_backward=cuts.weights != cuts.backward,
        command=COMMAND,
    )


def _made(plan: Plan, hooks: StepHooks) -> nn.Module:
    torch.manual_seed(0)  # as a compile without a seed does
    model = on_meta(hooks.model).model if plan.weights.meta else hooks.model()
    return model if plan.device == "cpu" else model.to(plan.device)


def _check_model(plan: Plan, program: Program) -> None:
    """Refuse a model whose parameters differ from the build's."""
    found = {p.names[0]: replace(tensor_spec(program.values[p.node]), stride=()) for p in program.parameters}
    known = {p.name: replace(p.tensor, stride=()) for p in plan.parameters}
    if wrong := sorted(name for name in found.keys() | known.keys() if found.get(name) != known.get(name)):
        raise TaskError(
            f"model() does not give the model that was compiled: {wrong[0]} differs",
            hint="give the function that made it, with the same arguments, or compile again",
        )


def _other_value(build: Build, model: nn.Module) -> str | None:
    """The first tensor of the model whose value differs in the build."""
    known = {name: build.tensors.get(row.name) for row in build.plan.tensors for name in row.saved}
    for name, held in model.state_dict(keep_vars=True).items():
        for plain_name, tensor in plain_tensors(name, held):
            value = known.get(plain_name)
            if value is None or tensor.is_meta:
                continue
            if value.shape != tensor.shape or not torch.equal(value, tensor.detach().to(value)):
                return plain_name
    return None
