"""What torch.compile returns is trained as the module that it was given, under that one's names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.lowering.compare_with_eager import compare_with_eager
from fxpipe.task import step_hooks


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
    step_hooks._say.cache_clear()
    build = fxpipe.compile(wrapped(way), loss, (torch.randn(4, 4),), workers=2, microbatches=1, cost="analytic")
    plain = made().state_dict()
    assert {p.name for p in build.plan.parameters} == set(plain)
    assert all(torch.equal(build.tensors[name], value) for name, value in plain.items())
    assert "torch.compile's wrapper is left out of" in capsys.readouterr().err


def test_what_must_compile_as_a_whole_is_plain_code() -> None:
    """Under the modes of the comparison with eager PyTorch, torch compiles nothing, and fullgraph=True was an error."""
    model = made()
    model[1].compile(fullgraph=True, dynamic=True)
    scaled = torch.compile(lambda y: y.square().mean(), fullgraph=True, mode="max-autotune")

    @torch.compile(fullgraph=True)
    def compiled_loss(model: nn.Module, batch: Any) -> Tensor:
        return scaled(model(batch[0]))

    batch = (torch.randn(4, 4),)
    build = fxpipe.compile(model, compiled_loss, batch, workers=2, microbatches=2, schedule="1f1b", cost="analytic")
    assert compare_with_eager(build, model, compiled_loss, batch).largest < 1e-6
    assert compare_with_eager(build, made(), loss, batch).largest < 1e-6


def test_a_plain_model_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    model = made()
    assert step_hooks.uncompiled(model) is model
    assert not capsys.readouterr().err
