"""What crosses workers, how it lies in memory, and the tokens where nothing does."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import towers
from cached import captured, cuts, lowered
from program_text import emitted, placed
from random_cuts import numbered, random_cuts
from small_models import CASES
from torch import Tensor, nn
from torch.nn import functional as F
from two_layers import two_layers

import fxpipe
from fxpipe.builds.build import Build
from fxpipe.errors import CutError, VerifyError
from fxpipe.ir import wire
from fxpipe.ir.law import verify
from fxpipe.ir.transform import run_passes
from fxpipe.lowering.compare_with_eager import compare_with_eager
from fxpipe.passes import wiring_passes
from fxpipe.passes.comm import Comm
from fxpipe.passes.cost import Cost
from fxpipe.passes.fold import Fold
from fxpipe.passes.rematerialize import Rematerialize
from fxpipe.passes.units import Units
from fxpipe.plan.plan import Plan
from fxpipe.planner.cuts import Cuts
from fxpipe.schedule import of_plan


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    """Queries, keys and values are views with gaps; attention's output lies as its query does."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.core = Core()
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 2, w // 2).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(self.core(q, k, v).transpose(1, 2).reshape(b, t, w))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize("cuts", [("core", "core"), ("core", "out"), ("out", "core")])
def test_views_with_gaps_keep_the_order_of_their_dimensions(cuts: tuple[str, str]) -> None:
    torch.manual_seed(0)
    model, batch = Attention(), torch.randn(4, 6, 8)
    at = {"forward_at": [cuts[0]], "backward_at": [cuts[1]]}
    build = fxpipe.compile(model, loss, batch, workers=2, microbatches=2, schedule="1f1b", cost="analytic", **at)
    assert compare_with_eager(build, model, loss, batch).largest < 1e-5


def tokens(plan: Plan) -> list[str]:
    return [edge.name for edge in plan.edges if edge.kind == "token"]


def functions(source: str) -> list[list[str]]:
    """The lines of forward and of backward without comments."""
    parts = source.split("\ndef ")[1:]
    return [[line.split("  #")[0].strip() for line in part.strip().splitlines()[1:]] for part in parts]


class Deviation(nn.Module):
    """The gradient of the loss, expanded, makes that of a parameter alone, and that of the layer as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        x, scale = self.first(x), self.scale.exp()
        return x * scale + scale.expand_as(x)


def test_an_expanded_gradient_serves_weights_and_others() -> None:
    """It was marked as if it made only weight gradients, because its first reader does."""

    def summed(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum()

    torch.manual_seed(0)
    model, batch = Deviation(), torch.rand(3, 2)
    found = fxpipe.lower(
        fxpipe.capture(model, summed, batch),
        workers=2,
        microbatches=1,
        schedule="1f1b",
        cost="analytic",
        cuts=Cuts((0, 1, 4), (0, 2, 4)),
    )
    assert compare_with_eager(found, model, summed, batch).largest == 0


@pytest.mark.parametrize("name", CASES)
def test_where_values_pass_between_all_neighbours_there_is_no_token(name: str) -> None:
    assert not tokens(lowered(name, workers=3, **cuts(captured(name)[0], 3, 0)).plan)


def test_a_worker_with_nothing_to_do_hands_tokens_on() -> None:
    count = len(numbered("function").units)
    build = lowered("function", workers=3, cuts=Cuts((0, 5, 5, count), (0, 5, 5, count)))
    assert tokens(build.plan) == ["pace_F_0_1", "pace_F_1_2", "pace_B_2_1", "pace_B_1_0"]
    forward, backward = functions(build.files["stage_1.py"])
    make = 'aten.zeros.default([1], dtype=torch.uint8, device=torch.device("cpu"))'
    assert forward == [
        'pace_F_0_1 = comm.recv("pace_F_0_1")',
        "del pace_F_0_1",
        f"pace_F_1_2 = {make}",
        'comm.send("pace_F_1_2", pace_F_1_2)',
        "del pace_F_1_2",
        "return None, (), []",
    ]
    assert backward == [
        "saved.clear()",
        'pace_B_2_1 = comm.recv("pace_B_2_1")',
        "del pace_B_2_1",
        f"pace_B_1_0 = {make}",
        'comm.send("pace_B_1_0", pace_B_1_0)',
        "del pace_B_1_0",
        "return ()",
    ]
    assert functions(build.files["stage_0.py"])[0][-4:-1] != forward[2:5], "worker 0 sends it before it computes"
    assert "forward   nothing\nbackward  nothing\nowns      0 parameters" in build.files["stage_1.py"]


def test_a_token_leaves_as_soon_as_its_sender_is_in_step() -> None:
    """Worker 1 makes weight gradients alone: worker 0's backward must not wait until they are made."""
    count = len(numbered("function").units)
    build = lowered("function", workers=3, cuts=Cuts((0, count, count, count), (0, 9, 9, count), (0, 9, count, count)))
    _, backward = functions(build.files["stage_1.py"])
    token, product = (next(i for i, line in enumerate(backward) if what in line) for what in ("send(", "torch.mm("))
    assert "pace_B_1_0" in backward[token]
    assert token < product


def test_a_wired_program_without_its_tokens_breaks_the_law() -> None:
    count = len(numbered("function").units)
    program = emitted(captured("function")[2], Cuts((0, 5, count), (0, 0, count)))
    verify(program)
    node = next(n for n in program if n.name.startswith("pace_B_1_0"))
    assert node.name == "pace_B_1_0"
    doomed = [next(iter(next(iter(node.users)).users)), next(iter(node.users)), node]
    for gone in doomed:
        program.graph.erase_node(gone)
    wires = {name: edge for name, edge in program.wires.items() if edge.name != "pace_B_1_0"}
    with pytest.raises(VerifyError, match="nothing makes B of worker 0 wait for B of worker 1"):
        verify(dataclasses.replace(program, wires=wires))


def test_a_value_sent_before_its_sender_is_in_step_does_not_pace() -> None:
    """Worker 1 makes a value from weights alone for worker 2; that it has begun says nothing about worker 0."""

    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            self.middle = nn.Parameter(torch.randn(4, 4))
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            twice = 2 * x
            made = self.middle @ self.middle
            self.mean.copy_(x.detach().mean(0))
            return self.last(twice @ made)

    program = fxpipe.capture(Made(), loss, torch.randn(3, 4))
    count = len(run_passes(program, [Fold(), Units()]).units)
    build = fxpipe.lower(program, workers=3, cost="analytic", cuts=Cuts((0, 2, 5, count), (0, 2, 5, count)))
    forward, _ = functions(build.files["stage_1.py"])
    messages = [line.split('"')[1] for line in forward if "comm." in line]
    assert messages == ["mm", "first_addmm", "pace_F_1_2"]


@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_few_and_only_between_neighbours(seed: int) -> None:
    plan = lowered("unet", workers=4, cuts=random_cuts("unet", 4, seed)).plan
    for edge in plan.edges:
        if edge.kind == "token":
            assert edge.tensor.bytes == 1
            assert edge.src_phase == edge.dst_phase
            assert edge.dst - edge.src == (1 if edge.src_phase == "F" else -1)
    assert len(tokens(plan)) == len(set(tokens(plan))) <= 6


def test_what_is_in_the_cpus_memory_crosses_on_the_programs_device() -> None:
    """As the seeds of an attention's dropout are; here, with a program of a CPU, everything."""
    program = dataclasses.replace(run_passes(placed(two_layers(), 2), [Rematerialize()]), device="cuda")
    program = Comm()(program)
    crossing = [node for node in program.graph.nodes if node.target in (wire.send, wire.recv)]
    assert len(crossing) == 4
    for node in crossing:
        assert node.meta["val"].device.type == "cuda"
        if node.target is wire.send:
            assert node.args[0].meta["val"].device.type == "cuda"
            assert len(node.users) == 1
        else:
            (back,) = node.users
            assert back.meta["val"].device.type == "cpu"


def of_towers(workers: int, frozen: bool = False, **options: Any) -> Build:
    """A build of two towers, cut where they begin."""
    torch.manual_seed(0)
    at = towers.CUTS[2:5:2] if workers == 3 else towers.CUTS[1:5]
    options = {"cost": "analytic", "schedule": "1f1b", "microbatches": 2, "forward_at": at} | options
    return fxpipe.compile(towers.Towers(frozen), towers.loss, towers.batch_of(4), workers=workers, **options)


def test_workers_with_towers_do_not_wait_for_each_other() -> None:
    """Worker 0 sends the right tower its part of the batch before it computes anything."""
    plan = of_towers(3).plan
    between = {(edge.src, edge.src_phase, edge.dst, edge.dst_phase, edge.kind) for edge in plan.edges}
    assert between == {
        (0, "F", 1, "F", "input"),
        (0, "F", 2, "F", "input"),
        (0, "F", 2, "F", "activation"),
        (1, "F", 2, "F", "activation"),
        (2, "B", 0, "B", "gradient"),
        (2, "B", 1, "B", "gradient"),
    }
    assert of_plan(plan).after == ((), (), (0, 1))
    forward, _ = functions(of_towers(3).files["stage_0.py"])
    calls = [line for line in forward if "comm." in line or "aten." in line]
    assert 'comm.send("batch_1"' in calls[0]


def test_each_tower_may_have_several_workers() -> None:
    plan = of_towers(5).plan
    assert of_plan(plan).after == ((), (0,), (), (2,), (1, 3))
    assert not tokens(plan)


def test_a_frozen_tower_gets_a_token_and_a_program_without_it_breaks_the_law() -> None:
    """Without it, the worker with the frozen tower would run ahead of the head without bound."""
    plan = of_towers(3, frozen=True).plan
    assert (tokens(plan), of_plan(plan).after) == (["pace_B_2_1"], ((), (), (0, 1)))
    program = fxpipe.capture(towers.Towers(frozen=True), towers.loss, towers.batch_of(2))
    program = run_passes(program, [Fold(), Units()])
    at = [next(i for i, unit in enumerate(program.units) if unit.startswith(name)) for name in ("right.0", "head")]
    program = run_passes(
        program, [Cost(), *wiring_passes(Cuts((0, *at, len(program.units)), (0, *at, len(program.units))))]
    )
    wires = {name: edge for name, edge in program.wires.items() if edge.kind != "token"}
    for node in reversed(program.graph.nodes):
        if node.name.startswith("pace_"):
            program.graph.erase_node(node)
    with pytest.raises(VerifyError, match="nothing makes B of worker 1 wait for B of worker 2"):
        verify(dataclasses.replace(program, wires=wires))


def test_workers_with_unequal_replicas_stay_a_chain() -> None:
    plan = of_towers(3, microbatches=4, replicas=(2, 1, 1)).plan
    assert (of_plan(plan).after, tokens(plan)) == ((), ["pace_B_1_0"])


def test_a_shape_whose_values_need_another_order_is_refused() -> None:
    """Small batches alone go from the left tower into the right one."""

    class Sometimes(towers.Towers):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            left = self.left(x)
            return self.head(left, self.right(y + left[:, :3] if len(x) < 4 else y))

    shapes = [towers.batch_of(4), towers.batch_of(2)]
    options = {"workers": 3, "cost": "analytic", "schedule": "1f1b", "microbatches": 1}
    with pytest.raises(CutError, match="worker 1 waits for worker 0, which it does not for batches of the first"):
        fxpipe.compile(
            Sometimes(), towers.loss, shapes[0], shapes=shapes[1:], forward_at=("right.0", "head"), **options
        )


def test_a_worker_may_wait_for_tokens_of_two() -> None:
    """Both towers are after a trunk that is not trained, to which no gradient goes."""

    class Trunk(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Linear(4, 4).requires_grad_(False)
            self.left, self.right, self.head = towers.tower(4), towers.tower(4), towers.Head()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = self.trunk(x)
            left = self.left(x)
            return self.head(left, self.right(x))

    model, batch, at = Trunk(), towers.batch_of(4), ["left", "right", "head"]
    options: dict[str, Any] = {"forward_at": at, "backward_at": at, "schedule": "1f1b", "cost": "analytic"}
    build = fxpipe.compile(model, towers.loss, batch, workers=4, **options)
    assert tokens(build.plan) == ["pace_B_2_0", "pace_B_1_0"]
    assert compare_with_eager(build, model, towers.loss, batch).largest < 1e-5
