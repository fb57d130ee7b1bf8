"""Equal calls become one, whatever the numbers are; draws stay apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fxpipe.ir.program import Program
from fxpipe.ir.transform import run_passes
from fxpipe.passes.fold import Fold
from fxpipe.passes.merge_equal import MergeEqual
from fxpipe.task.hooks import Metrics
from fxpipe.tracing.evaluation import capture_evaluation


def captured(metrics: Metrics) -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    return run_passes(capture_evaluation(model, metrics, torch.randn(5, 4)).program, [Fold()])


def count(program: Program, name: str) -> int:
    return sum(getattr(n.target, "_opname", "") == name for n in program)


def test_arguments_that_python_calls_equal_may_differ() -> None:
    def metrics(model: nn.Module, x: torch.Tensor) -> dict[str, Any]:
        h = model(x)
        return {"a": (h + 1).sum(), "b": (h + 1.0).sum(), "c": (h * 0.0).sum(), "d": (h * -0.0).sum()}

    program = captured(metrics)
    merged = run_passes(program, [MergeEqual()])
    assert count(merged, "mul") == 2
    assert [str(v) for v in merged.run()] == [str(v) for v in program.run()]


def test_random_numbers_are_drawn_as_often_as_before() -> None:
    program = captured(lambda m, x: {"a": (m(x) + torch.rand(5, 3)).mean(), "b": (m(x) + torch.rand(5, 3)).mean()})
    merged = run_passes(program, [MergeEqual()])
    assert count(merged, "rand") == 2
    assert count(merged, "addmm") == 2
