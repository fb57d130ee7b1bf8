"""Python state that a step changes: refused where later steps need it, told where not, silent where it is none."""

from __future__ import annotations

import functools
import io
import logging
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stateful_steps import COUNTER, LOG, REFUSED, TABLE, WIDTH, Net, data, loss, shared_bank, state
from torch import Tensor, nn
from tqdm import tqdm

import fxpipe
from fxpipe.errors import CaptureError
from fxpipe.lowering.compare_with_eager import compare_with_eager

LOGGER = logging.getLogger(__name__)


def refused(net: Net) -> CaptureError:
    before = state()
    with pytest.raises(CaptureError, match="so its later calls compute something else") as caught:
        fxpipe.capture(net, loss, data())
    assert state() == before, "capture leaves no trace"
    assert caught.value.page == "python-state"
    assert caught.value.hint
    assert str(caught.value.where).split(":")[0].endswith("stateful_steps.py")
    return caught.value


@pytest.mark.parametrize(("change", "name"), REFUSED.values(), ids=REFUSED)
def test_state_that_later_steps_need_is_refused(change: Callable[[Net, Tensor], Tensor], name: str) -> None:
    error = refused(Net(change, [torch.zeros(WIDTH) for _ in range(4)]))
    assert re.match(f"the step changes {name}[\\[ ,]", error.what), error.what


def test_microbatches_are_not_blamed_for_state() -> None:
    with pytest.raises(CaptureError, match=r"^the step changes calls \("):
        fxpipe.compile(Net(REFUSED["attribute"][0]), loss, data(), workers=2, microbatches=2, cost="analytic")


def test_a_bank_whose_rows_are_one_tensor_is_refused() -> None:
    refused(Net(shared_bank, [torch.zeros(WIDTH)] * 4))


def logged(net: Net, x: Tensor) -> Tensor:
    LOG.note(x)
    return x


def logged_at_times(net: Net, x: Tensor) -> Tensor:
    """Torch calls that no result depends on, and a number that capture could not read."""
    net.calls += 1
    if net.calls % 2 == 0:
        LOGGER.info("%s", x.detach().square().mean())
    if net.calls > 2:
        LOGGER.info("%s", x.mean().item())
    return x


def counted(net: Net, x: Tensor) -> Tensor:
    COUNTER["steps"] += 1
    return x


def around_the_clock(net: Net, x: Tensor) -> Tensor:
    net.calls = (net.calls + 1) % 4
    return x


BAR = tqdm(total=1000, mininterval=1e9, file=io.StringIO())


def with_a_bar(net: Net, x: Tensor) -> Tensor:
    BAR.update(1)
    return x


TOLD = {
    "logged": (logged, "LOG.own (0 → 1), LOG.losses (0 → 1 elements)"),
    "logged_at_times": (logged_at_times, "calls (0 → 1)"),
    "counted": (counted, "COUNTER (0 → 1 elements)"),
    "around_the_clock": (around_the_clock, "calls (0 → 1)"),
    "with_a_bar": (with_a_bar, "BAR.n (0 → 1)"),
}


@pytest.mark.parametrize(("change", "names"), TOLD.values(), ids=TOLD)
def test_state_that_no_step_needs_is_told(change: Callable[[Net, Tensor], Tensor], names: str) -> None:
    before = state()
    (warning,) = fxpipe.capture(Net(change), loss, data()).warnings
    assert warning.startswith(f"the step changes {names}: every step of a run sees the value from before capture")
    assert state() == before, "capture leaves no trace"


def test_clocks_go_ahead_for_the_step_and_not_for_other_threads(tmp_path: Path) -> None:
    """While a run makes stages for a new shape, another thread may end a process whose store was silent too long."""

    def noted(file: Path) -> None:
        with file.open("a") as opened:
            opened.write(f"{time.monotonic()}\n")

    def latest(file: Path) -> float:
        return max(map(float, file.read_text().split()))

    def reads_clocks(net: Net, x: Tensor) -> Tensor:
        other = threading.Thread(target=noted, args=[tmp_path / "other"])
        other.start()
        other.join()
        noted(tmp_path / "own")
        return counted(net, x)  # state that changes: so the step is called again

    fxpipe.capture(Net(reads_clocks), loss, data())
    assert latest(tmp_path / "own") > time.monotonic() + 3600
    assert latest(tmp_path / "other") <= time.monotonic()


def same_call(net: Net, x: Tensor) -> Tensor:
    net.hidden = x
    net.made = x * 2
    LOG.state = x
    return net.hidden * net.made + LOG.state


def positions(net: Net, x: Tensor) -> Tensor:
    """A cache in a global dictionary, filled as everybody fills it."""
    if len(x) not in TABLE:
        table = torch.zeros(len(x), WIDTH)
        place = torch.arange(len(x))[:, None] / torch.linspace(1, 9, WIDTH // 2)
        table[:, 0::2] = torch.sin(place)
        table[:, 1::2].copy_(torch.cos(place))
        TABLE[len(x)] = table
    return x + TABLE[len(x)]


def kept_bank(net: Net, x: Tensor) -> Tensor:
    """Rows of their own: the pipeline keeps them."""
    net.bank.append(x.detach().mean(0))
    net.bank.pop(0)
    return x + torch.stack(net.bank).sum(0)


def recorded(net: Net, x: Tensor) -> Tensor:
    TABLE["seen"] = x
    LOGGER.info("%s", x.shape)
    return x + TABLE["seen"].mean()


SILENT = {"same_call": same_call, "positions": positions, "kept_bank": kept_bank, "recorded": recorded}


@pytest.mark.parametrize("change", SILENT.values(), ids=SILENT)
def test_what_is_no_state_is_no_alarm(change: Callable[[Net, Tensor], Tensor]) -> None:
    model = Net(change, [torch.randn(WIDTH) for _ in range(4)])
    before = state()
    build = fxpipe.compile(model, loss, data(), workers=2, cost="analytic")
    assert state() == before, "capture leaves no trace"
    assert fxpipe.capture(model, loss, data()).warnings == ()
    assert compare_with_eager(build, model, loss, data()).largest < 1e-6
    assert state() == before, "a comparison leaves no trace"


class Trainer:
    """The step is a method."""

    def __init__(self) -> None:
        self.steps = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.steps += 1
        return loss(model, batch) * (1 if self.steps < 400 else 2)

    __call__ = loss


def with_a_state(model: nn.Module, batch: Any, kept: dict[str, int]) -> Tensor:
    kept["steps"] += 1
    return loss(model, batch) * (1 if kept["steps"] < 400 else 2)


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (Trainer().loss, r"Trainer\.steps"),
        (Trainer(), r"Trainer\.steps"),
        (functools.partial(with_a_state, kept={"steps": 0}), r"kept\['steps'\]"),
    ],
    ids=["method", "object", "partial"],
)
def test_state_of_the_step_itself_is_refused(step: Callable[..., Tensor], name: str) -> None:
    with pytest.raises(CaptureError, match=rf"the step changes {name} \(0 → 1000\), so its later calls"):
        fxpipe.capture(Net(lambda net, x: x), step, data())
