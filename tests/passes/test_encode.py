"""Edges that get codecs: what packs and unpacks their values, where it is, and what travels."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
import torch
from cached import lowered
from program_text import placed, text
from random_cuts import numbered, random_cuts
from torch import Tensor, nn
from two_layers import two_layers

import fxpipe
from fxpipe.codecs import codec
from fxpipe.codecs.encoding import Encoding
from fxpipe.errors import VerifyError
from fxpipe.ir.law import verify
from fxpipe.ir.program import Program, info, size_of, value
from fxpipe.ir.transform import run_passes
from fxpipe.ir.wire import is_pack, is_recv, is_send, is_unpack, variable
from fxpipe.lowering.compare_with_eager import compare_with_eager
from fxpipe.passes.comm import Comm
from fxpipe.passes.cost import Cost
from fxpipe.passes.cut import Cut
from fxpipe.passes.encode import Encode
from fxpipe.passes.rematerialize import Rematerialize
from fxpipe.plan.cost_records import CodecTimes
from fxpipe.planner.cuts import Cuts

CODECS = {"_1_tanh": "bf16", "d__2_mm_1": "int8"}


@pytest.fixture
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Encoding, "LEAST_BYTES", 1)


def wired(name: str, cuts: Cuts) -> Program:
    return run_passes(numbered(name), [Cost(), Cut(cuts), Rematerialize(), Comm()])


def encoded(program: Program, codecs: Mapping[str, str], times: Mapping[str, CodecTimes] | None = None) -> Program:
    return run_passes(program, [Encode(codecs, times or {})])


def test_it_does_in_the_joint_graph_what_the_codecs_do() -> None:
    """The loss is that of a tanh that was rounded to bfloat16, to the bit."""
    program = run_passes(placed(two_layers(), 2), [Comm()])
    first, second = (program.values[p.node] for p in program.parameters)
    hidden = torch.tanh(torch.ones(3, 2) @ first.t()).bfloat16().float()
    found = encoded(program, {"_1_tanh": "bf16"}).run()[0]
    assert torch.equal(found, (hidden @ second.t()).sum())


def test_without_codecs_the_program_is_as_before() -> None:
    program = run_passes(placed(two_layers(), 2), [Comm()])
    assert text(encoded(program, {})) == text(program)


def test_what_an_edge_says_of_itself() -> None:
    made = encoded(run_passes(placed(two_layers(), 2), [Comm()]), CODECS)
    for edge in made.edges:
        assert edge.codec == CODECS[edge.name]
        assert edge.sent == edge.packed == codec(edge.codec).packed(edge.tensor)
        assert edge.tensor.shape == (3, 2)
    for node in made:
        if is_send(node) or is_recv(node):
            assert info(node).bytes == size_of(value(node)) == made.wires[node.name].sent.bytes


def test_what_codecs_take_is_counted_where_they_work() -> None:
    times = {"bf16": CodecTimes(1.0, 2.0), "int8": CodecTimes(10.0, 20.0)}
    made = encoded(run_passes(placed(two_layers(), 2), [Comm()]), CODECS, times)
    found = {
        (info(n).worker, info(n).phase): info(n).seconds for n in made if is_pack(n) or is_unpack(n)
    }  # of 24 bytes each
    assert found == {(0, "F"): 24.0, (1, "F"): 48.0, (1, "B"): 240.0, (0, "B"): 480.0}


def test_a_value_that_is_handed_on_is_packed_once() -> None:
    program = wired("gpt", random_cuts("gpt", 3, 3))
    ways = sorted({e.name for e in program.wires.values() if e.name.startswith("blocks_0_add_1:")})
    assert len(ways) == 2
    made = encoded(program, dict.fromkeys(ways, "int8"))
    assert sum(is_pack(node) for node in made) == 1
    assert sum(is_unpack(node) for node in made) == 2
    handed_on = next(n for n in made if is_send(n) and made.wires[n.name].name == ways[1])
    assert is_recv(handed_on.all_input_nodes[0])  # as it came
    mixed = encoded(program, dict(zip(ways, ("int8", "int4"), strict=True)))
    assert [n.args[1] for n in mixed if is_pack(n)] == ["int8", "int4"]


def test_a_value_for_two_workers_is_packed_once_but_by_its_own_state_for_each() -> None:
    program = wired("gpt", random_cuts("gpt", 4, 2))
    sends = [n for n in program if is_send(n) and n.all_input_nodes[0].name == "blocks_0_add_1"]
    shared = [program.wires[node.name].name for node in sends]
    assert len(shared) == 2
    made = encoded(program, dict.fromkeys(shared, "int8"))
    assert sum(is_pack(node) for node in made) == 1
    assert len({n.all_input_nodes[0] for n in made if is_send(n) and made.wires[n.name].codec}) == 1
    wires = {name: dataclasses.replace(edge, kind="gradient") for name, edge in program.wires.items()}
    stateful = encoded(dataclasses.replace(program, wires=wires), dict.fromkeys(shared, "int8"))
    assert sorted(str(n.args[2]) for n in stateful if is_pack(n)) == sorted(shared)


def unpacked(program: Program) -> None:
    """Its readers read what was received as it is."""
    node = next(n for n in program if is_unpack(n))
    node.replace_all_uses_with(node.all_input_nodes[0])


def not_packed(program: Program) -> None:
    node = next(n for n in program if is_pack(n))
    node.replace_all_uses_with(node.all_input_nodes[0])
    program.graph.erase_node(node)


def other_codec(program: Program) -> None:
    node = next(n for n in program if is_unpack(n))
    node.args = (node.args[0], "fp16", *node.args[2:])


@pytest.mark.parametrize("broken", [unpacked, not_packed, other_codec])
def test_the_law_notices_an_edge_that_is_encoded_at_one_end_only(broken: object) -> None:
    made = encoded(run_passes(placed(two_layers(), 2), [Comm()]), CODECS)
    verify(made)
    broken(made)  # type: ignore[operator]
    with pytest.raises(VerifyError, match=r"nothing reads|has the codec 'bf16', but its neighbour has another"):
        verify(made)


def test_the_emitted_code_says_what_travels(every_size: None) -> None:
    build = lowered("gpt", workers=2, codec="activation=int8,gradient=topk:0.25")
    (edge,) = (e for e in build.plan.edges if e.kind == "activation" and e.codec)
    first, second = (build.files[f"stage_{worker}.py"] for worker in (0, 1))
    assert "from fxpipe.codecs import codec\n" in first
    assert 'int8 = codec("int8")\n' in first
    assert f"= int8.pack({edge.name})  # u8[{edge.sent.bytes}]\n" in first
    assert f"{edge.sent.bytes:,} of {edge.tensor.bytes:,} bytes\n" in first
    assert f"{edge.name} = int8.unpack({edge.name}_packed, {list(edge.tensor.shape)}, torch.float32)" in second
    assert 'topk_0_25 = codec("topk:0.25")\n' in second
    assert "topk_0_25.pack(" in second
    assert ', comm.state("' in second
    assert "codec" not in lowered("gpt", workers=2).files["stage_0.py"]


class Images(nn.Module):
    """Its activations lie channels last, where they are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x.contiguous(memory_format=torch.channels_last))))


def test_a_value_arrives_in_the_layout_that_it_had(every_size: None) -> None:
    torch.manual_seed(0)
    model, batch = Images(), torch.randn(4, 3, 8, 8)
    build = fxpipe.compile(
        model, lambda m, x: m(x).square().mean(), batch,
        workers=2, forward_at=["second"], microbatches=1, cost="analytic", codec="bf16",
    )  # fmt: skip
    (edge,) = (e for e in build.plan.edges if e.kind == "activation")
    assert edge.tensor.stride[1] == 1
    assert f"torch.float32, {list(edge.tensor.stride)})" in build.files["stage_1.py"]
    value = torch.randn(edge.tensor.shape).contiguous(memory_format=torch.channels_last)
    made = codec("bf16")
    read = made.unpack(made.pack(value), edge.tensor.shape, torch.float32, edge.tensor.stride)
    assert read.stride() == edge.tensor.stride
    assert torch.equal(read, value.bfloat16().float())
    assert compare_with_eager(build, model, lambda m, x: m(x).square().mean(), batch).largest < 1e-5


@pytest.mark.parametrize(
    ("text", "name"), [("topk:0.01", "topk_0_01"), ("int8", "int8"), ("weights", "weights_"), ("torch", "torch_")]
)
def test_what_emitted_code_calls_a_codec(text: str, name: str) -> None:
    assert variable(text) == name
