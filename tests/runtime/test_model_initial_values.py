"""What model() gives its parameters, a worker at a time: the same for every choice of parameters."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import TaskError
from fxpipe.plan.plan import Plan
from fxpipe.runtime.worker.initial_weights import initialised
from fxpipe.task.meta import MetaModel, on_meta


class Rich(nn.Module):
    """Parameters that get their values in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.conv = nn.Conv1d(8, 8, 1)
        self.copied = copy.deepcopy(self.conv)
        self.loaded = nn.Conv1d(8, 8, 1)
        self.loaded.load_state_dict(self.conv.state_dict())
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.scale = nn.Parameter(torch.randn(8) * 0.02)
        self.drawn = nn.Parameter(torch.tensor([random.random() for _ in range(8)]))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.token.weight
        with torch.no_grad():
            self.loaded.bias.mul_(2).add_(self.scale)
            self.conv.bias[0] = 3.0
        for name, parameter in self.named_parameters():
            if name.endswith("in_proj_weight"):
                nn.init.normal_(parameter, std=7.0)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.recurrent(self.layers(self.token(ids)))[0].mT
        x = (self.conv(x) + self.loaded(self.copied(x))).mT * self.scale + self.drawn
        return self.head(self.normed(x))


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def _plan(make: Callable[[], nn.Module], batch: Tensor, loss: Callable[[nn.Module, Tensor], Tensor] = _loss) -> Plan:
    return fxpipe.compile(on_meta(make).model, loss, batch, workers=2).plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Of `Rich`."""
    return _plan(Rich, torch.zeros(2, 3, dtype=torch.int64))


def test_they_are_what_model_makes_them(plan: Plan) -> None:
    made = initialised(plan, plan.parameters, Rich, seed=0)
    usual = Rich()
    for name, value in usual.named_parameters():
        if value.numel() > 40:
            ratio = float(made[name].std() / value.detach().std())
            assert 0.6 < ratio < 1.6, name
        constant = value.detach().eq(value.detach().flatten()[0]).all()
        assert not constant or torch.equal(made[name], value.detach()), name
    assert torch.equal(made["conv.weight"], made["copied.weight"])
    assert torch.equal(made["conv.weight"], made["loaded.weight"])
    assert torch.equal(made["loaded.bias"], made["copied.bias"] * 2 + made["scale"])
    assert made["conv.bias"][0] == 3.0
    first, second = ("layers.layers.0.linear1.weight", "layers.layers.1.linear1.weight")
    assert torch.equal(made[first], made[second]), "torch's own layers are copies of one"
    parametrized = "normed.parametrizations.weight.original"
    assert torch.allclose(made[f"{parametrized}0"], made[f"{parametrized}1"].norm(dim=1, keepdim=True))


def test_only_what_is_needed_has_memory(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[MetaModel] = []

    def watching(*args: Any, **more: Any) -> MetaModel:
        made.append(on_meta(*args, **more))
        return made[-1]

    monkeypatch.setattr("fxpipe.runtime.worker.initial_weights.on_meta", watching)
    rows = {p.name: p for p in plan.parameters}
    initialised(plan, [rows["recurrent.bias_hh_l0"], rows["loaded.bias"]], Rich, seed=0)
    numbers = made[1].numbers()
    real = {name for name, number in numbers.items() if not made[1].births[number].is_meta}
    assert real == {"recurrent.bias_hh_l0", "loaded.bias", "conv.bias", "scale"}, "with those it is made from"
    assert sum(not p.is_meta for p in made[1].births) == len(real)
    assert all(p.is_meta for p in made[0].births)


def test_another_model_than_was_compiled(plan: Plan) -> None:
    def other() -> nn.Module:
        model = Rich()
        model.conv = nn.Conv1d(8, 4, 1)
        del model.scale
        return model

    with pytest.raises(TaskError) as caught:
        initialised(plan, plan.parameters[:1], other, seed=0)
    assert "scale is missing" in str(caught.value)
    assert "conv.weight is torch.float32[4, 8, 1], not torch.float32[8, 8, 1]" in str(caught.value)


def test_a_model_that_looks_at_values() -> None:
    class Looks(nn.Linear):
        calls = 0

        def reset_parameters(self) -> None:
            super().reset_parameters()
            type(self).calls += 1
            if type(self).calls > 2:  # neither when it is compiled, nor when a run first makes it
                float(self.weight.sum())

    plan = _plan(lambda: nn.Sequential(Looks(4, 4), Looks(4, 4)), torch.ones(2, 4), lambda m, b: m(b).mean())
    Looks.calls = 0
    with pytest.raises(TaskError) as caught:
        initialised(plan, plan.parameters[:1], lambda: nn.Sequential(Looks(4, 4), Looks(4, 4)), seed=0)
    assert "only the parameters of one worker have values here" in str(caught.value)
    assert caught.value.where is not None
    assert "float(self.weight.sum())" in caught.value.where
