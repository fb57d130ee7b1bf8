"""The discount of late rates: its formula, and whose rate it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from fxpipe.errors import PolicyError
from fxpipe.policy.optimizers.rate_discount import RateDiscount
from fxpipe.schedule.segments import Segments


def weights(count: int) -> list[Tensor]:
    return [torch.ones(2, requires_grad=True) for _ in range(count)]


def discount_of(late: list[int], single: int = 0, lr: Any = 0.5) -> RateDiscount:
    parameters = weights(len(late))
    optimizer = SGD([{"params": [p]} for p in parameters], lr=lr)
    return RateDiscount(optimizer, dict(zip(parameters, late, strict=True)), 8, Segments(single))


def test_the_formula() -> None:
    discount = discount_of([4, 1, 0, 2])
    assert [discount.factor(0, t) for t in (0, 4, 8, 9)] == pytest.approx([1 / 4, 1 / 2, 1, 1])
    assert [discount.factor(3, t) for t in (0, 6)] == pytest.approx([1 / 2, 2**-0.25])
    assert all(discount.factor(group, t) == 1 for group in (1, 2) for t in range(9))


def test_in_synchronous_steps_there_is_none() -> None:
    discount = discount_of([4], single=3)
    assert [discount.factor(0, t) for t in range(4)] == pytest.approx([1, 1, 1, 4 ** -(5 / 8)])


def test_a_group_has_the_rate_of_its_latest_parameter() -> None:
    first, second, third = weights(3)
    optimizer = SGD([{"params": [first, second]}, {"params": [third]}], lr=0.5)
    discount = RateDiscount(optimizer, {first: 1, second: 3, third: 2}, 8, Segments())
    assert [discount.factor(group, 0) for group in (0, 1)] == pytest.approx([1 / 3, 1 / 2])


@pytest.mark.parametrize("tensor", [False, True])
def test_it_is_there_during_the_update_only(tensor: bool) -> None:
    rate = torch.tensor(0.5) if tensor else 0.5
    discount = discount_of([4], lr=rate)
    group = discount.optimizer.param_groups[0]
    with discount.during(4):
        assert float(group["lr"]) == pytest.approx(0.25)
    assert group["lr"] is rate
    assert float(rate) == 0.5
    assert discount.to_come(0, 4) == pytest.approx([4 ** -(3 / 8), 4 ** -(2 / 8), 4 ** -(1 / 8), 1])
    with pytest.raises(ZeroDivisionError), discount.during(5):
        raise ZeroDivisionError
    assert group["lr"] is rate


def test_what_the_optimizer_sets_itself_stays() -> None:
    discount = discount_of([4])
    group = discount.optimizer.param_groups[0]
    with discount.during(0):
        group["lr"] = 0.1
    assert group["lr"] == 0.1


class Rateless(Optimizer):
    """Its groups have no rate."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


def test_without_a_rate_it_is_refused() -> None:
    with pytest.raises(PolicyError, match="Rateless finds its own learning rate"):
        RateDiscount(Rateless(weights(1)), {}, 8, Segments())
