"""Error feedback: every step is made twice, and taken back once after τ updates if gradients are τ updates late."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fxpipe.policy.optimizers.update_repair import UpdateRepair
from fxpipe.torch_private import foreach_add_, foreach_copy_, foreach_sub_


@dataclass
class _Late:
    """Parameters whose gradients arrive `delay` updates late; the lists of tensors are laid out like `weights`.

    On a GPU these are all such parameters, for few kernels; on a CPU each alone, so that it stays in the cache.

    Attributes:
        steps: the optimizer's last steps u, oldest first; at most `delay` of them between updates.
        spare: memory for the next step.
    """

    delay: int
    weights: list[Tensor] = field(default_factory=list)
    steps: deque[list[Tensor]] = field(default_factory=deque)
    spare: list[Tensor] | None = None


class ErrorFeedback(UpdateRepair):
    """Turns any optimizer's update into the one with error feedback, for gradients that arrive τ updates late.

    u_t is the optimizer's whole step, including rate and weight decay: W before `optimizer.step()` minus W after it.

        W ← W − 2·u_t + u_{t−τ},   u_i = 0 before the first update

    So after any number of updates the weights are X − (u_{t−1} + … + u_{t−τ}), where X = W_0 − (u_0 + … + u_{t−1}) has
    every step once: the weights look τ updates ahead, by the steps that were really made. With τ = 0 this is the
    optimizer itself, bit for bit: nothing is computed. Parameters that a step does not move have u_t = 0.

    Cost: τ + 1 copies of the late parameters, τ steps and the weights before the present one; four passes over them.

    From: Zmushko et al. 2026 (ICML), arXiv 2606.30634, for τ = 1; the formula for longer delays is our own.

    Args:
        delays: τ of each parameter; 0 if it is missing. Parameters in no group are never moved.
    """

    name: ClassVar[str] = "ef"
    without: ClassVar[str] = "error feedback harms"
    entry: ClassVar[str] = "last_steps"
    form = dict[str, tuple[int, list[Tensor]]]

    def __init__(self, optimizer: torch.optim.Optimizer, delays: Mapping[Tensor, int]) -> None:
        super().__init__(optimizer, delays)
        assert all(delay >= 0 for delay in delays.values()), "a gradient cannot be early"
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        late: dict[tuple[int, int], _Late] = {}
        for parameter, delay in delays.items():
            if delay and id(parameter) in trained:
                alone = id(parameter) if parameter.is_cpu else 0
                late.setdefault((delay, alone), _Late(delay)).weights.append(parameter)
        self._late = list(late.values())

    @torch.no_grad()
    def before_step(self) -> None:
        """Call before every `optimizer.step()`: keeps a copy of the weights."""
        for late in self._late:
            if late.spare is None:
                late.spare = [torch.empty_like(weight, requires_grad=False) for weight in late.weights]
            foreach_copy_(late.spare, late.weights)

    @torch.no_grad()
    def after_step(self) -> None:
        """Call right after every `optimizer.step()`: turns the copy into u_t, and applies the formula above."""
        for late in self._late:
            assert late.spare is not None, "before_step() comes first"
            steps, late.spare = late.spare, None
            foreach_sub_(steps, late.weights)
            foreach_sub_(late.weights, steps)
            late.steps.append(steps)
            if len(late.steps) > late.delay:
                late.spare = late.steps.popleft()
                foreach_add_(late.weights, late.spare)

    def state(self) -> list[tuple[Tensor, int, list[Tensor]]]:
        """Each late parameter, its delay, and its last steps, oldest first. For `load`."""
        return [
            (weight, late.delay, [steps[place] for steps in late.steps])
            for late in self._late
            for place, weight in enumerate(late.weights)
        ]

    @torch.no_grad()
    def load(self, remembered: Sequence[tuple[Tensor, int, list[Tensor]]]) -> None:
        """Continue from another instance's `state`.

        If parameters have other delays here, the weights become X, and the feedback starts again. Parameters that were
        not trained before have no past steps.
        """
        past = {id(weight): (delay, steps) for weight, delay, steps in remembered}
        for late in self._late:
            most = max((len(past[id(weight)][1]) for weight in late.weights if id(weight) in past), default=0)
            rows = [
                past.get(id(weight), (late.delay, [torch.zeros_like(weight, requires_grad=False)] * most))
                for weight in late.weights
            ]
            if {delay for delay, _ in rows} == {late.delay} and len({len(steps) for _, steps in rows}) == 1:
                for of_update in zip(*(steps for _, steps in rows), strict=True):
                    copies = [torch.empty_like(w, requires_grad=False) for w in late.weights]
                    foreach_copy_(copies, of_update)
                    late.steps.append(copies)
                for weight in late.weights:
                    past.pop(id(weight), None)
        for weight, _, steps in remembered:
            if id(weight) in past:
                for step in steps:
                    weight.add_(step)
