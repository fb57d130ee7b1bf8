"""join_metrics: program in, program out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir.program import Output, Program, info
from fxpipe.ir.transform import run_passes
from fxpipe.passes import front_passes
from fxpipe.passes.analysis.metric_nodes import metric_nodes, without_metrics
from fxpipe.passes.fold import Fold
from fxpipe.passes.join_metrics import JoinMetrics
from fxpipe.tracing.capture import capture


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def squared(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).pow(2).mean()


def measured(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Any]]:
    early = model.get_submodule("0")(batch).detach()
    loss = squared(model, batch)
    return loss, {"loss twice": 2 * loss, "early": early.abs().max(), "batch": batch.sum()}


def captured(loss: Any) -> Program:
    return capture(net(), loss, torch.ones(2, 4))


def test_metrics_come_after_the_loss_in_one_tensor() -> None:
    before = Fold()(captured(measured))
    outputs = before.run()
    after = JoinMetrics()(before)
    assert after.loss_metrics == ("loss twice", "early", "batch")
    assert after.outputs == tuple(o for o in before.outputs if o.kind != "metric")
    by_output = dict(zip(before.outputs, outputs, strict=True))
    joined, *others = after.run()
    expected = [by_output[Output("loss")], *(by_output[Output("metric", name)] for name in after.loss_metrics)]
    assert torch.equal(joined, torch.stack(expected))
    kept = [value for output, value in by_output.items() if output.kind == "gradient"]
    assert all(torch.equal(one, other) for one, other in zip(others, kept, strict=True))


def test_metrics_open_no_units() -> None:
    plain = run_passes(captured(squared), front_passes())
    with_metrics = run_passes(captured(measured), front_passes(metrics=True))
    assert with_metrics.units == plain.units
    assert metric_nodes(with_metrics)[-1] is with_metrics.loss_node
    units = [info(node).unit for node in without_metrics(with_metrics)]
    assert units == [info(node).unit for node in plain]
    assert info(next(n for n in with_metrics if "abs" in n.name)).unit == 0


def test_a_step_without_metrics_stays_as_it_is() -> None:
    program = Fold()(captured(squared))
    assert str(JoinMetrics()(program).graph) == str(program.graph)
