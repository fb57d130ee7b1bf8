"""What no checkpoint has is said at the first: state of hooks, functions, other objects; nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import QUICK, fxpipe
from model_files import write_model
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, SequentialLR

from fxpipe.builds.build import load
from fxpipe.checkpoint.optimizer_state import UnsavedState
from fxpipe.task.model_file import load_task

STEPS = 0


def parameters() -> list[nn.Parameter]:
    made = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    return made


def closure() -> tuple[Optimizer, Any]:
    optimizer, n = SGD(parameters(), lr=0.1), [0]

    def hook(*_: Any) -> None:
        n[0] += 1

    optimizer.register_step_post_hook(hook)
    return optimizer, None


def closure_with_the_optimizer() -> tuple[Optimizer, Any]:
    optimizer, n = AdamW(parameters()), 0

    def hook(*_: Any) -> None:
        nonlocal n
        n += len(optimizer.state)

    optimizer.register_step_pre_hook(hook)
    return optimizer, None


def attribute() -> tuple[Optimizer, Any]:
    optimizer = SGD(parameters(), lr=0.1)

    def hook(self: Any, *_: Any) -> None:
        self.count = getattr(self, "count", 0) + 1

    optimizer.register_step_post_hook(hook)
    return optimizer, None


class Helper:
    def __init__(self) -> None:
        self.count = 0


class Own(SGD):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.helper, self.count = Helper(), 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.helper.count += 1
        self.count += 1


class InAGlobal(SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        global STEPS
        STEPS += 1
        super().step()


class Written(SGD):
    """Plain attributes, numbers of groups and state are written."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.count += 1
        for group in self.param_groups:
            group["count"] = self.count
            for p in group["params"]:
                self.state[p]["count"] = self.count


class Rate:
    """An object: its attributes are in the scheduler's state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return float(0.9**self.calls)


def scheduled(make: Callable[[Optimizer], Any], kind: Callable[..., Optimizer] = SGD) -> tuple[Optimizer, Any]:
    optimizer = kind(parameters(), lr=0.1)
    return optimizer, make(optimizer)


def counting(optimizer: Optimizer) -> LambdaLR:
    calls = 0

    def rate(step: int) -> float:
        nonlocal calls
        calls += 1
        return float(0.9**calls)

    return LambdaLR(optimizer, rate)


class WithoutState:
    """Makes its steps again when a run goes on."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.steps = 0

    def step(self) -> None:
        global STEPS
        STEPS += 1


LOST: dict[str, tuple[Callable[[], tuple[Optimizer, Any]], str]] = {
    "closure": (closure, "n[0] (0 → 3)"),
    "closure with the optimizer": (closure_with_the_optimizer, "n (0 → 4)"),
    "attribute": (attribute, "SGD.count (nothing → 3)"),
    "object": (lambda: (Own(parameters(), lr=0.1), None), "Helper.count (0 → 3)"),
    "global": (lambda: (InAGlobal(parameters(), lr=0.1), None), "STEPS ("),
    "rate": (lambda: scheduled(counting), "calls (1 → 4)"),
    "one of several": (
        lambda: scheduled(lambda o: SequentialLR(o, [counting(o), ExponentialLR(o, 0.9)], [100])),
        "calls (",
    ),
}
KEPT: dict[str, Callable[[], tuple[Optimizer, Any]]] = {
    "AdamW": lambda: (AdamW(parameters()), None),
    "scheduler": lambda: scheduled(lambda o: ExponentialLR(o, 0.9)),
    "rate": lambda: scheduled(lambda o: LambdaLR(o, Rate())),
    "written": lambda: (Written(parameters(), lr=0.1), None),
    "without state": lambda: scheduled(WithoutState),
}


def warning(optimizer: Optimizer, scheduler: Any) -> str | None:
    state = UnsavedState(optimizer, scheduler)
    assert state.warning() is None
    for _ in range(3):
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    found = state.warning()
    assert state.warning() is None, "it is said once"
    return found


@pytest.mark.parametrize(("make", "name"), LOST.values(), ids=LOST)
def test_what_is_lost_is_said(make: Callable[[], tuple[Optimizer, Any]], name: str) -> None:
    found = warning(*make())
    assert found is not None
    assert f"have changed {name}" in found


@pytest.mark.parametrize("make", KEPT.values(), ids=KEPT)
def test_what_is_written_is_not_said(make: Callable[[], tuple[Optimizer, Any]]) -> None:
    assert warning(*make()) is None


HOOKS = """

COUNTS = {"steps": 0}


def optimizer(named):
    made, n = torch.optim.SGD([p for _, p in named], lr=0.1), [0]
    def hook(*_):
        n[0] += 1
    made.register_step_post_hook(hook)
    return made


def on_step(step, loss, run):
    COUNTS["steps"] += 1
"""


def test_a_run_and_a_loop_say_it_at_their_first_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path)
    model.write_text(model.read_text() + HOOKS)
    assert fxpipe("compile", model, "-o", tmp_path / "build", "--accept-optimizer-per-worker", *QUICK).code == 0
    run = ("run", tmp_path / "build", "--local", "--checkpoint-every", 2)
    result = fxpipe(*run, "--steps", 6, "--out", tmp_path / "out")
    assert result.code == 0, result.err
    words = " ".join(result.err.split())
    assert words.count("which no checkpoint has") == 1
    assert "n[0] (0 → " in words
    assert "COUNTS['steps'] (0 → " in words
    task = load_task(model)
    with load(tmp_path / "build").local(optimizer=task.hooks.optimizer, accept_optimizer_per_worker=True) as pipeline:
        for _, batch in zip(range(3), task.train_data(), strict=False):
            pipeline.step(batch)
        capsys.readouterr()
        pipeline.save(tmp_path / "first")
        pipeline.save(tmp_path / "second")
    words = " ".join(capsys.readouterr().err.split())
    assert words.count("have changed n[0] (0 → 3), which no checkpoint has") == 1
