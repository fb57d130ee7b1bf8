"""A model is in eval mode for a while; one whose weights that changes is refused, and is as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.errors import CaptureError
from fxpipe.tracing.evaluation import eval_mode


class Merging(nn.Linear):
    """A low-rank adapter that is merged into the weight in eval mode."""

    def __init__(self, rebinds: bool) -> None:
        super().__init__(6, 6)
        self.weight.requires_grad_(False)
        self.left, self.right = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.randn(2, 6))
        self.merged, self.rebinds = False, rebinds

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if mode == self.merged:
            change = (self.left @ self.right).detach() * (-1 if mode else 1)
            if self.rebinds:
                self.weight.data = self.weight.data + change
            else:
                self.weight.data += change
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y if self.merged else y + F.linear(x, self.left @ self.right)


def test_every_submodule_comes_back_in_its_own_mode() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3).eval(), nn.Dropout(0.5))
    with eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, False, True]


@pytest.mark.parametrize("rebinds", [False, True])
def test_a_model_that_merges_weights_is_refused_and_unchanged(rebinds: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Merging(rebinds), nn.Tanh(), nn.Linear(6, 5))
    layer: Any = model[0]
    memory, before = layer.weight.data_ptr(), {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(CaptureError, match=r"eval\(\) changes 0\.weight"), eval_mode(model):
        pass
    assert layer.training
    assert not layer.merged
    assert layer.weight.data_ptr() == memory
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_build_of_such_a_model_trains_the_unmerged_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Merging(False), nn.Tanh(), nn.Linear(6, 5))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    batch = torch.randn(4, 6), torch.randint(0, 5, (4,))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": loss(model, batch)}

    build = fxpipe.compile(model, loss, batch, workers=2, cost="analytic", evaluation=(metrics, [batch]))
    assert "eval() changes 0.weight" in build.plan.not_evaluated
    assert all(torch.equal(build.tensors[name], value) for name, value in before.items())
