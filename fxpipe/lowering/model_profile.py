"""A model's profile: captured, measured or computed, unit by unit, without a cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from fxpipe.ir.program import Program
from fxpipe.lowering.captured_step import CapturedStep, captured_step
from fxpipe.lowering.lowering import Lowering
from fxpipe.lowering.options import CompileOptions
from fxpipe.lowering.step_costs import SharedCosts, StepCosts, step_costs
from fxpipe.passes.analysis.metric_nodes import without_metrics
from fxpipe.planner.profile import PlanInput
from fxpipe.task.batch import Batch
from fxpipe.task.hooks import Loss
from fxpipe.task.model_view import of_parameters, without_values


@dataclass(frozen=True)
class StepProfile:
    """The costs of a captured step's units, and their source: a program with units, without metrics."""

    step: CapturedStep
    program: Program
    input: PlanInput
    costs_of_whole: StepCosts
    costs_of_apart: StepCosts


def profile_model(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    options: CompileOptions,
    *,
    three_way: bool = True,
    capture: Callable[[nn.Module, Loss, Batch, CompileOptions], CapturedStep] = captured_step,
    say: Callable[[str], None] = lambda text: None,
    shared: SharedCosts | None = None,
) -> StepProfile:
    """Capture the step and cost it; nothing is cut or written.

    Of the options those matter that concern capture and costs. `capture` is `captured_step`, or `uncompared_step`.
    Without `three_way`, `apart` is `whole`.

    Raises:
        FxpipeError: the step cannot be captured, or fails.
    """
    say("capturing")
    step = capture(model, loss, batch.padded(options.padding([batch])), options)
    options = replace(step.options, optimizer=of_parameters(step.options.optimizer, lambda: without_values(model)))
    captured = Lowering(step.program, options)
    together = captured.front(step.whole_loss)
    apart_too = captured.front(step.whole_loss, split_backward=True) if three_way else together
    say("costing the step")
    shared = shared or SharedCosts()
    costs = again = step_costs(together.program, options, shared)
    levels = options.recomputes
    planned = without_metrics(together.through([costs.of_nodes]).program)
    whole = apart = costs.profile(planned, levels)
    if len(list(apart_too.program)) != len(list(together.program)):
        say("costing the step with split backward operators")
        again = step_costs(apart_too.program, options, shared)
        apart = again.profile(without_metrics(apart_too.through([again.of_nodes]).program), levels)
    few = step.few.warning(options.made_schedule) if step.few else ""
    optimizer, count = costs.optimizer, options.count
    first = next(b.leaf.tensor for b in step.program.batch if b.leaf.tensor is not None)
    made = PlanInput(
        whole,
        apart,
        count,
        (first.shape[0] if first.shape else 1) * count,
        optimizer,
        planned.device,
        (*planned.warnings, *([few] if few else []), *([optimizer.doubt] if optimizer.doubt else [])),
        planned.batch_norm,
    )
    return StepProfile(step, planned, made, costs, again)
