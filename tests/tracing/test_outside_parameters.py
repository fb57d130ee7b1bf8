"""Parameters that are not the model's: refused where the loss has a gradient for them, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.errors import CaptureError

WIDTH = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, WIDTH), torch.randn(4, WIDTH)


SCALE = nn.Parameter(torch.ones(()))
DOUBLED = SCALE * 2


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(x / self.temperature, y)


CRITERION, TEACHER = Criterion(), nn.Linear(WIDTH, WIDTH)


@pytest.mark.parametrize(
    ("outside", "name"),
    [
        (lambda model, b: F.mse_loss(model(b[0]) * SCALE.exp(), b[1]), "SCALE"),
        (lambda model, b: F.mse_loss(model(b[0]) * DOUBLED, b[1]), "DOUBLED"),
        (lambda model, b: CRITERION(model(b[0]), b[1]), r"CRITERION\.temperature"),
        (lambda model, b: F.mse_loss(model(b[0]), TEACHER(b[0])), r"TEACHER\.(weight|bias)"),
    ],
    ids=["global", "made_of_it", "criterion", "teacher"],
)
def test_a_parameter_from_outside_is_refused(outside: Callable[..., Tensor], name: str) -> None:
    with pytest.raises(CaptureError, match=f"{name} requires a gradient of the loss") as caught:
        fxpipe.capture(Net(), outside, data())
    assert caught.value.page == "outside-parameters"
    assert "test_outside_parameters.py" in str(caught.value.where)


def no_gradient(model: nn.Module, batch: Any) -> Tensor:
    with torch.no_grad():
        wanted = TEACHER(batch[0])
    return F.mse_loss(model(batch[0]), wanted + SCALE.detach())


@pytest.mark.parametrize(
    "outside",
    [no_gradient, lambda model, b: F.mse_loss(model(b[0]), TEACHER(b[0]).detach())],
    ids=["no_grad", "detach"],
)
def test_a_teacher_without_gradient_is_no_alarm(outside: Callable[..., Tensor]) -> None:
    assert fxpipe.capture(Net(), outside, data()).warnings == ()


class Unregistered(nn.Module):
    """Modules and parameters in plain lists are not the model's, and no optimizer gets them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.plain: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for part in self.plain:
            x = part(x) if isinstance(part, nn.Module) else x * part
        return x


def test_what_no_module_registers_is_told() -> None:
    model = Unregistered()
    model.plain.append(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(CaptureError, match=r"plain\[0\]\.(weight|bias) requires a gradient") as caught:
        fxpipe.capture(model, loss, data())
    assert "nn.ModuleList" in str(caught.value.hint)
    model.plain[:] = [nn.Parameter(torch.ones(WIDTH))]
    (warning,) = fxpipe.capture(model, loss, data()).warnings
    assert warning == "plain.0 is a parameter that no module registers: it keeps its value"
