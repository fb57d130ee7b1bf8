"""The calls of an evaluation stand in the order of the workers that hold what they read."""

from __future__ import annotations

import torch
from torch import nn

from fxpipe.ir.program import Program
from fxpipe.ir.transform import run_passes
from fxpipe.passes.fold import Fold
from fxpipe.passes.order_evaluation import OrderEvaluation
from fxpipe.task.hooks import Metrics
from fxpipe.tracing.evaluation import capture_evaluation


def ordered(metrics: Metrics, owners: dict[str, int]) -> tuple[Program, Program]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    program = capture_evaluation(model, metrics, (torch.randn(5, 4), torch.randint(0, 4, (5,)))).program
    before = run_passes(program, [Fold()])
    return before, run_passes(before, [OrderEvaluation(owners)])


def of(workers: list[int]) -> dict[str, int]:
    return {f"{i}.{kind}": worker for i, worker in enumerate(workers) for kind in ("weight", "bias")}


def test_what_is_made_of_an_early_value_stands_early() -> None:
    def metrics(model: nn.Sequential, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        h = model[0](batch[0])
        return {"y": model[2](model[1](h)).mean(), "h": h.square().mean()}

    _, after = ordered(metrics, of([0, 1, 1]))
    order = [n.name for n in after]
    assert order.index(after.metrics()["h"].name) < next(i for i, name in enumerate(order) if "1_addmm" in name)


def test_what_is_made_of_the_batch_alone_stands_by_its_first_reader() -> None:
    def metrics(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        wanted = batch[1].neg()[:, None]
        return {"error": (model(batch[0]) - wanted).mean(), "labels": batch[1].sum()}

    before, after = ordered(metrics, of([0, 1, 1]))
    assert next(iter(before)).name == "neg"
    order = [n.name for n in after]
    first, second = ([i for i, n in enumerate(after) if f"{k}_addmm" in n.name] for k in (0, 1))
    assert first[0] < order.index(after.metrics()["labels"].name) < order.index("neg") < second[0]
