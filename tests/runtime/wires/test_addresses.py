"""Every message has a tag of its own, whatever the user calls things."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.policy.recipe import choose
from fxpipe.runtime.wires.addresses import NOTES, Addresses


def rebuilding(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Reads the batch, which is one bare tensor, on the last worker, too."""
    return ((model(batch) - batch) ** 2).mean()


def test_an_edge_may_be_called_like_a_kind_of_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NOTES, "batch", ("token", "batch"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    build = fxpipe.compile(model, rebuilding, torch.randn(4, 4), workers=2, cost="analytic", forward_at=["2"])
    plan = build.plan
    assert "batch" in [edge.name for edge in plan.edges]
    addresses = Addresses(plan, choose(plan).demand)
    notes = [addresses.tag_of_note(kind, *pair) for kind in NOTES for pair in product(range(2), repeat=2)]
    tags = [*map(addresses.tag, plan.all_edges), *notes]
    assert len(set(tags)) == len(tags) == len(plan.all_edges) + 4 * len(NOTES)
    assert min(tags) > len(addresses.channels)
