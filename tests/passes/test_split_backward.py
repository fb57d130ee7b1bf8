"""Convolution's backward as two calls: the same bits, and neither needs what it does not read."""

# ruff: noqa: E501

from __future__ import annotations

import pytest
import torch
from cached import captured
from fxpipe.passes.fold import Fold
from fxpipe.passes.split_backward import SplitBackward
from fxpipe.passes.units import Units
from program_text import check_pass
from torch import nn

import fxpipe
from fxpipe.ir.program import Program, info
from fxpipe.ir.transform import run_passes

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


BEFORE = """
# FOLDED: 14 nodes, 0 units
_0_weight = parameter('0.weight')  # f32[1, 1, 1, 1]
_1_weight = parameter('1.weight')  # f32[1, 1, 1, 1]
batch = batch  # f32[1, 1, 2, 2]
# F
_0_convolution = aten.convolution.default(batch, _0_weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)  # f32[1, 1, 2, 2]
_1_convolution = aten.convolution.default(_0_convolution, _1_weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)  # f32[1, 1, 2, 2]
sum_2 = aten.sum.default(_1_convolution)  # f32[]
# B
d_loss = aten.ones.default([], dtype=torch.float32, device=torch.device("cpu"))  # f32[]
d_expand = aten.expand.default(d_loss, [1, 1, 2, 2])  # f32[1, 1, 2, 2]
d__1_convolution_backward = aten.convolution_backward.default(d_expand, _0_convolution, _1_weight, [0], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])  # (f32[1, 1, 2, 2], f32[1, 1, 1, 1], NoneType)
d__1_getitem = d__1_convolution_backward[0]  # f32[1, 1, 2, 2]
d__1_getitem_1 = d__1_convolution_backward[1]  # f32[1, 1, 1, 1]
d__0_convolution_backward = aten.convolution_backward.default(d__1_getitem, batch, _0_weight, [0], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False])  # (NoneType, f32[1, 1, 1, 1], NoneType)
d__0_getitem = d__0_convolution_backward[1]  # f32[1, 1, 1, 1]
# outputs: sum_2 (loss), d__0_getitem (gradient _0_weight), d__1_getitem_1 (gradient _1_weight)
"""

AFTER = """
# FOLDED: 17 nodes, 0 units
_0_weight = parameter('0.weight')  # f32[1, 1, 1, 1]
_1_weight = parameter('1.weight')  # f32[1, 1, 1, 1]
batch = batch  # f32[1, 1, 2, 2]
# F
_0_convolution = aten.convolution.default(batch, _0_weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)  # f32[1, 1, 2, 2]
_1_convolution = aten.convolution.default(_0_convolution, _1_weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)  # f32[1, 1, 2, 2]
sum_2 = aten.sum.default(_1_convolution)  # f32[]
# B
d_loss = aten.ones.default([], dtype=torch.float32, device=torch.device("cpu"))  # f32[]
d_expand = aten.expand.default(d_loss, [1, 1, 2, 2])  # f32[1, 1, 2, 2]
d__1_convolution_backward_like_input = aten.empty_strided.default([1, 1, 2, 2], [4, 4, 2, 1], dtype=torch.float32, device=torch.device("cpu"))  # f32[1, 1, 2, 2]
d__1_convolution_backward_input = aten.convolution_backward.default(d_expand, d__1_convolution_backward_like_input, _1_weight, [0], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, False, False])  # (f32[1, 1, 2, 2], NoneType, NoneType)
d__1_getitem = d__1_convolution_backward_input[0]  # f32[1, 1, 2, 2]
d__1_convolution_backward_like_weight = aten.empty_strided.default([1, 1, 1, 1], [1, 1, 1, 1], dtype=torch.float32, device=torch.device("cpu"))  # f32[1, 1, 1, 1]
d__1_convolution_backward_weight = aten.convolution_backward.default(d_expand, _0_convolution, d__1_convolution_backward_like_weight, [0], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False])  # (NoneType, f32[1, 1, 1, 1], NoneType)
d__1_getitem_1 = d__1_convolution_backward_weight[1]  # f32[1, 1, 1, 1]
d__0_convolution_backward = aten.convolution_backward.default(d__1_getitem, batch, _0_weight, [0], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False])  # (NoneType, f32[1, 1, 1, 1], NoneType)
d__0_getitem = d__0_convolution_backward[1]  # f32[1, 1, 1, 1]
# outputs: sum_2 (loss), d__0_getitem (gradient _0_weight), d__1_getitem_1 (gradient _1_weight)
"""


def test_the_backward_of_a_convolution_is_two_calls() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.Conv2d(1, 1, 1, bias=False))
    program = fxpipe.capture(model, lambda m, x: m(x).sum(), torch.ones(1, 1, 2, 2))
    check_pass(SplitBackward(), run_passes(program, [Fold()]), BEFORE, AFTER)
