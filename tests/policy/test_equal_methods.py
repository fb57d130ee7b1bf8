"""What docs/reference/methods.md calls equal to a policy with an optimizer is equal: by the letter, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.optim import SGD
from torch.testing import assert_close

STEPS, RATE, GAMMA = 12, 0.05, 0.9


def start() -> Tensor:
    return torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def gradient(w: Tensor, step: int) -> Tensor:
    return torch.cos(3 * w + step)


def stash_with_nesterov(delay: int) -> list[Tensor]:
    """The weights of each version: both passes read those of `delay` updates before."""
    w = start().requires_grad_()
    optimizer = SGD([w], lr=RATE, momentum=GAMMA, nesterov=True)
    seen = [w.detach().clone()]
    for step in range(STEPS):
        w.grad = gradient(seen[max(0, step - delay)], step)
        optimizer.step()
        seen.append(w.detach().clone())
    return seen


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_dana_with_one_writer_is_stash_with_nesterov(delay: int) -> None:
    """DANA: v ← γv + g, θ ← θ − ηv, and the server sends θ − ηγ·(the sum of all workers' v), of which there is one."""
    theta, v = start(), torch.zeros(6, dtype=torch.float64)
    sent = [theta]
    for step in range(STEPS):
        v = GAMMA * v + gradient(sent[max(0, step - delay)], step)
        theta = theta - RATE * v
        sent.append(theta - RATE * GAMMA * v)
    assert_close(sent, stash_with_nesterov(delay), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_smega2_with_a_cycle_of_one_is_stash_with_nesterov(delay: int) -> None:
    """SMEGA2: θ ← θ − η(g + γm), G ← G + g; every c updates m ← γm + G/c; it sends θ − ηγ·((c + n(γ−1))m + (n/c)G)."""
    theta, m, total, cycle = start(), torch.zeros(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64), 1
    sent = [theta]
    for step in range(STEPS):
        g = gradient(sent[max(0, step - delay)], step)
        theta, total, n = theta - RATE * (g + GAMMA * m), total + g, (step + 1) % cycle
        if n == 0:
            m, total = GAMMA * m + total / cycle, torch.zeros_like(total)
        sent.append(theta - RATE * GAMMA * ((cycle + n * (GAMMA - 1)) * m + (n / cycle) * total))
    assert_close(sent, stash_with_nesterov(delay), rtol=1e-9, atol=1e-12)
