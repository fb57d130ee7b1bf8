"""State in buffers: evaluation carries it from batch to batch, on its own, as eager PyTorch would."""

from __future__ import annotations

from typing import Any

import pytest
from stateful_model import BATCH, batches, loss, measured, metrics, model, optimizer

import fxpipe
from fxpipe.build.build import Build


def compiled(evaluated: Any, **options: Any) -> Build:
    chosen = {"workers": 2, "cost": "analytic", "schedule": "1f1b", "microbatches": 1, **options}
    evaluation = (metrics, evaluated)
    return fxpipe.compile(model(), loss, batches(1, 0)[0], forward_at=["second"], evaluation=evaluation, **chosen)


def test_an_evaluation_carries_state_as_eager_does() -> None:
    """Batches of two shapes, between steps of training, which goes on with its own state."""
    held_out, steps = batches(5, 1, sizes=(BATCH, BATCH, 2)), batches(6, 2)
    build = compiled(held_out)
    assert not [w for w in build.warnings if "evaluation" in w]
    updates = [[stage.part.updates for stage in spec.stages] for spec in build.plan.evaluations]
    assert updates == [[("first.hidden", "first.cell"), ("second.hidden", "second.cell")]] * 2
    pipeline, net = build.local(optimizer=optimizer), model()
    trained, order_matters = optimizer(net.named_parameters()), False
    for batch in steps:
        trained.zero_grad()
        expected = loss(net, batch)
        expected.backward()
        trained.step()
        assert float(pipeline.step(batch)) == pytest.approx(expected.item(), rel=1e-6)
        pipeline.flush()
        mean = measured(net, held_out)
        assert pipeline.evaluate(held_out)["loss"] == pytest.approx(mean, rel=1e-6)
        order_matters |= mean != pytest.approx(measured(net, held_out[::-1]), rel=3e-5)
    assert order_matters
