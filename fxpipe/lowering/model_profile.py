"""A model's profile: captured, measured or computed, unit by unit, without a cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fxpipe.ir.transform import run_passes
from fxpipe.lowering.captured_step import captured_step
from fxpipe.lowering.options import CompileOptions
from fxpipe.lowering.step_costs import step_costs
from fxpipe.passes import front_passes
from fxpipe.passes.analysis.metric_nodes import without_metrics
from fxpipe.passes.analysis.profile import profile_of
from fxpipe.plan.cost_records import OptimizerCosts
from fxpipe.planner.profile import Profile
from fxpipe.task.model_view import of_parameters, without_values
from fxpipe.task.padding import padded
from fxpipe.tracing.capture import Loss


@dataclass(frozen=True)
class ModelProfile:
    """What a model's units cost a microbatch.

    Attributes:
        whole: for cuts that leave W with B.
        apart: for three-way cuts: operators that make input and weight gradients in one call are split in two. The
            same as `whole` where the model has none.
        microbatches: of a minibatch.
        samples: of a minibatch.
        optimizer: what it costs.
        device: 'cpu' or 'cuda'.
        warnings: what capture and costs want the user to know.
    """

    whole: Profile
    apart: Profile
    microbatches: int
    samples: int
    optimizer: OptimizerCosts
    device: str
    warnings: tuple[str, ...] = ()


def profile_model(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    options: CompileOptions,
    *,
    three_way: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> ModelProfile:
    """Capture the step and cost it; nothing is cut or written.

    Args:
        batch: one whole minibatch.
        options: what a compile would be asked; of it, what capture and costs are concerned with.
        three_way: whether `apart` is wanted; else it is `whole`.
        say: is told what is being done.

    Raises:
        FxpipeError: the step cannot be captured, or fails.
    """
    say("capturing")
    batch = padded(batch, options.padding([batch]))
    step = captured_step(model, loss, batch, options)
    captured, whole_loss = step.program, step.whole_loss
    options = replace(step.options, optimizer=of_parameters(step.options.optimizer, lambda: without_values(model)))
    asked = whole_loss, bool(captured.metrics()), captured.scales_loss
    program = run_passes(captured, front_passes(False, *asked))
    split_up = run_passes(captured, front_passes(True, *asked)) if three_way else program
    say("costing the step")
    costs = step_costs(program, options)
    rate = costs.optimizer.seconds_per_byte
    levels = options.recomputes
    whole = apart = profile_of(without_metrics(run_passes(program, [costs.of_nodes])), rate, levels)
    if len(list(split_up)) != len(list(program)):
        say("costing the step with split backward operators")
        again = step_costs(split_up, options, costs.optimizer)
        apart = profile_of(without_metrics(run_passes(split_up, [again.of_nodes])), rate, levels)
    first = next(b.leaf.tensor for b in program.batch if b.leaf.tensor is not None)
    samples = (first.shape[0] if first.shape else 1) * options.count
    return ModelProfile(
        whole,
        apart,
        options.count,
        samples,
        costs.optimizer,
        program.device,
        (*program.warnings, *([costs.optimizer.doubt] if costs.optimizer.doubt else [])),
    )
