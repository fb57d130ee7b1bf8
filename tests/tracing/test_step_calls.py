"""What Python draws, counts or reads from the clock in the step is found by calling it twice; what repeats passes."""

from __future__ import annotations

import functools
import itertools
import random
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.errors import CaptureError
from fxpipe.tracing import origin
from fxpipe.tracing.lasting_state import RUNS

WIDTH = 8
OWN, GENERATOR, COUNT = random.Random(1), np.random.default_rng(1), itertools.count(1)
LEFT_OUT = itertools.count(1)
CONSTANT = torch.linspace(0, 1, WIDTH)


class Net(nn.Module):
    def __init__(self, change: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.change, self.last = nn.Linear(WIDTH, WIDTH), change, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.change(self, self.first(x)))


def capture(change: Callable[..., Tensor]) -> fxpipe.ir.program.Program:
    torch.manual_seed(0)
    batch = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    return fxpipe.capture(Net(change), lambda model, b: F.mse_loss(model(b[0]), b[1]), batch)


def layer_drop(net: nn.Module, x: Tensor) -> Tensor:
    for i in range(24):
        if random.random() < 0.5:
            x = torch.tanh(x) + i
    return x


def left_out(net: nn.Module, x: Tensor) -> Tensor:
    if next(LEFT_OUT) % 2:
        x = torch.tanh(x)
    return x


def shuffled(net: nn.Module, x: Tensor) -> Tensor:
    for i in random.sample(range(16), 16):
        x = torch.tanh(x) + i
    return x


def other_weights(net: nn.Module, x: Tensor) -> Tensor:
    for _ in range(24):
        x = x @ OWN.choice([net.first.weight, net.last.weight])
    return x


def other_values(net: nn.Module, x: Tensor) -> Tensor:
    a, b = x * 2, x * 3
    for _ in range(24):
        x = x + OWN.choice([a, b])
    return x


CHANGING = {
    "left_out": left_out,
    "random": lambda net, x: x * random.random(),
    "random_own": lambda net, x: x * OWN.random(),
    "system": lambda net, x: x * random.SystemRandom().random(),
    "numpy": lambda net, x: x * np.random.rand(),
    "numpy_own": lambda net, x: x * GENERATOR.random(),
    "numpy_fresh": lambda net, x: x * np.random.default_rng().random(),
    "array": lambda net, x: x * torch.from_numpy(GENERATOR.random(WIDTH).astype(np.float32)),
    "tensor": lambda net, x: x * torch.tensor(OWN.random()),
    "old_tensor": lambda net, x: x * torch.Tensor([OWN.random()]),
    "slice": lambda net, x: x[:, : 1 + next(COUNT)].sum(1, keepdim=True) + x,
    "clock": lambda net, x: x * time.perf_counter_ns(),
    "uuid": lambda net, x: x * (uuid.uuid4().int >> 70),
    "count": lambda net, x: x * next(COUNT),
    "layer_drop": layer_drop,
    "shuffled": shuffled,
    "weights": other_weights,
    "values": other_values,
}


@pytest.mark.parametrize("change", CHANGING.values(), ids=CHANGING)
def test_what_changes_from_call_to_call_is_refused(change: Callable[..., Tensor]) -> None:
    with pytest.raises(CaptureError, match="the step is not the same twice") as caught:
        capture(change)
    assert caught.value.page == "randomness"
    file, line = (caught.value.where or "").split(":")[:2]
    assert Path(file).name == Path(__file__).name
    first = change.__code__.co_firstlineno
    assert first <= int(line) <= max(number for *_, number in change.__code__.co_lines() if number)


def test_the_message_shows_the_numbers() -> None:
    numbers = itertools.count(5)
    with pytest.raises(CaptureError, match=r"\(mul with 6, then with 7\)") as caught:
        capture(lambda net, x: x * next(numbers))
    assert "draw with torch" in (caught.value.hint or "")


def lazily(net: nn.Module, x: Tensor) -> Tensor:
    if not hasattr(net, "mask"):
        net.mask = torch.ones(WIDTH, WIDTH).tril()
    return x @ net.mask


@functools.lru_cache
def filled(width: int) -> Tensor:
    return torch.linspace(0, 1, width)


filled(WIDTH)
TABLE: dict[str, Any] = {}


def table(net: nn.Module, x: Tensor) -> Tensor:
    if "array" not in TABLE:
        TABLE["array"] = np.linspace(0, 1, WIDTH, dtype=np.float32)
    return x * torch.from_numpy(TABLE["array"])


SEEN: list[bool] = []


def looks_once(net: nn.Module, x: Tensor) -> Tensor:
    """What only the first call does is nothing that capture freezes."""
    if not SEEN:
        SEEN.append(True)
        torch.zeros(3).sum()
    return x


def drawn_with_torch(net: nn.Module, x: Tensor) -> Tensor:
    return F.dropout(torch.where(torch.rand(WIDTH) < 0.5, x, x.exp().log()), 0.1)


STEADY = {
    "lazily": lazily,
    "lru_cache": lambda net, x: x * filled(WIDTH),
    "table": table,
    "looks_once": looks_once,
    "constant": lambda net, x: x * CONSTANT + torch.tensor([1.0] * 100).sum(),
    "not_a_number": lambda net, x: x.masked_fill(x > 1e9, float("nan")) + torch.tensor(float("nan")).nan_to_num(),
    "assigned": lambda net, x: x.clone().index_fill_(0, torch.tensor([1]), 0.5),
    "mapped": lambda net, x: torch.vmap(lambda row: row * 2 + CONSTANT)(x),
    "compiled": lambda net, x: torch.compile(lambda v: v * 2)(x),
    "torch": drawn_with_torch,
}


@pytest.mark.parametrize("change", STEADY.values(), ids=STEADY)
def test_what_repeats_is_no_false_alarm(change: Callable[..., Tensor]) -> None:
    assert capture(change).warnings == ()


def test_drawn_but_without_effect_is_a_warning() -> None:
    def change(net: nn.Module, x: Tensor) -> Tensor:
        return x if random.random() < 2 else -x

    (warning,) = capture(change).warnings
    assert "draws random numbers from Python or numpy" in warning


def test_tracing_calls_the_step_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    watches: list[origin.TracedStep] = []
    make = origin.TracedStep

    def watch() -> origin.TracedStep:
        watches.append(make())
        return watches[-1]

    monkeypatch.setattr(origin, "TracedStep", watch)
    capture(lambda net, x: x)
    assert [w.calls.runs for w in watches] == [2, RUNS + 1], "and more often for what changes later"


def test_a_difference_comes_before_what_it_causes() -> None:
    def change(net: nn.Module, x: Tensor) -> Tensor:
        return x.reshape(6 * WIDTH)[next(COUNT) :].reshape(-1, 2, 24)

    with pytest.raises(CaptureError):
        capture(change)
