"""Where an optimizer will take the weights next: one rule for each family of optimizers.

Notation: W are the current weights, after t updates; s is the number of updates to look ahead; lr is the learning rate
of the next update, and is used for those after it, too; reach = s·lr.

| rule        | for                                 | Ŵ, the weights s updates ahead                               |
|-------------|-------------------------------------|--------------------------------------------------------------|
| momentum    | SGD and RMSprop with momentum       | W − reach·buf                                                |
| adam        | Adam, AdamW                         | W·(1 − reach·decay) − reach·m̂/(√v̂+ε)                         |
| nadam       | NAdam                               | W·(1 − reach·decay) − lr·(Σ c_i)·m/(√v̂+ε)                    |
| last-update | any other, and for all: weight form | W + (reach/the last update's lr)·(W_t − W_{t−1}), or s·(…)   |

m̂ = m/(1−β₁ᵗ) and v̂ = v/(1−β₂ᵗ), or the greatest v with amsgrad; decay is AdamW's, and zero for Adam, which has its
weight decay in its moments. With nesterov, the applied direction also contains the gradient; the buffer approximates
it. NAdam steps along the gradient and m, weighted by its momentum schedule, μ_t = β₁·(1 − 0.96^(t·momentum_decay)/2).
The next gradient is unknown and is replaced by m, so c = (1 − μ_t)/(1 − μ₁⋯μ_t) + μ_{t+1}/(1 − μ₁⋯μ_{t+1}). The
last-update rule would not do for NAdam: half of an update is the last gradient, whose noise would be repeated s times.
In a small GPT its error is 1.5 to 2.3 times that of stale weights; the error of the nadam rule is 0.6 to 1.02 times.

All rules but the last repeat the optimizer's own update with its current state; the last one repeats the last update
itself: s times in the weight form, or if there is no rate.

From: SpecTrain (Chen, Yang, Cheng 2018, arXiv 1809.02839) for momentum, PipeOptim (Guan et al. 2023, arXiv
2312.00839) for Adam and AdamW, Kosson et al. 2020 (arXiv 2003.11666) for the weight form, Dozat 2016 (Nesterov in Adam)
for μ; the rest, and the details of all, follow `torch.optim` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxpipe.task.several_optimizers import stepped_by
from fxpipe.torch_private import foreach_add_, foreach_addcdiv_, foreach_copy_, foreach_sqrt

Group = dict[str, Any]


@dataclass
class Look:
    """What a rule reads for some parameters of one group, and where it writes.

    `out` is memory for predictions `steps` updates ahead, in the layout of `weights`; its contents are overwritten.
    """

    out: list[Tensor]
    weights: list[Tensor]
    states: list[dict[str, Any]]
    group: Group
    steps: int

    @property
    def rate(self) -> float:
        return float(self.group["lr"])

    @property
    def reach(self) -> float:
        return self.steps * self.rate


@dataclass(frozen=True)
class Rule:
    """How the optimizer moves one parameter group.

    Attributes:
        write: writes the predictions; None for the last-update rule, since only `Predictor` has the update.
        state: an entry of a parameter's state; without it there is no direction yet.
    """

    name: str
    write: Callable[[Look], None] | None = None
    state: str | None = None


def rate_of(group: Mapping[str, Any]) -> float | None:
    """The learning rate of a parameter group; None if it has none, or if the optimizer computes it at every step."""
    rate = group.get("lr")
    return None if rate is None else float(rate)


def rule_of(optimizer: torch.optim.Optimizer, group: Group) -> Rule:
    """The rule of a parameter group, by the exact type of its optimizer and its present options.

    The last-update rule is used for subclasses, which may do anything; for complex parameters, if the rule of their
    optimizer divides; and for groups without momentum.
    """
    kind = stepped_by(optimizer, group)
    if kind in (torch.optim.SGD, torch.optim.RMSprop) and group["momentum"] != 0:
        return MOMENTUM
    if any(parameter.is_complex() for parameter in group["params"]):
        return LAST_UPDATE
    return _WITH_MOMENTS.get(kind, LAST_UPDATE)


def _momentum(look: Look) -> None:
    add(look.out, look.weights, [state["momentum_buffer"] for state in look.states], -look.reach)


def _adam(look: Look) -> None:
    beta1 = float(look.group["betas"][0])
    updates = _numbers(look.states, "step")  # a parameter without gradients has had fewer updates
    factors = {t: look.reach / (1 - beta1**t) for t in dict.fromkeys(updates)}
    _along_moments(look, updates, [factors[t] for t in updates])


def _nadam(look: Look) -> None:
    group = look.group
    beta1, slow = float(group["betas"][0]), float(group["momentum_decay"])

    def mu(t: float) -> float:
        return beta1 * (1 - 0.5 * 0.96 ** (t * slow))

    updates = _numbers(look.states, "step")
    pairs = list(zip(updates, _numbers(look.states, "mu_product"), strict=True))
    factors = dict.fromkeys(pairs, 0.0)
    for t, product in factors:
        moved, present = 0.0, product * mu(t + 1)
        for i in range(1, look.steps + 1):
            following = present * mu(t + i + 1)
            moved += mu(t + i + 1) / (1 - following) + (1 - mu(t + i)) / (1 - present)
            present = following
        factors[t, product] = look.rate * moved
    _along_moments(look, updates, [factors[pair] for pair in pairs])


def _along_moments(look: Look, updates: list[float], factors: list[float]) -> None:
    """out = W·(1 − reach·decay) − factor·m/(√v̂+ε), with the number of updates that each parameter has had."""
    group, beta2 = look.group, float(look.group["betas"][1])
    roots = {t: (1 - beta2**t) ** 0.5 for t in dict.fromkeys(updates)}
    # m/(√v̂+ε) = √(1−β₂ᵗ)·m/(√v + ε·√(1−β₂ᵗ)): one division of tensors, and no pass for v̂.
    _add_quotient(
        look.out,
        look.weights,
        [state["exp_avg"] for state in look.states],
        [state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"] for state in look.states],
        [-factor * roots[t] for t, factor in zip(updates, factors, strict=True)],
        [float(group["eps"]) * roots[t] for t in updates],
    )
    if group["decoupled_weight_decay"] and (decay := -look.reach * float(group["weight_decay"])):
        foreach_add_(look.out, look.weights, alpha=decay)


def _numbers(states: list[dict[str, Any]], name: str) -> list[float]:
    """An entry of each parameter's state, such as its number of updates: a number, or a tensor on any device.

    Tensors on a device are read in one transfer.
    """
    numbers = [state[name] for state in states]
    if all(isinstance(number, Tensor) and number.device.type != "cpu" for number in numbers):
        numbers = torch.stack(numbers).tolist()
    # 0 steps: a gradient scaler undid the step
    return [max(float(number), 1.0) if name == "step" else float(number) for number in numbers]


def add(out: list[Tensor], weights: list[Tensor], directions: list[Tensor], factor: float) -> None:
    """out = weights + factor·directions: one pass over CPU memory, two fused kernels on a GPU."""
    if _on_cpu(weights):
        for o, w, d in zip(out, weights, directions, strict=True):
            torch.add(w, d, alpha=factor, out=o)
        return
    foreach_copy_(out, weights)
    foreach_add_(out, directions, alpha=factor)


def _add_quotient(
    out: list[Tensor],
    weights: list[Tensor],
    tops: list[Tensor],
    squares: list[Tensor],
    factors: list[float],
    eps: list[float],
) -> None:
    """out = weights + factor·top/(√square+ε).

    On a CPU it reads memory three times and writes only `out`. On a GPU it uses four fused kernels and, meanwhile, one
    more copy of these weights: torch's own Adam takes as much, and a kernel for each tensor would cost more.
    """
    if _on_cpu(weights):
        for o, w, top, square, factor, e in zip(out, weights, tops, squares, factors, eps, strict=True):
            torch.sqrt(square, out=o).add_(e)
            torch.addcdiv(w, top, o, value=factor, out=o)
        return
    bottoms = foreach_sqrt(squares)
    foreach_add_(bottoms, eps)
    foreach_copy_(out, weights)
    foreach_addcdiv_(out, tops, bottoms, factors)


def _on_cpu(weights: list[Tensor]) -> bool:
    return weights[0].device.type == "cpu"


MOMENTUM = Rule("momentum", _momentum, "momentum_buffer")
ADAM = Rule("adam", _adam, "exp_avg")
NADAM = Rule("nadam", _nadam, "exp_avg")
LAST_UPDATE = Rule("last-update")

_WITH_MOMENTS: dict[type[torch.optim.Optimizer], Rule] = {
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAM,
    torch.optim.NAdam: NADAM,
}
