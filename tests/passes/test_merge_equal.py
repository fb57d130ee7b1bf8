"""Equal calls become one, whatever the numbers are; draws stay apart."""

from __future__ import annotations

from typing import Any

import torch
from fxpipe.passes.fold import Fold
from fxpipe.passes.merge_equal import MergeEqual
from program_text import check_pass
from torch import nn

from fxpipe.ir.program import Program
from fxpipe.ir.transform import run_passes
from fxpipe.tracing.capture import Metrics, capture_evaluation


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


BEFORE = """
# FOLDED: 26 nodes, 0 units
_0_weight = frozen parameter('0.weight')  # f32[4, 4]
_0_bias = frozen parameter('0.bias')  # f32[4]
_2_weight = frozen parameter('2.weight')  # f32[3, 4]
_2_bias = frozen parameter('2.bias')  # f32[3]
batch = batch  # f32[5, 4]
# F
_0_t = aten.t.default(_0_weight)  # f32[4, 4]
_0_addmm = aten.addmm.default(_0_bias, batch, _0_t)  # f32[5, 4]
_1_tanh = aten.tanh.default(_0_addmm)  # f32[5, 4]
_2_t = aten.t.default(_2_weight)  # f32[4, 3]
_2_addmm = aten.addmm.default(_2_bias, _1_tanh, _2_t)  # f32[5, 3]
mean = aten.mean.default(_2_addmm)  # f32[]
_0_t_1 = aten.t.default(_0_weight)  # f32[4, 4]
_0_addmm_1 = aten.addmm.default(_0_bias, batch, _0_t_1)  # f32[5, 4]
_1_tanh_1 = aten.tanh.default(_0_addmm_1)  # f32[5, 4]
_2_t_1 = aten.t.default(_2_weight)  # f32[4, 3]
_2_addmm_1 = aten.addmm.default(_2_bias, _1_tanh_1, _2_t_1)  # f32[5, 3]
pow_2 = aten.pow.Tensor_Scalar(_2_addmm_1, 2)  # f32[5, 3]
mean_2 = aten.mean.default(pow_2)  # f32[]
neg = aten.neg.default(batch)  # f32[5, 4]
_0_t_2 = aten.t.default(_0_weight)  # f32[4, 4]
_0_addmm_2 = aten.addmm.default(_0_bias, neg, _0_t_2)  # f32[5, 4]
_1_tanh_2 = aten.tanh.default(_0_addmm_2)  # f32[5, 4]
_2_t_2 = aten.t.default(_2_weight)  # f32[4, 3]
_2_addmm_2 = aten.addmm.default(_2_bias, _1_tanh_2, _2_t_2)  # f32[5, 3]
mean_4 = aten.mean.default(_2_addmm_2)  # f32[]
# outputs: mean (metric a), mean_2 (metric b), mean_4 (metric c)
"""

AFTER = """
# FOLDED: 19 nodes, 0 units
_0_weight = frozen parameter('0.weight')  # f32[4, 4]
_0_bias = frozen parameter('0.bias')  # f32[4]
_2_weight = frozen parameter('2.weight')  # f32[3, 4]
_2_bias = frozen parameter('2.bias')  # f32[3]
batch = batch  # f32[5, 4]
# F
_0_t = aten.t.default(_0_weight)  # f32[4, 4]
_0_addmm = aten.addmm.default(_0_bias, batch, _0_t)  # f32[5, 4]
_1_tanh = aten.tanh.default(_0_addmm)  # f32[5, 4]
_2_t = aten.t.default(_2_weight)  # f32[4, 3]
_2_addmm = aten.addmm.default(_2_bias, _1_tanh, _2_t)  # f32[5, 3]
mean = aten.mean.default(_2_addmm)  # f32[]
pow_2 = aten.pow.Tensor_Scalar(_2_addmm, 2)  # f32[5, 3]
mean_2 = aten.mean.default(pow_2)  # f32[]
neg = aten.neg.default(batch)  # f32[5, 4]
_0_addmm_2 = aten.addmm.default(_0_bias, neg, _0_t)  # f32[5, 4]
_1_tanh_2 = aten.tanh.default(_0_addmm_2)  # f32[5, 4]
_2_addmm_2 = aten.addmm.default(_2_bias, _1_tanh_2, _2_t)  # f32[5, 3]
mean_4 = aten.mean.default(_2_addmm_2)  # f32[]
# outputs: mean (metric a), mean_2 (metric b), mean_4 (metric c)
"""


def test_a_model_called_twice_is_computed_once() -> None:
    program = captured(lambda m, x: {"a": m(x).mean(), "b": m(x).square().mean(), "c": m(-x).mean()})
    check_pass(MergeEqual(), program, BEFORE, AFTER)
