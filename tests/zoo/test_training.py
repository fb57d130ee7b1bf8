"""Real architectures, cut in three with forward and backward apart, train as eager PyTorch does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from zoo import ZOO, ZooModel
from zoo_programs import MICROBATCHES, WORKERS, apart_cuts, captured_zoo, even_cuts

import fxpipe
from fxpipe.agreement import compare_with_eager
from fxpipe.program import Cuts, Program


@pytest.mark.parametrize("choose", [even_cuts, apart_cuts])
@pytest.mark.parametrize("name", ZOO)  # below, so that it changes last: see `captured_zoo`
def test_distinct_cuts_train_as_eager(name: str, choose: Callable[[Program], Cuts], zoo_model: ZooModel) -> None:
    (model, loss, batch), program, numbered = captured_zoo(zoo_model.name)
    cuts = choose(numbered)
    assert cuts.forward != cuts.backward
    build = fxpipe.lower(
        program,
        workers=WORKERS,
        microbatches=MICROBATCHES,
        schedule="1f1b",
        cost="analytic",
        cuts=cuts,
        split_backward=cuts.weights != cuts.backward,
    )
    agreement = compare_with_eager(build, model, loss, batch)
    assert set(agreement.gradients) == {n for n, p in model.named_parameters() if p.requires_grad}
    assert agreement.largest <= 1e-5, agreement.worst_gradient
