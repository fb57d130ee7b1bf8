"""split: each phase of each worker is a graph that has no other inputs than its interface says."""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.passes.comm import Comm
from fxpipe.passes.split import Split
from program_text import placed
from two_layers import two_layers

from fxpipe.ir.printer import argument_text, call_text
from fxpipe.ir.program import Program
from fxpipe.ir.transform import run_passes

AFTER = """
stage 0 forward(_0_weight, batch):
    _0_t = aten.t.default(_0_weight)
    _0_mm = aten.mm.default(batch, _0_t)
    _1_tanh = aten.tanh.default(_0_mm)
    _1_tanh_send_1 = fxpipe.ir.wire.send(_1_tanh)
    return (None, (), (batch, _1_tanh))
stage 0 backward(batch, _1_tanh):
    d__2_mm_1 = fxpipe.ir.wire.recv()
    d__1_tanh_backward = aten.tanh_backward.default(d__2_mm_1, _1_tanh)
    d__0_t = aten.t.default(d__1_tanh_backward)
    d__0_mm = aten.mm.default(d__0_t, batch)
    return (d__0_mm,)
stage 1 forward(_2_weight):
    _2_t = aten.t.default(_2_weight)
    _1_tanh = fxpipe.ir.wire.recv()
    _2_mm = aten.mm.default(_1_tanh, _2_t)
    sum_2 = aten.sum.default(_2_mm)
    return (sum_2, (), (_1_tanh,))
stage 1 backward(_2_weight, _1_tanh):
    d_loss = aten.ones.default([], dtype=torch.float32, device=torch.device("cpu"))
    d_expand = aten.expand.default(d_loss, [3, 2])
    d__2_t = aten.t.default(d_expand)
    d__2_mm = aten.mm.default(d__2_t, _1_tanh)
    d__2_mm_1 = aten.mm.default(d_expand, _2_weight)
    d__2_mm_1_send_0 = fxpipe.ir.wire.send(d__2_mm_1)
    return (d__2_mm,)
"""


def parts(program: Program) -> Iterator[str]:
    for stage in program.stages:
        for part in stage.parts.values():
            taken = [node.name for node in part.graph.nodes if node.op == "placeholder"]
            yield f"stage {stage.worker} {part.function}({', '.join(taken)}):"
            for node in part.graph.nodes:
                if node.op == "call_function":
                    yield f"    {node.name} = {call_text(node, str)}"
            yield f"    return {argument_text(part.graph.output_node().args[0], str)}"


def test_each_part_has_its_calls_and_their_inputs() -> None:
    wired = run_passes(placed(two_layers(), 2), [Comm()])  # `test_comm.py` shows it as text
    split = run_passes(wired, [Split()])
    assert "\n".join(parts(split)) == AFTER.strip()
    first, second = split.stages
    assert first.parts["F"].spec.sends == second.parts["F"].spec.receives == ("_1_tanh",)
    assert second.parts["B"].spec.sends == first.parts["B"].spec.receives
    assert second.parts["F"].spec.saved == second.parts["B"].spec.saved == ("_1_tanh",)
