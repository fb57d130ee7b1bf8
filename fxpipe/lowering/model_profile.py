"""A model's profile: captured, measured or computed, unit by unit, without a cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from fxpipe.costs.optimizer import optimizer_costs
from fxpipe.ir.transform import run_passes
from fxpipe.lowering.lower import trained
from fxpipe.passes.analysis.profile import profile_of
from fxpipe.passes.cost import Cost
from fxpipe.passes.fold import Fold
from fxpipe.passes.split_backward import SplitBackward
from fxpipe.passes.units import Units
from fxpipe.planner.device import CPU, Device
from fxpipe.planner.profile import Profile
from fxpipe.task.batch import split
from fxpipe.task.model_file import MakeOptimizer, default_optimizer
from fxpipe.threads import threads as worker_threads
from fxpipe.tracing.capture import Loss, capture


@dataclass(frozen=True)
class ModelProfile:
    """What a model's units cost a microbatch.

    Attributes:
        whole: for cuts that leave W with B.
        apart: for three-way cuts: operators that make input and weight gradients in one call are split in two. The
            same as `whole` where the model has none.
        microbatches: of a minibatch.
        samples: of a minibatch.
        optimizer_bytes: of the optimizer's state, for each byte of trained weights.
        device: 'cpu' or 'cuda'.
        warnings: what capture and costs want the user to know.
    """

    whole: Profile
    apart: Profile
    microbatches: int
    samples: int
    optimizer_bytes: float
    device: str
    warnings: tuple[str, ...] = ()


def profile_model(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    workers: int = 1,
    microbatches: int = 1,
    autocast: str | None = None,
    optimizer: MakeOptimizer = default_optimizer,
    cost: Literal["measured", "analytic"] = "measured",
    device: Device | None = None,
    threads: int | None = None,
    three_way: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> ModelProfile:
    """Capture the step and cost it; nothing is cut or written.

    Args:
        batch: one whole minibatch.
        workers: how many will share this machine's cores, for the threads of each.
        optimizer: as for a run; its update is timed, its state weighed.
        device: what analytic costs are computed for.
        three_way: whether `apart` is wanted; else it is `whole`.
        say: is told what is being done.

    Raises:
        FxpipeError: the step cannot be captured, or fails.
    """
    say("capturing")
    program = capture(model, loss, split(batch, microbatches)[0], autocast=autocast)
    program = run_passes(program, [Fold()], ())
    split_up = run_passes(program, [SplitBackward()], ()) if three_way else program
    with worker_threads(threads, workers):
        costing = Cost(cost, threads=threads, device=device or CPU)
        of_optimizer = optimizer_costs(
            trained(program), optimizer, timed=cost == "measured", bandwidth=(device or CPU).bandwidth
        )
        rate = of_optimizer.seconds_per_byte
        say("costing the step")
        whole = profile_of(run_passes(program, [Units(), costing], ()), rate)
        apart = whole
        if len(list(split_up)) != len(list(program)):
            say("costing the step with split backward operators")
            apart = profile_of(run_passes(split_up, [Units(), costing], ()), rate)
    first = next(b.leaf.tensor for b in program.batch if b.leaf.tensor is not None)
    samples = (first.shape[0] if first.shape else 1) * microbatches
    warnings = (*program.warnings, *([of_optimizer.doubt] if of_optimizer.doubt else []))
    return ModelProfile(whole, apart, microbatches, samples, of_optimizer.state_bytes, program.device, warnings)
