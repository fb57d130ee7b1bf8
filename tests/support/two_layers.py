"""The smallest program that has two workers, and its text after each of the first passes."""

from __future__ import annotations

import torch
from torch import nn

import fxpipe
from fxpipe.ir.program import Program


def two_layers() -> Program:
    """A step of two layers with a tanh between them, captured: the smallest that has two workers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 2, bias=False))
    return fxpipe.capture(model, lambda m, x: m(x).sum(), torch.ones(3, 2))


CAPTURED = """
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

FOLDED = """
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

NUMBERED = """
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

COSTED = """
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
