"""Convolution's backward as two calls: the same bits, and neither needs what it does not read."""

from __future__ import annotations

import pytest
import torch
from cached import captured

from fxpipe.ir.program import Program, info
from fxpipe.ir.transform import run_passes
from fxpipe.passes.fold import Fold
from fxpipe.passes.split_backward import SplitBackward
from fxpipe.passes.units import Units

aten = torch.ops.aten


def split(name: str) -> Program:
    return run_passes(captured(name)[2], [Fold(), SplitBackward(), Units()])


@pytest.mark.parametrize("name", ["conv", "unet"])
def test_not_a_bit_changes(name: str) -> None:
    for found, expected in zip(split(name).run(), captured(name)[2].run(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["conv", "unet"])
def test_each_call_makes_one_kind_and_reads_what_that_needs(name: str) -> None:
    program = split(name)
    parameters = {p.node for p in program.parameters}
    found = [n for n in program if n.target is aten.convolution_backward.default]
    before = [n for n in captured(name)[2] if n.target is aten.convolution_backward.default]
    assert len(found) == 2 * len(before) - 1, "the first convolution has no gradient of its input"
    for node in found:
        _, read, weight, *_, mask = node.args
        assert info(node).weight == (not mask[0])
        assert mask[0] != (mask[1] or mask[2])
        if len([n for n in found if info(n).unit == info(node).unit]) == 2:
            stand_in, real = (read, weight) if mask[0] else (weight, read)
            assert stand_in.target is aten.empty_strided.default
            assert real.target is not aten.empty_strided.default
            assert (real.name in parameters) == mask[0]
            assert info(stand_in).unit == info(node).unit


def test_the_inputs_gradient_comes_before_the_weights() -> None:
    names = [n.name for n in split("conv") if info(n).phase == "B" and info(n).module == "layers.2.0"]
    assert names.index("d_layers_2_0_getitem") < names.index("d_layers_2_0_convolution_backward_weight")


def test_without_convolutions_nothing_changes() -> None:
    program = run_passes(captured("gpt")[2], [Fold()])
    assert [n.name for n in SplitBackward()(program)] == [n.name for n in program]
