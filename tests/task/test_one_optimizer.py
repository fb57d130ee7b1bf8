"""What optimizer() may not return, and the cures that the refusals name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fxpipe.errors import TaskError
from fxpipe.task.model_file import load_task
from fxpipe.task.one_optimizer import check_one_optimizer

GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"
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
    ("make", "message"),
    [
        (lambda p: [torch.optim.SGD(p[:1]), torch.optim.Adam(p[1:])], r"a list \(SGD, Adam\), not one optimizer"),
        (lambda p: (torch.optim.SGD(p), None), r"a tuple \(SGD, NoneType\), not one"),
        (lambda p: {"a": torch.optim.SGD(p)}, r"a dict \(SGD\), not one"),
        (torch.optim.LBFGS, r"LBFGS\.step\(\) needs a closure"),
    ],
)
def test_it_is_refused(make: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(TaskError, match=message) as caught:
        check_one_optimizer(make(parameters()))
    assert caught.value.hint


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor])
def test_a_closure_that_may_be_left_out_is_no_matter(make: Callable[[Any], Any]) -> None:
    check_one_optimizer(make(parameters()))


def test_a_model_file_is_told_where(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(FILE + "def optimizer(named): return [torch.optim.SGD([p for _, p in named])]\n")
    with pytest.raises(TaskError) as caught:
        load_task(path).optimizer([("a", parameters()[0])])
    assert caught.value.where == "model.py:7, in optimizer"


def test_the_guides_several_optimizers_step_as_they_would_alone() -> None:
    """Learning rates of a scheduler reach both, and so do gradients."""
    code = GUIDE.read_text().split("### Several optimizers")[1].split("```python\n")[1].split("```")[0]
    space: dict[str, Any] = {}
    exec(code, space)
    torch.manual_seed(0)
    matrix, vector = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3))
    own_matrix, own_vector = (nn.Parameter(p.detach().clone()) for p in (matrix, vector))
    both = space["optimizer"]([("matrix", matrix), ("vector", vector)])
    assert isinstance(both, torch.optim.Optimizer)
    check_one_optimizer(both)
    alone = [torch.optim.SGD([own_matrix], lr=0.1, momentum=0.9), torch.optim.AdamW([own_vector], lr=1e-3)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (both, *alone)]
    for _ in range(4):
        matrix.grad = own_matrix.grad = torch.randn(3, 3)
        vector.grad = own_vector.grad = torch.randn(3)
        for optimizer in (both, *alone):
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    assert torch.equal(matrix, own_matrix)
    assert torch.equal(vector, own_vector)
    assert not torch.equal(matrix, torch.zeros(3, 3))
    assert [space["optimizer"]([("vector", vector)]).step()] == [None], "a worker may have parameters of one kind"
