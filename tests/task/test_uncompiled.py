"""What torch.compile returns is trained as the module that it was given, under that one's names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.task import uncompiled as of_file


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 2)))


def wrapped(way: str) -> nn.Module:
    model = made()
    if way != "whole":
        model[1] = torch.compile(model[1])
    return model if way == "part" else torch.compile(model)  # type: ignore[return-value]


def loss(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().mean()


@pytest.mark.parametrize("way", ["whole", "part", "both"])
def test_weights_have_their_plain_names(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    of_file._say.cache_clear()
    build = fxpipe.compile(wrapped(way), loss, (torch.randn(4, 4),), workers=2, microbatches=1, cost="analytic")
    plain = made().state_dict()
    assert {p.name for p in build.plan.parameters} == set(plain)
    assert all(torch.equal(build.tensors[name], value) for name, value in plain.items())
    assert "torch.compile's wrapper is left out of" in capsys.readouterr().err


def test_a_plain_model_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    model = made()
    assert of_file.uncompiled(model) is model
    assert not capsys.readouterr().err
