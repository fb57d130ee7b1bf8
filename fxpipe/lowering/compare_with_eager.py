"""Compares one synchronous step of the emitted code with eager PyTorch.

The stages run one after the other in this process, microbatch by microbatch, on the example batch. In the comparison
with the whole batch, dropout drops nothing. Microbatch by microbatch, forward draws random numbers in eager's order, so
dropout stays on with the same masks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fxpipe.builds.build import Build
from fxpipe.codecs import without_codecs
from fxpipe.lowering.agreement import Agreement, Step, agreement_of, each_once, metric_errors, of_minibatch
from fxpipe.lowering.eager_step import cut_as_planned, eager_step
from fxpipe.lowering.independent_replicas import of_one_replica
from fxpipe.lowering.own_rounding import THE_LOSS, Exact, in_float64, without_rounding
from fxpipe.lowering.steady_randomness import SteadyRandomness
from fxpipe.plan.spec import FUNCTIONS, Phase
from fxpipe.random_state import seed_torch, torch_state_kept
from fxpipe.runtime.worker.gradients import summed_in
from fxpipe.stages.compare import EXACT, FLOOR, FLOOR_OF_SUMS
from fxpipe.stages.loaded import explained, load_stages
from fxpipe.stages.microbatch import run_microbatch
from fxpipe.stages.minibatch import TRIED_SCALE, Minibatches, weights_of
from fxpipe.stages.part_call import Function
from fxpipe.stages.pure_function import all_float64, wide
from fxpipe.task.hooks import Loss
from fxpipe.task.loss_weights import LossWeight


def compare_with_eager(
    build: Build, model: nn.Module, loss: Loss, batch: Any, *, seed: int = 0, loss_weight: LossWeight | None = None
) -> Agreement:
    """Run one minibatch both ways; the model is left as it was.

    Eager PyTorch steps on the whole batch; only batch norm sees one microbatch at a time, and random numbers are the
    same for every sample in both. What cannot be compared this way is compared microbatch by microbatch, with the
    random numbers of a run: the new values of buffers, and a loss that differs from the whole batch's by design
    (`differs_from_whole`). Codecs are off: `codec_effect` says what they change. Where values differ by more than
    `EXACT`, both steps in float64 say whether that is rounding (`without_rounding`).

    Args:
        loss_weight: the hook that the build was compiled with, if any.

    Raises:
        RunError: the emitted code fails, and eager PyTorch does not.
    """
    steps = BothSteps(*of_one_replica(build, batch), model, loss, seed, loss_weight)
    plan = steps.build.plan
    eager = steps.eager()  # first: if it cannot run, the emitted code is not to blame
    emitted = steps.emitted()
    metrics = of_minibatch(eager, steps.weights() if plan.loss.weighted else ())
    by_parts = steps.agreement(emitted, eager)
    if eager.draws_again and by_parts.largest > EXACT:
        by_parts = _without_draws(steps, by_parts)
    by_parts = replace(by_parts, metrics=metric_errors(emitted, metrics))
    if plan.microbatches == 1 or plan.step.differs_from_whole:
        return by_parts
    with SteadyRandomness() as steady:
        eager, emitted = steps.eager(whole=True), steps.emitted()
        whole = steps.agreement(emitted, eager, FLOOR_OF_SUMS if plan.loss.batch_norm else FLOOR, whole=True)
    whole = replace(whole, metrics=metric_errors(emitted, eager.metrics))
    step = plan.step
    changed = bool(step.made or step.whole_numbers)  # a microbatch's loss is not the user's function of that microbatch
    if changed:
        finite = tuple(name for name in by_parts.not_finite if name in by_parts.buffers)
        by_parts = replace(by_parts, loss=0.0, gradients={}, rounding={}, not_finite=finite)
    if steady.unknown:
        by_parts = replace(by_parts, metrics={} if changed else by_parts.metrics)
        why = f"{', '.join(sorted(steady.unknown))} cannot draw alike for a batch and its microbatches"
        return replace(by_parts, not_compared=why) if changed else by_parts
    gradients = {n: max(error, by_parts.gradients.get(n, 0.0)) for n, error in whole.gradients.items()}
    if plan.loss.batch_norm and not changed:  # it amplifies rounding, and kernels differ by size
        gradients = by_parts.gradients
        whole = replace(whole, rounding={n: e for n, e in whole.rounding.items() if n == THE_LOSS})
    return replace(
        by_parts,
        loss=max(whole.loss, by_parts.loss),
        gradients=gradients,
        metrics={n: min(error, by_parts.metrics.get(n, error)) for n, error in whole.metrics.items()},
        zero=whole.zero,
        not_finite=each_once(by_parts.not_finite, whole.not_finite),
        rounding={**whole.rounding, **by_parts.rounding},
        cause=whole.cause or by_parts.cause,
    )


@dataclass(frozen=True)
class BothSteps:
    """One minibatch, trained by a build's stages and by the eager step that the build was compiled from.

    The build is of one replica. The batch has its first shape: padded, and that replica's share.
    """

    build: Build
    batch: Any
    model: nn.Module
    loss: Loss
    seed: int = 0
    loss_weight: LossWeight | None = None

    def eager(self, *, whole: bool = False) -> Step:
        """Eager PyTorch's step, as `eager_step`."""
        return eager_step(self.build.plan, self.model, self.loss, self.batch, self.seed, whole=whole)

    def emitted(self, *, precise: bool = False) -> Step:
        """The stages' step; `precise` in float64."""
        return emitted_step(self.build, self.batch, self.seed, self.loss_weight, precise=precise)

    def weights(self) -> list[float]:
        """How much each microbatch counts by the hook; empty without it."""
        if self.loss_weight is None:
            return []
        parts = cut_as_planned(self.build.plan, self.batch)
        return [float(weight) for weight in weights_of(self.loss_weight, parts, 0, "cpu")]

    def agreement(
        self, found: Step, eager: Step, floor: float = FLOOR, limit: float = EXACT, *, whole: bool = False
    ) -> Agreement:
        """How far two of these steps are from each other, without errors above `limit` that rounding explains.

        If they differ by more, both are made again in float64, in the modes that are active, as `SteadyRandomness`.

        `whole` says whether eager PyTorch has stepped on the whole batch.
        """

        def eager_of(model: nn.Module, batch: Any) -> Step:
            return replace(self, model=model, batch=batch).eager(whole=whole)

        def exact() -> Exact | None:
            true = in_float64(eager_of, self.model, self.batch, self.build.plan.precision.params)
            if true is None:
                return None
            try:
                return Exact(true, self.emitted(precise=True))
            except Exception:  # an operator that has no float64
                return Exact(true)

        return without_rounding(agreement_of(found, eager, floor), found, eager, limit, floor, exact)


def _without_draws(steps: BothSteps, drawn: Agreement) -> Agreement:
    """The agreement where eager's backward draws other random numbers than its forward: compared with steady numbers.

    `drawn` is the agreement with random numbers.
    """
    with SteadyRandomness() as steady:
        eager, emitted = steps.eager(), steps.emitted()
        agreement = steps.agreement(emitted, eager)
    if steady.unknown:
        return replace(
            drawn, cause=f"{_DRAWS_AGAIN}, and {', '.join(sorted(steady.unknown))} cannot draw alike in both"
        )
    note = f"gradients were compared without random numbers: {_DRAWS_AGAIN}"
    return replace(agreement, notes=(note,)) if agreement.largest <= EXACT else drawn


_DRAWS_AGAIN = (
    "eager PyTorch draws other random numbers in backward than in forward (torch.utils.checkpoint with "
    "preserve_rng_state=False), so its gradients do not belong to the loss that it returns; a stage draws once"
)


class SumOfMicrobatches:
    """The loss and the gradients of a minibatch, summed over its microbatches, and divided.

    `metrics` are the names of the values after the loss, in one tensor; `scale` the factor on the losses before
    backward, which divided them, too.
    """

    def __init__(self, divisor: int, metrics: Sequence[str] = (), scale: float | None = None) -> None:
        self._divisor = divisor
        self._scale = scale
        self._names = metrics
        self._metrics = torch.zeros(len(metrics))
        self.loss = torch.zeros(())
        self.gradients: dict[str, torch.Tensor] = {}
        self._kinds: dict[str, torch.dtype] = {}

    def add_loss(self, value: torch.Tensor) -> None:
        if self._names:
            self._metrics += value[1:].detach().cpu() / self._divisor
            value = value[0]
        self.loss = self.loss + value.detach().cpu() / self._divisor

    def add_gradient(self, name: str, value: torch.Tensor) -> None:
        self._kinds[name] = value.dtype
        share = value.to(summed_in(value.dtype)) / (self._scale or self._divisor)
        self.gradients[name] = self.gradients[name] + share if name in self.gradients else share

    def step(self, buffers: dict[str, torch.Tensor]) -> Step:
        named = dict(zip(self._names, self._metrics.tolist(), strict=True))
        rounded = {name: gradient.to(self._kinds[name]) for name, gradient in self.gradients.items()}
        return Step(self.loss, rounded, buffers, (named,))


def emitted_step(
    build: Build,
    batch: Any,
    seed: int,
    loss_weight: LossWeight | None,
    *,
    with_codecs: bool = False,
    precise: bool = False,
) -> Step:
    """One minibatch by the emitted stages, for the build's first shape of batch; in float64 if `precise`."""
    plan = build.plan
    stages = load_stages(plan, build.files)
    state = {name: wide(tensor) for name, tensor in build.tensors.items()} if precise else dict(build.tensors)
    sums = SumOfMicrobatches(plan.loss_divisor, plan.metrics, TRIED_SCALE if plan.scales_loss else None)

    def function(worker: int, phase: Phase) -> Function:
        stage, name = stages[worker], FUNCTIONS[phase]
        said = f"eager PyTorch runs this step, but the emitted {name}"
        return explained(stage.path, worker, lambda: said, "use smaller batches")(stage.functions[phase])

    crossing = contextlib.nullcontext() if with_codecs else without_codecs()
    parts = Minibatches(plan, build.files, build.tensors, loss_weight)(batch, 0)
    if precise:
        parts = [tuple(wide(v) if isinstance(v, torch.Tensor) else v for v in part) for part in parts]
    with torch_state_kept(), torch.no_grad(), crossing, all_float64() if precise else contextlib.nullcontext():
        for j, part in enumerate(parts):
            leaves = dict(zip([leaf.name for leaf in plan.step.batch], part, strict=True))
            seed_torch(seed + j)
            for call, returned in run_microbatch(plan, function, state, leaves, packed=not precise):
                if returned.loss is not None:
                    sums.add_loss(returned.loss)
                for name, gradient in zip(call.spec.gradients, returned.gradients, strict=True):
                    sums.add_gradient(name, gradient)
    return sums.step({b.name: state[b.name] for b in plan.buffers})
