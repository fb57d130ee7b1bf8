"""What hangs on parameters survives as text, or refuses to be used where it cannot."""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpipe.errors import BuildError
from fxpipe.task.one_optimizer import OptimizerRefused
from fxpipe.task.parameter_attributes import MOST_BYTES, attributes_of, hang


class Kind(enum.Enum):
    SLOW = 1


@dataclasses.dataclass
class Wish:
    lr: float
    kind: Kind


class Scaled(nn.Parameter):
    def __new__(cls, data: Tensor, scale: float) -> Scaled:
        return super().__new__(cls, data)  # type: ignore[return-value]

    def __init__(self, data: Tensor, scale: float) -> None:
        super().__init__()  # type: ignore[call-arg]
        self._scale = scale

    @property
    def rate(self) -> float:
        return 0.5 * self._scale

    def group(self) -> dict[str, Any]:
        return {"params": [self], "lr": self.rate}


class Slotted(nn.Parameter):
    __slots__ = ("more",)


def again(parameter: nn.Parameter) -> Any:
    """What a worker makes of it."""
    model = nn.Module()
    model.weight = parameter
    return hang(nn.Parameter(torch.zeros(2)), "weight", attributes_of(model).get("weight", {}))


def with_attribute(value: Any) -> Any:
    parameter = nn.Parameter(torch.ones(2))
    parameter.kept = value  # type: ignore[attr-defined]
    return again(parameter)


@pytest.mark.parametrize(
    "value",
    [None, True, {"lr": 0.01, "betas": (0.9, 0.99)}, [1, "a", b"c"], float("inf"), {1, 2}, torch.float16, Kind.SLOW,
     Wish(0.1, Kind.SLOW), Scaled, len],
    ids=repr,
)  # fmt: skip
def test_values_survive(value: Any) -> None:
    found = with_attribute(value).kept
    assert found == value
    assert type(found) is type(value)


def test_functions_and_tensors_survive() -> None:
    factor = 3
    assert with_attribute(lambda rate: factor * rate).kept(2) == 6
    assert with_attribute({"mask": torch.eye(2)}).kept["mask"].equal(torch.eye(2))


@pytest.mark.parametrize(
    "use",
    [
        bool,
        len,
        float,
        lambda value: value.lr,
        lambda value: value(1),
        lambda value: value == 1,
        lambda value: torch.ones(1) * value,
        lambda value: torch.add(torch.ones(1), value),
        lambda value: isinstance(value, Tensor),
    ],
)
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (threading.Lock, "pickle"),
        (lambda: nn.Linear(1, 1), "module"),
        (lambda: torch.zeros(MOST_BYTES, dtype=torch.int8), "bytes"),
        (lambda: torch.zeros(1, device="meta"), "without values"),
    ],
)
def test_what_cannot_travel_refuses_to_be_used(make: Callable[[], Any], why: str, use: Callable[[Any], Any]) -> None:
    parameter = with_attribute(make())
    assert hasattr(parameter, "kept")
    with pytest.raises(OptimizerRefused, match=f"kept of parameter weight, .*{why}"):
        use(parameter.kept)


def test_a_tensor_of_the_model_does_not_travel() -> None:
    model = nn.Linear(2, 2)
    model.weight.partner = {"of": model.bias.detach()}  # type: ignore[assignment]
    found: Any = hang(nn.Parameter(torch.zeros(2)), "weight", attributes_of(model).get("weight", {}))
    with pytest.raises(OptimizerRefused, match="partner of parameter weight"):
        found.partner["of"]


def test_a_class_survives_with_its_properties_and_methods() -> None:
    found = again(Scaled(torch.ones(2), 0.5))
    assert type(found) is Scaled
    assert found.group() == {"params": [found], "lr": 0.25}
    assert found.equal(torch.zeros(2))


def test_a_class_in_a_function_survives() -> None:
    class Hidden(nn.Parameter):
        rate = 0.1

    assert type(again(Hidden(torch.ones(2)))) is Hidden


def test_a_class_with_slots_is_refused() -> None:
    with pytest.raises(BuildError, match="class of parameter weight"):
        again(Slotted(torch.ones(2)))


def test_frozen_parameters_and_those_without_anything_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[0].weight.kind = "slow"
    model[1].weight.kind = "slow"
    model[1].weight.requires_grad_(False)
    assert attributes_of(model) == {"0.weight": {"kind": "'slow'"}}
