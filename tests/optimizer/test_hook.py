"""What the user's optimizer hook gives, and what no run can use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fxpipe.errors import TaskError
from fxpipe.optimizer.hook import hold_still, make_optimizer, shrunk, users
from fxpipe.task.one_optimizer import OptimizerRefused


def named() -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(torch.ones(2))) for name in ("base.weight", "lora.weight")]


def only(text: str, **options: Any) -> Any:
    return lambda given: torch.optim.AdamW([p for n, p in given if text in n], **options)


def test_an_optimizer_may_choose_some_of_its_parameters_or_none() -> None:
    given = named()
    made = make_optimizer(only("lora"), given)
    assert made is not None
    assert [group["params"] for group in made.param_groups] == [[given[1][1]]]
    assert make_optimizer(only("head"), given) is None
    assert make_optimizer(lambda _: torch.optim.SGD([{"params": []}, {"params": []}], lr=0.1), given) is None


def test_none_is_seen_below_the_error_of_a_model_file() -> None:
    def wrapped(given: Any) -> torch.optim.Optimizer:
        try:
            return torch.optim.SGD([], lr=0.1)
        except ValueError as error:
            raise TaskError(f"optimizer() raised {error}") from error

    assert make_optimizer(wrapped, named()) is None

    def broken(given: Any) -> torch.optim.Optimizer:
        raise ValueError("no such name")

    with pytest.raises(ValueError, match="no such name"):
        make_optimizer(broken, named())


def test_a_list_becomes_one_that_steps_them_all() -> None:
    given = named()
    made = make_optimizer(lambda given: [torch.optim.SGD([p], lr=0.1) for _, p in given], given)
    assert made is not None
    assert [group["params"] for group in made.param_groups] == [[p] for _, p in given]
    assert make_optimizer(lambda _: [], given) is None


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_an_optimizer_that_hooks_into_gradients_is_refused(register: str) -> None:
    def hooked(given: Any) -> torch.optim.Optimizer:
        getattr(given[1][1], register)(lambda _: None)
        return torch.optim.SGD([p for _, p in given], lr=0.1)

    with pytest.raises(OptimizerRefused, match=r"puts a hook on the gradient of lora\.weight"):
        make_optimizer(hooked, named())
    already = named()
    getattr(already[0][1], register)(lambda _: None)
    assert make_optimizer(only("weight"), already) is not None


def test_a_rate_in_a_tensor_is_each_optimizers_own() -> None:
    rate = torch.tensor(0.1)
    make = only("weight", lr=rate, foreach=False)
    one, other = make_optimizer(make, named()), make_optimizer(make, named())
    assert one is not None
    assert other is not None
    one.param_groups[0]["lr"].fill_(0.5)
    assert (float(rate), float(other.param_groups[0]["lr"])) == pytest.approx((0.1, 0.1))


@pytest.mark.parametrize("rate", [None, 0.5, torch.tensor(0.5)])
def test_an_optimizer_is_held_still(rate: Any) -> None:
    made = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    made.param_groups[0]["lr"] = rate
    made.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    del made.param_groups[1]["lr"]
    hold_still(made)
    expected = None if rate is None else pytest.approx(0.5e-6)
    assert made.param_groups[0]["lr"] == expected
    assert "lr" not in made.param_groups[1]


def test_a_shape_shrinks_but_keeps_its_dimensions() -> None:
    assert shrunk((4096, 16, 3), 64) == (4, 4, 3)
    assert shrunk((3, 2), 64) == (3, 2)
    assert shrunk((), 1) == ()
    assert shrunk((0, 5), 0.1) == (0, 5)


def test_errors_on_copies_are_the_users() -> None:
    with pytest.raises(TaskError, match="fails on small copies of the model's parameters: ValueError: odd"), users():
        raise ValueError("odd")
    with pytest.raises(OptimizerRefused, match="needs a closure: RuntimeError: SAM requires closure"), users():
        raise RuntimeError("SAM requires closure")
    with (
        pytest.raises(OptimizerRefused, match="communicates with other processes: ValueError: Default process group"),
        users(),
    ):
        torch.distributed.all_reduce(torch.ones(1))
    with pytest.raises(OptimizerRefused, match="as it is"), users():
        raise OptimizerRefused("as it is")
