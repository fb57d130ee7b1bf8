"""Updates with error feedback against the formula, simulated in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Muon, NAdam, Optimizer, RMSprop
from torch.testing import assert_close

from fxpipe.errors import PolicyError
from fxpipe.policy.optimizers.error_feedback import ErrorFeedback

STEPS = 20
DELAYS = [2, 0, 1, 5]
Kind = Callable[..., Optimizer]


class Own(Optimizer):
    """A heavy ball that fxpipe does not know; its groups say that it has momentum."""

    def __init__(self, params: Any, lr: float, beta1: float = 0.8) -> None:
        super().__init__(params, {"lr": lr, "beta1": beta1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                speed = self.state[parameter].get("speed", 0.0)
                self.state[parameter]["speed"] = speed = group["beta1"] * speed + parameter.grad
                parameter -= group["lr"] * speed


WITH_MOMENTUM: list[Kind] = [
    partial(SGD, momentum=0.9, weight_decay=0.2),
    partial(SGD, momentum=0.9, nesterov=True, foreach=False),
    partial(RMSprop, momentum=0.8),
    partial(AdamW, weight_decay=0.1),
    NAdam,
    Muon,
    Own,
]


def weights(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 2), (4, 4), (5, 1), (2, 3))
    return [torch.randn(s, dtype=torch.float64, generator=generator).to(dtype).requires_grad_() for s in shapes]


def gradient(weight: Tensor, step: int) -> Tensor:
    return torch.cos(weight.detach() * 3 + step)


def train(optimizer: Optimizer, feedback: ErrorFeedback | None) -> None:
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step)
            for parameter in group["params"]:
                parameter.grad = gradient(parameter, step)
        if feedback:
            feedback.before_step()
        optimizer.step()
        if feedback:
            feedback.after_step()


def simulated(kind: Kind, start: Tensor, delay: int) -> Tensor:
    """w ← w − 2·u_t + u_{t−τ}, by the letter, u_t being what this optimizer does to this weight by itself."""
    w = start.detach().clone().requires_grad_()
    optimizer = kind([w], lr=0.1)
    moved: list[Tensor] = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        w.grad = gradient(w, step)
        before = w.detach().clone()
        optimizer.step()
        moved.append(before - w.detach())
        back = moved[step - delay] if step >= delay else torch.zeros_like(before)
        w.data = before - 2 * moved[step] + back
    return w.detach()


@pytest.mark.parametrize("kind", WITH_MOMENTUM)
def test_it_follows_the_formula(kind: Kind) -> None:
    parameters = weights()
    expected = [simulated(kind, w, delay) for w, delay in zip(parameters, DELAYS, strict=True)]
    optimizer = kind(parameters, lr=0.1)
    train(optimizer, ErrorFeedback(optimizer, dict(zip(parameters, DELAYS, strict=True))))
    # Muon makes its steps in bfloat16.
    assert_close([p.detach() for p in parameters], expected, **({"rtol": 0, "atol": 1e-3} if kind is Muon else {}))


def test_without_delay_it_is_plain_bit_for_bit() -> None:
    plain, repaired = weights(torch.float32), weights(torch.float32)
    train(AdamW(plain, lr=0.1), None)
    optimizer = AdamW(repaired, lr=0.1)
    feedback = ErrorFeedback(optimizer, dict.fromkeys(repaired[:2], 0))
    train(optimizer, feedback)
    assert all(torch.equal(a, b) for a, b in zip(plain, repaired, strict=True))
    assert not feedback.state()


def test_it_keeps_a_step_for_each_update_of_delay_and_one_more() -> None:
    parameters = weights()
    optimizer = SGD(parameters, lr=0.1, momentum=0.9)
    feedback = ErrorFeedback(optimizer, dict(zip(parameters, DELAYS, strict=True)))
    train(optimizer, feedback)
    kept = {id(parameter): len(steps) for parameter, _, steps in feedback.state()}
    assert [kept.get(id(p), 0) for p in parameters] == DELAYS
    assert all(late.spare is not None for late in feedback._late)


def test_what_the_optimizer_leaves_alone_is_taken_back_and_stays() -> None:
    used, paused, frozen, _ = weights()
    optimizer = SGD([used, paused], lr=0.1, momentum=0.9)
    feedback = ErrorFeedback(optimizer, {used: 1, paused: 1, frozen: 1})
    start = [p.detach().clone() for p in (used, paused, frozen)]
    used.grad, paused.grad = gradient(used, 0), gradient(paused, 0)
    plain = paused.detach() - 0.1 * paused.grad
    for _ in range(3):
        feedback.before_step()
        optimizer.step()
        feedback.after_step()
        paused.grad = None
    assert not torch.equal(used, start[0])
    assert_close(paused.detach(), plain)
    assert torch.equal(frozen, start[2])
    assert all(parameter is not frozen for parameter, _, _ in feedback.state())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (partial(SGD, lr=0.1), "SGD has none"),
        (RMSprop, "RMSprop has none"),
        (partial(Adam, betas=(0.0, 0.9)), "Adam has none"),
        (Adagrad, "no option of Adagrad says that it has momentum"),
        (partial(Own, lr=0.1, beta1=0.0), "Own has none"),
        (partial(Own, lr=0.1, beta1=None), "no option of Own says that it has momentum"),
    ],
)
def test_without_momentum_it_is_refused(make: Callable[[list[Tensor]], Optimizer], said: str) -> None:
    with pytest.raises(PolicyError, match=said) as caught:
        ErrorFeedback(make(weights()), {})
    assert "+ef" in str(caught.value.hint)


def test_the_group_that_is_refused_is_named() -> None:
    first, second, *_ = weights()
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "momentum": 0.0}]
    with pytest.raises(PolicyError, match="SGD in parameter group 1 has none"):
        ErrorFeedback(SGD(groups, lr=0.1, momentum=0.9), {})


def test_what_was_not_trained_before_has_made_no_steps() -> None:
    """The steps of what was trained are kept, and not taken back because another parameter has none."""
    old, new = weights()[:2]
    before = ErrorFeedback(SGD([old], lr=0.1, momentum=0.9), {old: 2})
    optimizer = SGD([old, new], lr=0.1, momentum=0.9)
    after = ErrorFeedback(optimizer, {old: 2, new: 2})
    old.grad = torch.ones_like(old)
    for _ in range(3):
        before.before_step()
        optimizer.step()
        before.after_step()
    value = old.detach().clone()
    after.load(before.state())
    assert torch.equal(old, value)
    (found, _, steps), (other, _, none) = after.state()
    assert found is old
    assert other is new
    assert len(steps) == 2
    assert not any(step.any() for step in none)
    assert all(map(torch.equal, steps, before.state()[0][2]))
