"""A value that several workers read goes from each to the next, so that least crosses every boundary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from boundary_bytes import least, sent
from by_path import module_at
from cached import captured
from covering import covering
from random_cuts import random_cuts, with_units
from small_models import CASES
from torch import Tensor, nn

import fxpipe
from fxpipe.ir.transform import run_passes
from fxpipe.lowering.compare_with_eager import compare_with_eager
from fxpipe.passes import front_passes, wiring_passes
from fxpipe.passes.comm import Comm
from fxpipe.passes.cost import Cost
from fxpipe.planner.cuts import Cuts
from fxpipe.task.batch import split


@pytest.mark.parametrize(("name", "seed"), covering(CASES, range(4), strength=1))
def test_with_any_cuts_each_boundary_carries_its_lower_bound(name: str, seed: int) -> None:
    cuts = random_cuts(name, 4, seed)
    before = run_passes(captured(name)[2], [*front_passes(), Cost(), *wiring_passes(cuts)[:-1]])
    found = sent(Comm()(before).edges)
    assert found == least(before)
    assert found


def test_each_block_output_and_its_gradient_cross_a_boundary_once() -> None:
    """With two blocks a worker, forward carries all outputs before a boundary, and backward one sum for each."""
    path = Path(__file__).parents[2] / "examples" / "attention_residuals.py"
    example: Any = module_at(path, "small_attention_residuals")
    example.WIDTH, example.HEADS, example.CONTEXT = 16, 2, 8
    program = fxpipe.capture(example.model(), example.loss, split(next(iter(example.train_data())), 4)[0])
    at = ["blocks.2", "blocks.4", "blocks.6"]
    build = fxpipe.lower(program, workers=4, microbatches=4, cost="analytic", forward_at=at, backward_at=at)
    output = 2 * 8 * 16 * 4  # float32 [batch, length, width] of a microbatch
    for worker, outputs in ((0, 3), (1, 5), (2, 7)):  # the embedding's and those of the blocks before
        for kind, src, dst in (("activation", worker, worker + 1), ("gradient", worker + 1, worker)):
            sizes = [e.tensor.bytes for e in build.plan.edges if (e.kind, e.src, e.dst) == (kind, src, dst)]
            assert sizes == [output] * outputs, (kind, src, dst)


class ReadTwice(nn.Module):
    """Two layers whose backwards read what the first layer made."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return (h.sin() + h.cos()).sum()


def loss_itself(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


def test_a_worker_that_only_hands_on_what_backwards_read_takes_it_in_forward() -> None:
    """Backwards run from the last worker to the first: worker 1's would have it too late for worker 2's."""
    torch.manual_seed(0)
    model, batch = ReadTwice(), torch.randn(3, 2)
    program = fxpipe.capture(model, loss_itself, batch)
    units = len(with_units(program).units)
    build = fxpipe.lower(
        program, workers=3, cost="analytic", schedule="1f1b", cuts=Cuts((0, units, units, units), (0, 1, 2, units))
    )
    ways = {
        e.name: (e.kind, f"{e.src_phase}{e.src}", f"{e.dst_phase}{e.dst}") for e in build.plan.edges if ":" in e.name
    }
    assert ways["first_mm:1"] == ("saved", "F0", "F1")
    assert ways["first_mm:2"] == ("saved", "F1", "B2")
    assert compare_with_eager(build, model, loss_itself, batch).largest < 1e-6
