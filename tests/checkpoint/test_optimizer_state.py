"""The state of an optimizer that was read goes where the optimizer keeps it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxpipe.checkpoint.optimizer_state import load_optimizer_state, optimizer_state


@pytest.mark.parametrize(("fused", "step"), [(False, "cpu"), (True, "meta")])
def test_state_of_parameters_on_a_device(fused: bool, step: str) -> None:
    """It stayed in the CPU's memory, where it was read into. Here meta is the device."""
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    before = torch.optim.AdamW([weight])
    before.step()
    found = optimizer_state(before, {id(weight): "weight"})
    found["groups"][0]["options"]["fused"] = fused
    placed = nn.Parameter(torch.ones(3, device="meta"))
    after = torch.optim.AdamW([placed])
    load_optimizer_state(after, [found], {id(placed): "weight"})
    state = after.state[placed]
    assert {name: value.device.type for name, value in state.items()} == {
        "step": step,
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }
