"""fold: what computes nothing goes, and backward reads weights instead of forward's views of them."""

from __future__ import annotations

from fxpipe.passes.fold import Fold
from program_text import check_pass, two_layers

BEFORE = """
# CAPTURED: 25 nodes, 0 units
_0_weight = parameter('0.weight')  # f32[2, 2]
_2_weight = parameter('2.weight')  # f32[2, 2]
batch = batch  # f32[3, 2]
# F
_0_t = aten.t.default(_0_weight)  # f32[2, 2]
_0_mm = aten.mm.default(batch, _0_t)  # f32[3, 2]
_1_tanh = aten.tanh.default(_0_mm)  # f32[3, 2]
_1_detach = aten.detach.default(_1_tanh)  # f32[3, 2]
_2_t = aten.t.default(_2_weight)  # f32[2, 2]
_2_mm = aten.mm.default(_1_tanh, _2_t)  # f32[3, 2]
sum_2 = aten.sum.default(_2_mm)  # f32[]
# B
d_loss = aten.ones.default([], dtype=torch.float32, device=torch.device("cpu"))  # f32[]
d_expand = aten.expand.default(d_loss, [3, 2])  # f32[3, 2]
d__2_t = aten.t.default(d_expand)  # f32[2, 3]
d__2_mm = aten.mm.default(d__2_t, _1_tanh)  # f32[2, 2]
d__2_t_1 = aten.t.default(d__2_mm)  # f32[2, 2]
d__2_t_2 = aten.t.default(_2_t)  # f32[2, 2]
d__2_mm_1 = aten.mm.default(d_expand, d__2_t_2)  # f32[3, 2]
d__2_t_3 = aten.t.default(d__2_t_1)  # f32[2, 2]
d__1_detach = aten.detach.default(_1_detach)  # f32[3, 2]
d__1_tanh_backward = aten.tanh_backward.default(d__2_mm_1, d__1_detach)  # f32[3, 2]
d__0_t = aten.t.default(d__1_tanh_backward)  # f32[2, 3]
d__0_mm = aten.mm.default(d__0_t, batch)  # f32[2, 2]
d__0_t_1 = aten.t.default(d__0_mm)  # f32[2, 2]
d__0_t_2 = aten.t.default(d__0_t_1)  # f32[2, 2]
# outputs: sum_2 (loss), d__0_t_2 (gradient _0_weight), d__2_t_3 (gradient _2_weight)
"""

AFTER = """
# FOLDED: 18 nodes, 0 units
_0_weight = parameter('0.weight')  # f32[2, 2]
_2_weight = parameter('2.weight')  # f32[2, 2]
batch = batch  # f32[3, 2]
# F
_0_t = aten.t.default(_0_weight)  # f32[2, 2]
_0_mm = aten.mm.default(batch, _0_t)  # f32[3, 2]
_1_tanh = aten.tanh.default(_0_mm)  # f32[3, 2]
_2_t = aten.t.default(_2_weight)  # f32[2, 2]
_2_mm = aten.mm.default(_1_tanh, _2_t)  # f32[3, 2]
sum_2 = aten.sum.default(_2_mm)  # f32[]
# B
d_loss = aten.ones.default([], dtype=torch.float32, device=torch.device("cpu"))  # f32[]
d_expand = aten.expand.default(d_loss, [3, 2])  # f32[3, 2]
d__2_t = aten.t.default(d_expand)  # f32[2, 3]
d__2_mm = aten.mm.default(d__2_t, _1_tanh)  # f32[2, 2]
d__2_mm_1 = aten.mm.default(d_expand, _2_weight)  # f32[3, 2]
d__1_tanh_backward = aten.tanh_backward.default(d__2_mm_1, _1_tanh)  # f32[3, 2]
d__0_t = aten.t.default(d__1_tanh_backward)  # f32[2, 3]
d__0_mm = aten.mm.default(d__0_t, batch)  # f32[2, 2]
# outputs: sum_2 (loss), d__0_mm (gradient _0_weight), d__2_mm (gradient _2_weight)
"""


def test_no_ops_dead_calls_and_transposed_transposes_go() -> None:
    check_pass(Fold(), two_layers(), BEFORE, AFTER)
