"""Weights some updates ahead, along the direction the optimizer moved last."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Rule = Literal["momentum", "adam", "last-update"]


class Predictor:
    """Predicts a worker's weights `steps` updates ahead: Ŵ = W − steps·lr·(the direction of the last update).

    | rule        | for                           | direction                                |
    |-------------|-------------------------------|------------------------------------------|
    | momentum    | SGD, momentum in every group  | the momentum buffer                      |
    | adam        | Adam, AdamW (real parameters) | m̂/(√v̂+ε), with AdamW's decay: + decay·W  |
    | last-update | all others, subclasses too    | none needed: Ŵ = W + steps·(W_t − W_t−1) |

    Each parameter group has its own `lr`, read when predicting. With nesterov, the direction that was
    applied needs the gradient, which is gone: the buffer stands for it, as in SpecTrain and PipeOptim.
    `maximize` needs nothing: torch negates the gradient before it enters the state.

    Nothing is changed in place: neither a live parameter nor the optimizer's state. A prediction lies in memory of
    its own, taken from what `give_back` has returned: new memory for it in every step would cost more (page faults)
    than the prediction itself.

    Args:
        optimizer: holds the state that is read; it may load another one at any time.
        parameters: what can be predicted, in the caller's order. One that is in no group is frozen.

    Attributes:
        rule: chosen once, by the optimizer's exact type.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
        self.optimizer = optimizer
        self.parameters = tuple(parameters)
        self.rule: Rule = _rule(optimizer)
        # By number, since loading a state replaces the groups themselves.
        self._group = {
            id(parameter): number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        self._trained = [p for p in self.parameters if id(p) in self._group]
        self._update: dict[int, Tensor] = {}  # last-update: W_t − W_t−1 by parameter's id
        self._spare: dict[int, list[Tensor]] = defaultdict(list)  # memory for predictions, by parameter's id

    @torch.no_grad()
    def predict(self, steps: int, subset: Sequence[int] | None = None) -> list[Tensor]:
        """The parameters (those of these indices) `steps` updates ahead, in memory that nobody else reads.

        With steps = 0, for a frozen parameter and before a parameter's first update: the live parameter
        itself.
        """
        wanted = list(self.parameters if subset is None else (self.parameters[index] for index in subset))
        if steps == 0:
            return wanted
        by_group: dict[int, list[int]] = defaultdict(list)
        for place, parameter in enumerate(wanted):
            if id(parameter) in self._group and self._has_direction(parameter):
                by_group[self._group[id(parameter)]].append(place)
        for number, places in by_group.items():
            ahead = self._ahead(steps, self.optimizer.param_groups[number], [wanted[p] for p in places])
            for place, predicted in zip(places, ahead, strict=True):
                wanted[place] = predicted
        return wanted

    def give_back(self, predicted: Sequence[Tensor], subset: Sequence[int]) -> None:
        """Nobody reads these results of `predict(steps, subset)` any more: their memory may be used again."""
        for tensor, index in zip(predicted, subset, strict=True):
            parameter = self.parameters[index]
            if tensor is not parameter:
                self._spare[id(parameter)].append(tensor)

    def _memory(self, parameter: Tensor) -> Tensor:
        spare = self._spare[id(parameter)]
        return spare.pop() if spare else torch.empty_like(parameter, requires_grad=False)

    @torch.no_grad()
    def before_step(self) -> None:
        """Call right before every `optimizer.step()`: the last-update rule keeps a copy of the weights."""
        if self.rule == "last-update" and self._trained:
            if not self._update:
                self._update = {id(p): torch.empty_like(p) for p in self._trained}
            torch._foreach_copy_(self._last_updates(self._trained), self._trained)

    @torch.no_grad()
    def observe(self) -> None:
        """Call right after every `optimizer.step()`: the last-update rule turns its copy into the update."""
        if self.rule == "last-update" and self._trained:
            updates = self._last_updates(self._trained)
            torch._foreach_neg_(updates)
            torch._foreach_add_(updates, self._trained)

    def _last_updates(self, weights: Sequence[Tensor]) -> list[Tensor]:
        return [self._update[id(weight)] for weight in weights]

    def _has_direction(self, parameter: Tensor) -> bool:
        if self.rule == "last-update":
            return id(parameter) in self._update
        key = "momentum_buffer" if self.rule == "momentum" else "exp_avg"
        return self.optimizer.state.get(parameter, {}).get(key) is not None

    def _ahead(self, steps: int, group: dict[str, Any], weights: list[Tensor]) -> Sequence[Tensor]:
        out = [self._memory(weight) for weight in weights]
        if self.rule == "last-update":
            _add(out, weights, self._last_updates(weights), steps)
            return out
        states = [self.optimizer.state[weight] for weight in weights]
        if self.rule == "momentum":
            _momentum(out, steps, group, weights, states)
        else:
            _adam(out, steps, group, weights, states)
        return out


def _rule(optimizer: torch.optim.Optimizer) -> Rule:
    groups = optimizer.param_groups
    if type(optimizer) is torch.optim.SGD and all(group["momentum"] != 0 for group in groups):
        return "momentum"
    real = not any(parameter.is_complex() for group in groups for parameter in group["params"])
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and real:
        return "adam"
    return "last-update"


def _add(out: list[Tensor], weights: list[Tensor], directions: list[Tensor], factor: float) -> None:
    """out = weights + factor·directions: one pass over CPU memory, two fused kernels on a GPU."""
    if weights[0].device.type == "cpu":
        for o, w, d in zip(out, weights, directions, strict=True):
            torch.add(w, d, alpha=factor, out=o)
        return
    torch._foreach_copy_(out, weights)
    torch._foreach_add_(out, directions, alpha=factor)


def _momentum(
    out: list[Tensor], steps: int, group: dict[str, Any], weights: list[Tensor], states: list[dict[str, Any]]
) -> None:
    """W − steps·lr·buf."""
    _add(out, weights, [state["momentum_buffer"] for state in states], -steps * float(group["lr"]))


def _adam(
    out: list[Tensor], steps: int, group: dict[str, Any], weights: list[Tensor], states: list[dict[str, Any]]
) -> None:
    """W·(1 − steps·lr·decay) − steps·lr·m̂/(√v̂+ε), where m̂ = m/(1−β₁ᵗ) and v̂ = v/(1−β₂ᵗ)."""
    reach = steps * float(group["lr"])
    beta1, beta2 = (float(beta) for beta in group["betas"])
    updates = [float(state["step"]) for state in states]  # a parameter without gradients lags behind
    second = "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
    torch._foreach_copy_(out, [state[second] for state in states])
    torch._foreach_sqrt_(out)
    torch._foreach_div_(out, [(1 - beta2**t) ** 0.5 for t in updates])
    torch._foreach_add_(out, float(group["eps"]))
    torch._foreach_reciprocal_(out)
    torch._foreach_mul_(out, [state["exp_avg"] for state in states])
    torch._foreach_mul_(out, [-reach / (1 - beta1**t) for t in updates])
    decay = float(group["weight_decay"]) if group["decoupled_weight_decay"] else 0.0
    torch._foreach_add_(out, weights, alpha=1 - reach * decay)
