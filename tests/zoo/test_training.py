"""Real architectures, cut in three with forward and backward apart, train as eager PyTorch does."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from fxpipe.passes.cut import glued_positions
from fxpipe.passes.fold import Fold
from fxpipe.passes.units import Units
from random_cuts import legal_cuts
from torch import Tensor, nn
from zoo import ZOO, ZooModel

import fxpipe
from fxpipe.agreement import compare_with_eager
from fxpipe.batch import split
from fxpipe.program import Cuts, Program
from fxpipe.transform import run_passes

WORKERS, MICROBATCHES = 3, 2
Step = tuple[nn.Module, Callable[[nn.Module, Any], Tensor], Any]


@functools.lru_cache(maxsize=1)  # one at a time: they are large
def captured(name: str) -> tuple[Step, Program, Program]:
    """A model's step, its program of one microbatch, and that with its units."""
    model, loss, batch = ZOO[name].make()
    program = fxpipe.capture(model, loss, split(batch, MICROBATCHES)[0])
    return (model, loss, batch), program, run_passes(program, [Fold(), Units()])


def even_cuts(program: Program) -> Cuts:
    """Thirds of the units in forward; backward's cuts an eighth of the units later."""
    count, glued = len(program.units), glued_positions(program)
    free = [p for p in range(count + 1) if p not in glued]
    at = [min(free, key=lambda p: abs(p - count * k / WORKERS)) for k in range(1, WORKERS)]
    return Cuts((0, *at, count), (0, *(p + count // 8 for p in at), count))


def random_cuts(program: Program) -> Cuts:
    """The first random ones with weight gradients cut apart, too, and runs computed again."""
    found = (legal_cuts(program, WORKERS, str(seed)) for seed in itertools.count())
    return next(c for c in found if len({c.forward, c.backward, c.weights}) == 3 and c.recompute)


@pytest.mark.parametrize("choose", [even_cuts, random_cuts])
@pytest.mark.parametrize("name", ZOO)  # below, so that it changes last: see `captured`
def test_distinct_cuts_train_as_eager(name: str, choose: Callable[[Program], Cuts], zoo_model: ZooModel) -> None:
    (model, loss, batch), program, numbered = captured(zoo_model.name)
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
