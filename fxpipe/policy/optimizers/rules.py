"""Where an optimizer will take the weights next: one rule for each family of optimizers.

Words: W are the current weights, after t updates; s is the number of updates to look ahead; lr_i is the learning rate
of update i, counted from 0, so lr_t is that of the next one; reach = lr_t + … + lr_{t+s−1}, which is s·lr while lr is
constant. g is the gradient of the last update, negated under `maximize`, as torch does before it enters any state.

| rule        | for                                 | Ŵ, the weights s updates ahead                               |
|-------------|-------------------------------------|--------------------------------------------------------------|
| momentum    | SGD and RMSprop with momentum       | W − reach·buf                                                |
| adam        | Adam, AdamW                         | W·(1 − reach·decay) − reach·m̂/(√v̂+ε)                         |
| gradient    | SGD without momentum                | W − reach·(g + weight_decay·W)                               |
| rmsprop     | RMSprop without momentum            | W − reach·(g + weight_decay·W)/(√avg+ε)                      |
| adagrad     | Adagrad                             | W − (Σ lr_i/(1 + i·lr_decay))·(g + weight_decay·W)/(√sum+ε)  |
| last-update | any other, and for all: weight form | W + (reach/the last update's lr)·(W_t − W_{t−1}), or s·(…)   |

m̂ = m/(1−β₁ᵗ) and v̂ = v/(1−β₂ᵗ), or the greatest v with amsgrad; decay is AdamW's, zero for Adam, whose own weight
decay is in its moments. With `centered`, avg is avg − ḡ². With nesterov, the applied direction also contains the
gradient: the buffer approximates it. The first five rules repeat the optimizer's own update with its current state; the
last one repeats the last update as it was: s times in the weight form, or if the rate is not known.

With decay, future gradients count as zero, so that only what momentum carries is left (FTPipe):

    momentum:  Ŵ = W − buf·Σ lr_{t+i−1}·γ^i, i = 1 … s, which is lr·(γ−γ^{s+1})/(1−γ)·buf while lr is constant;
               with nesterov one more γ
    adam:      m·Σ lr_{t+i−1}·β₁^i/(1−β₁^{t+i}) replaces reach·m̂; v̂ and AdamW's decay as above

From: SpecTrain (Chen, Yang, Cheng 2018, arXiv 1809.02839) for momentum, PipeOptim (Guan et al. 2023, arXiv
2312.00839) for Adam, AdamW and RMSprop, Kosson et al. 2020 (arXiv 2003.11666) for the weight form, FTPipe (Eliad et
al. 2021) for decay; the rest, and the details of all, follow `torch.optim` itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Group = dict[str, Any]


@dataclass
class Look:
    """What a rule reads, for some parameters of one group, and where it writes.

    Attributes:
        out: memory for the predictions, laid out like `weights`; its contents are lost.
        states: the optimizer's state of each parameter.
        group: the parameter group's options, as they are now.
        rates: the learning rates of the future updates: lr_t, lr_{t+1}, …
        decay: count future gradients as zero.
    """

    out: list[Tensor]
    weights: list[Tensor]
    states: list[dict[str, Any]]
    group: Group
    rates: Sequence[float]
    decay: bool = False

    @property
    def reach(self) -> float:
        """The sum of the rates, rounded once: exactly steps·lr if they are all the same."""
        return math.fsum(self.rates)


@dataclass(frozen=True)
class Rule:
    """How the optimizer moves one parameter group.

    Attributes:
        write: writes the predictions; None for the last update, which only `Predictor` holds.
        state: an entry of a parameter's state; without it there is no direction yet.
        gradient: reads `parameter.grad` of the last update, which must be kept after it.
        momentum: can say what is left if future gradients are zero.
    """

    name: str
    write: Callable[[Look], None] | None = None
    state: str | None = None
    gradient: bool = False
    momentum: bool = False

    def has_direction(self, parameter: Tensor, state: Group) -> bool:
        """Whether the parameter has been updated and what the rule reads exists."""
        if self.gradient and parameter.grad is None:
            return False
        return self.state is None or state.get(self.state) is not None


def rule_of(optimizer: torch.optim.Optimizer, group: Group) -> Rule:
    """The rule of a parameter group: by the optimizer's exact type and the group's options as they are now.

    A subclass may do anything, so its last update is repeated; so is that of complex parameters if the rule divides.
    """
    kind = type(optimizer)
    if kind in (torch.optim.SGD, torch.optim.RMSprop) and group["momentum"] != 0:
        return MOMENTUM
    if kind is torch.optim.SGD:
        return GRADIENT
    if any(parameter.is_complex() for parameter in group["params"]):
        return LAST_UPDATE
    return _DIVIDING.get(kind, LAST_UPDATE)


def _momentum(look: Look) -> None:
    factor = look.reach
    if look.decay:
        gamma, further = float(look.group["momentum"]), int(look.group.get("nesterov", False))
        factor = math.fsum(rate * gamma ** (i + further) for i, rate in enumerate(look.rates, 1))
    add(look.out, look.weights, [state["momentum_buffer"] for state in look.states], -factor)


def _adam(look: Look) -> None:
    group, reach = look.group, look.reach
    beta1, beta2 = (float(beta) for beta in group["betas"])
    made = _updates(look.states)  # a parameter without gradients has had fewer updates
    factors = dict.fromkeys(made, 0.0)
    for t in factors:
        factors[t] = reach / (1 - beta1**t)
        if look.decay:
            factors[t] = math.fsum(rate * beta1**i / (1 - beta1 ** (t + i)) for i, rate in enumerate(look.rates, 1))
    roots = {t: (1 - beta2**t) ** 0.5 for t in factors}
    # m̂/(√v̂+ε) = √(1−β₂ᵗ)/(1−β₁ᵗ) · m/(√v + ε·√(1−β₂ᵗ)): one division of tensors, and no pass for v̂.
    _add_quotient(
        look.out,
        look.weights,
        [state["exp_avg"] for state in look.states],
        [state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"] for state in look.states],
        [-factors[t] * roots[t] for t in made],
        [float(group["eps"]) * roots[t] for t in made],
    )
    if group["decoupled_weight_decay"]:
        _add_in_place(look.out, look.weights, -reach * float(group["weight_decay"]))


def _gradient(look: Look) -> None:
    reach, sign = look.reach, _sign(look.group)
    add(look.out, look.weights, _gradients(look.weights), -reach * sign)
    _add_in_place(look.out, look.weights, -reach * float(look.group["weight_decay"]))


def _rmsprop(look: Look) -> None:
    squares = [state["square_avg"] for state in look.states]
    if look.group["centered"]:
        means = [state["grad_avg"] for state in look.states]
        for out, square, mean in zip(look.out, squares, means, strict=True):
            torch.addcmul(square, mean, mean, value=-1, out=out).clamp_(min=0)  # rounding can pass zero
        squares = look.out
    _along_gradient(look, squares, [-look.reach] * len(squares))


def _adagrad(look: Look) -> None:
    slowing = float(look.group["lr_decay"])
    made = _updates(look.states) if slowing else [0.0] * len(look.states)
    factors = {
        t: -math.fsum(rate / (1 + (t + i) * slowing) for i, rate in enumerate(look.rates)) for t in dict.fromkeys(made)
    }
    _along_gradient(look, [state["sum"] for state in look.states], [factors[t] for t in made])


def _along_gradient(look: Look, squares: list[Tensor], factors: list[float]) -> None:
    """out = W + factor·(g + weight_decay·W)/(√square+ε)."""
    sign, decay = _sign(look.group), float(look.group["weight_decay"])
    tops = _gradients(look.weights)
    if decay:  # a sum that is not stored: one more copy of these weights, freed at once, as in torch's own step
        tops = [torch.add(top, weight, alpha=sign * decay) for top, weight in zip(tops, look.weights, strict=True)]
    eps = [float(look.group["eps"])] * len(squares)
    _add_quotient(look.out, look.weights, tops, squares, [sign * factor for factor in factors], eps)


def _gradients(weights: list[Tensor]) -> list[Tensor]:
    gradients = [weight.grad for weight in weights]
    return [gradient for gradient in gradients if gradient is not None]


def _sign(group: Group) -> float:
    return -1.0 if group["maximize"] else 1.0


def _updates(states: list[dict[str, Any]]) -> list[float]:
    """How many updates each parameter has had: a number, or a tensor on any device, which is read only once."""
    steps = [state["step"] for state in states]
    if all(isinstance(step, Tensor) and step.device.type != "cpu" for step in steps):
        steps = torch.stack(steps).tolist()
    return [max(float(step), 1.0) for step in steps]  # 0: a gradient scaler undid the step


def add(out: list[Tensor], weights: list[Tensor], directions: list[Tensor], factor: float) -> None:
    """out = weights + factor·directions: one pass over CPU memory, two fused kernels on a GPU."""
    if _on_cpu(weights):
        for o, w, d in zip(out, weights, directions, strict=True):
            torch.add(w, d, alpha=factor, out=o)
        return
    torch._foreach_copy_(out, weights)
    torch._foreach_add_(out, directions, alpha=factor)


def _add_in_place(out: list[Tensor], directions: list[Tensor], factor: float) -> None:
    if factor:
        torch._foreach_add_(out, directions, alpha=factor)


def _add_quotient(
    out: list[Tensor],
    weights: list[Tensor],
    tops: list[Tensor],
    squares: list[Tensor],
    factors: list[float],
    eps: list[float],
) -> None:
    """out = weights + factor·top/(√square+ε). The squares may be `out` itself.

    On a CPU it reads memory three times and writes only `out`. On a GPU it uses four fused kernels and, meanwhile, one
    more copy of these weights: torch's own Adam takes as much, and a kernel for each tensor would cost more.
    """
    if _on_cpu(weights):
        for o, w, top, square, factor, e in zip(out, weights, tops, squares, factors, eps, strict=True):
            torch.sqrt(square, out=o).add_(e)
            torch.addcdiv(w, top, o, value=factor, out=o)
        return
    bottoms = torch._foreach_sqrt(squares)
    torch._foreach_add_(bottoms, eps)
    torch._foreach_copy_(out, weights)
    torch._foreach_addcdiv_(out, tops, bottoms, factors)


def _on_cpu(weights: list[Tensor]) -> bool:
    return weights[0].device.type == "cpu"


MOMENTUM = Rule("momentum", _momentum, state="momentum_buffer", momentum=True)
ADAM = Rule("adam", _adam, state="exp_avg", momentum=True)
GRADIENT = Rule("gradient", _gradient, gradient=True)
RMSPROP = Rule("rmsprop", _rmsprop, state="square_avg", gradient=True)
ADAGRAD = Rule("adagrad", _adagrad, gradient=True, state="sum")
LAST_UPDATE = Rule("last-update")

_DIVIDING: dict[type[torch.optim.Optimizer], Rule] = {
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAM,
    torch.optim.RMSprop: RMSPROP,
    torch.optim.Adagrad: ADAGRAD,
}
