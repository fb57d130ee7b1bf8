"""What a checkpoint holds of weights of versions before, and of copies that are sent as differences."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from resumed_net import Net, batches, loss
from torch import nn
from torch.optim import SGD

import fxpipe


def test_weights_of_versions_before_keep_their_layout(tmp_path: Path) -> None:
    """Convolutions choose by the layout of their weights how they add up."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(5)), nn.Flatten(), nn.Linear(256, 3))
    model.to(memory_format=torch.channels_last)
    draw = torch.Generator().manual_seed(1)
    data = [(torch.randn(2, 4, 8, 8, generator=draw), torch.tensor([0, 2])) for _ in range(10)]
    build = fxpipe.compile(model, loss, data[0], workers=4, microbatches=1, cost="analytic")
    whole = build.local(policy="latest", checkpoint_every="5", out=tmp_path)
    losses = whole.run(data)
    whole.checkpoints.finish()
    again = build.local(resume=tmp_path / "checkpoints" / "step-5")
    ((first, *_), *_) = again._rows.rows.shards
    assert any(not value.is_contiguous() for weights in first.past.values() for value in weights.values())
    assert again.run(data[5:]) == losses[5:]
    found, wanted = again.state_dict(), whole.state_dict()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_other_cuts_begin_with_whole_weight_copies(tmp_path: Path) -> None:
    def built(forward: tuple[str, ...], backward: tuple[str, ...]) -> fxpipe.Build:
        torch.manual_seed(0)
        options = {"workers": len(forward) + 1, "microbatches": 1, "cost": "analytic"}
        return fxpipe.compile(Net(0.1), loss, batches(1)[0], forward_at=forward, backward_at=backward, **options)

    first = built(("layers.1", "layers.3", "leave"), ("layers.0", "layers.2", "layers.4"))
    plain = built(("layers.3",), ("layers.1",))
    first, second = (
        dataclasses.replace(build, plan=dataclasses.replace(build.plan, weights_codec="int8"))
        for build in (first, plain)
    )
    given = {"optimizer": lambda named: SGD([p for _, p in named], lr=0.05, momentum=0.9), "policy": "latest"}
    whole = first.local(**given, checkpoint_every="10", out=tmp_path)
    whole.run(batches(26))
    whole.checkpoints.finish()
    path = tmp_path / "checkpoints" / "step-10"
    runs = [build.local(**given, resume=path).run(batches(26)[10:]) for build in (second, plain)]
    assert runs[0] != runs[1]
    assert runs[0] == pytest.approx(runs[1], rel=0.05)
