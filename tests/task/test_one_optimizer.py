"""What optimizer() may return, and what not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpipe.errors import TaskError
from fxpipe.task.model_file import load_task
from fxpipe.task.one_optimizer import one_optimizer
from fxpipe.task.several_optimizers import SeveralOptimizers

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "optimizers.md"
FILE = """
import torch
from torch import nn
def model(): return nn.Linear(2, 2)
def loss(model, batch): return model(batch).sum()
def train_data(): return [torch.ones(1, 2)]
"""


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]


@pytest.mark.parametrize(
    ("make", "message", "hint"),
    [
        (lambda p: (torch.optim.SGD(p), None), r"NoneType in a tuple, not a torch", "a list of optimizers"),
        (lambda p: ([torch.optim.SGD(p)], []), r"list \(SGD\) in a tuple, not", "a list of optimizers"),
        (lambda p: {"a": torch.optim.SGD(p)}, r"returned dict \(SGD\), not", "a list of optimizers"),
        (torch.optim.LBFGS, r"LBFGS\.step\(\) needs a closure", "whose step() needs no arguments"),
        (lambda p: [torch.optim.LBFGS(p)], r"LBFGS\.step\(\) needs a closure", "whose step() needs no arguments"),
        (
            lambda p: [torch.optim.SGD(p), torch.optim.Adam(p[1:])],
            r"in more than one .* \(SGD, Adam\)",
            "to one of them",
        ),
    ],
)
def test_it_is_refused(make: Callable[[Any], Any], message: str, hint: str) -> None:
    with pytest.raises(TaskError, match=message) as caught:
        one_optimizer(make(parameters()))
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor])
def test_a_closure_that_may_be_left_out_is_no_matter(make: Callable[[Any], Any]) -> None:
    made = make(parameters())
    assert one_optimizer(made) is made


def test_a_model_file_is_told_where(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(FILE + "def optimizer(named): return [torch.optim.SGD([p for _, p in named]), None]\n")
    with pytest.raises(TaskError) as caught:
        load_task(path).optimizer([("a", parameters()[0])])
    assert caught.value.where == "model.py:7, in optimizer"


def guides() -> Callable[[Any], Any]:
    code = GUIDE.read_text().split("## Several optimizers")[1].split("```python\n")[1].split("```")[0]
    space: dict[str, Any] = {}
    exec(code, space)
    made: Callable[[Any], Any] = space["optimizer"]
    return made


def gradients(*given: Tensor) -> None:
    for parameter in given:
        parameter.grad = torch.randn(parameter.shape)


def test_the_guides_several_optimizers_step_as_they_would_alone() -> None:
    """Learning rates of a scheduler reach both, and so do gradients; the state is that of both."""
    torch.manual_seed(0)
    matrix, vector = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3))
    own_matrix, own_vector = (nn.Parameter(p.detach().clone()) for p in (matrix, vector))
    both = one_optimizer(guides()([("matrix", matrix), ("vector", vector)]))
    assert isinstance(both, SeveralOptimizers)
    alone = [type(o)(**_groups_of(o, p)) for o, p in zip(both.optimizers, (own_matrix, own_vector), strict=True)]
    assert [type(o) for o in alone] == [torch.optim.Muon, torch.optim.AdamW]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (both, *alone)]
    for _ in range(4):
        gradients(matrix, vector)
        own_matrix.grad, own_vector.grad = matrix.grad, vector.grad
        for optimizer in (both, *alone):
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    assert torch.equal(matrix, own_matrix)
    assert torch.equal(vector, own_vector)
    assert both.state[vector].keys() == alone[1].state[own_vector].keys()
    assert set(both.state) == {matrix, vector}
    both.zero_grad()
    assert matrix.grad is vector.grad is None


def _groups_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    group = optimizer.param_groups[0]
    return {"params": [parameter], **{k: v for k, v in group.items() if k in ("lr", "weight_decay", "momentum")}}


def test_a_worker_may_have_parameters_of_one_kind_or_none() -> None:
    vector = nn.Parameter(torch.randn(3))
    [part] = one_optimizer(guides()([("vector", vector)])).optimizers  # type: ignore[attr-defined]
    assert type(part) is torch.optim.AdamW
    with pytest.raises(ValueError, match="empty parameter list"):
        one_optimizer(guides()([]))


def test_a_scheduler_may_change_what_all_have() -> None:
    p = parameters()
    both = one_optimizer([torch.optim.AdamW(p[:1]), torch.optim.NAdam(p[1:])])
    torch.optim.lr_scheduler.OneCycleLR(both, max_lr=0.1, total_steps=5)
    assert [group["betas"][0] for group in both.param_groups] == [0.95, 0.95]
    mixed = one_optimizer([torch.optim.AdamW(p[:1]), torch.optim.SGD(p[1:], momentum=0.9)])
    with pytest.raises(ValueError, match="momentum"):
        torch.optim.lr_scheduler.OneCycleLR(mixed, max_lr=0.1, total_steps=5)
