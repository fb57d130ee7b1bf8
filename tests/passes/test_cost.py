"""cost: every node has its bytes and seconds, computed or as they were measured."""

from __future__ import annotations

from fxpipe.passes.cost import Cost
from fxpipe.passes.fold import Fold
from fxpipe.passes.units import Units
from program_text import check_pass, two_layers

from fxpipe.ir.program import info
from fxpipe.ir.transform import run_passes

BEFORE = """
# NUMBERED: 18 nodes, 4 units
_0_weight = parameter('0.weight')  # f32[2, 2]
_2_weight = parameter('2.weight')  # f32[2, 2]
batch = batch  # f32[3, 2]
# F
_0_t = aten.t.default(_0_weight)  # f32[2, 2] u0
_0_mm = aten.mm.default(batch, _0_t)  # f32[3, 2] u0
_1_tanh = aten.tanh.default(_0_mm)  # f32[3, 2] u1
_2_t = aten.t.default(_2_weight)  # f32[2, 2] u2
_2_mm = aten.mm.default(_1_tanh, _2_t)  # f32[3, 2] u2
sum_2 = aten.sum.default(_2_mm)  # f32[] u3
# B
d_loss = aten.ones.default([], dtype=torch.float32, device=torch.device("cpu"))  # f32[] u3
d_expand = aten.expand.default(d_loss, [3, 2])  # f32[3, 2] u3
# W
d__2_t = aten.t.default(d_expand)  # f32[2, 3] u2
d__2_mm = aten.mm.default(d__2_t, _1_tanh)  # f32[2, 2] u2
# B
d__2_mm_1 = aten.mm.default(d_expand, _2_weight)  # f32[3, 2] u2
d__1_tanh_backward = aten.tanh_backward.default(d__2_mm_1, _1_tanh)  # f32[3, 2] u1
# W
d__0_t = aten.t.default(d__1_tanh_backward)  # f32[2, 3] u0
d__0_mm = aten.mm.default(d__0_t, batch)  # f32[2, 2] u0
# outputs: sum_2 (loss), d__0_mm (gradient _0_weight), d__2_mm (gradient _2_weight)
"""

AFTER = """
# COSTED: 18 nodes, 4 units
_0_weight = parameter('0.weight')  # f32[2, 2]
_2_weight = parameter('2.weight')  # f32[2, 2]
batch = batch  # f32[3, 2]
# F
_0_t = aten.t.default(_0_weight)  # f32[2, 2] u0 16 B
_0_mm = aten.mm.default(batch, _0_t)  # f32[3, 2] u0 24 B
_1_tanh = aten.tanh.default(_0_mm)  # f32[3, 2] u1 24 B
_2_t = aten.t.default(_2_weight)  # f32[2, 2] u2 16 B
_2_mm = aten.mm.default(_1_tanh, _2_t)  # f32[3, 2] u2 24 B
sum_2 = aten.sum.default(_2_mm)  # f32[] u3 4 B
# B
d_loss = aten.ones.default([], dtype=torch.float32, device=torch.device("cpu"))  # f32[] u3 4 B
d_expand = aten.expand.default(d_loss, [3, 2])  # f32[3, 2] u3 24 B
# W
d__2_t = aten.t.default(d_expand)  # f32[2, 3] u2 24 B
d__2_mm = aten.mm.default(d__2_t, _1_tanh)  # f32[2, 2] u2 16 B
# B
d__2_mm_1 = aten.mm.default(d_expand, _2_weight)  # f32[3, 2] u2 24 B
d__1_tanh_backward = aten.tanh_backward.default(d__2_mm_1, _1_tanh)  # f32[3, 2] u1 24 B
# W
d__0_t = aten.t.default(d__1_tanh_backward)  # f32[2, 3] u0 24 B
d__0_mm = aten.mm.default(d__0_t, batch)  # f32[2, 2] u0 16 B
# outputs: sum_2 (loss), d__0_mm (gradient _0_weight), d__2_mm (gradient _2_weight)
"""


def test_bytes_are_those_of_the_values() -> None:
    check_pass(Cost(), run_passes(two_layers(), [Fold(), Units()]), BEFORE, AFTER)


def test_seconds_are_computed_or_those_measured() -> None:
    program = run_passes(two_layers(), [Fold(), Units()])
    computed = {n.name: info(n).seconds for n in Cost()(program)}
    assert computed["_0_mm"] > computed["_0_t"] == 0
    measured = {n.name: float(i) for i, n in enumerate(program)}
    assert {n.name: info(n).seconds for n in Cost(measured)(program)} == measured
