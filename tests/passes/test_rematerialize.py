"""What is computed again, and what never is."""

from __future__ import annotations

import pytest
import torch
from cached import captured, cuts, lowered, passed
from covering import covering
from program_text import emitted
from random_cuts import numbered, random_cuts
from small_models import CASES
from torch import fx, nn

import fxpipe
from fxpipe.ir.aten import is_random
from fxpipe.ir.program import Program, info
from fxpipe.ir.transform import run_passes
from fxpipe.lowering.compare_with_eager import compare_with_eager
from fxpipe.passes.fold import Fold
from fxpipe.passes.units import Units
from fxpipe.planner.cuts import Cuts


def depends_on_weights_alone(program: Program, node: fx.Node) -> bool:
    weights = {p.node for p in program.parameters}
    inputs = node.all_input_nodes
    if node.op == "placeholder":
        return node.name in weights
    return bool(inputs) and all(depends_on_weights_alone(program, n) for n in inputs)


@pytest.mark.parametrize(("name", "shift"), covering(["gpt", "conv", "lstm"], [0, 1, -1], strength=1))
def test_backward_never_reads_a_forward_view_of_a_weight(name: str, shift: int) -> None:
    case, _, program = captured(name)
    program = passed(program, workers=3, **cuts(case, 3, shift))
    for node in program:
        if info(node).phase == "B":
            for source in node.all_input_nodes:
                if source.op == "call_function" and info(source).phase == "F":
                    assert not depends_on_weights_alone(program, source), (node, source)


def test_weight_casts_are_made_again_in_backward_under_autocast() -> None:
    case, model, _ = captured("gpt")
    batch = case.batches(1)[0]
    mixed = fxpipe.capture(model, case.loss, batch, autocast="bf16")
    program = passed(mixed, workers=2, **cuts(case, 2, 0))
    saved = [n for s in program.stages for n in s.parts["B"].spec.saved]
    assert any("blocks_0" in n for n in saved)
    assert not any(n.endswith(("_to_copy", "weight")) for n in saved)


def test_checkpointed_blocks_are_recomputed_from_their_input() -> None:
    _, _, program = captured("checkpoint")
    program = passed(program, workers=2)
    again = [n.name for n in program if n.name.endswith("_again") and info(n).phase == "B"]
    for block in range(4):
        assert any(n.startswith(f"blocks_{block}_1_gelu") for n in again), again
    for stage in program.stages:
        assert not any("gelu" in name or "tanh" in name for name in stage.parts["B"].spec.saved)


def test_random_nodes_are_never_computed_twice() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(
                    lambda y, layer=layer: nn.functional.dropout(torch.tanh(layer(y)), 0.5), x, use_reentrant=False
                )
            return x

    model, batch = Dropped(), torch.randn(8, 4)
    captured_program = fxpipe.capture(model, lambda m, b: m(b).square().mean(), batch)
    before = sum(is_random(n) for n in captured_program)
    program = passed(captured_program, workers=3)
    assert sum(is_random(n) for n in program) == before == 3


def test_masks_are_made_where_they_are_used_not_sent() -> None:
    case = captured("gpt")[0]
    build = lowered("gpt", workers=3, **cuts(case, 3, 0))
    assert not any(edge.tensor.dtype == "bool" for edge in build.plan.edges)
    assert all("torch.tril" in source for source in build.files.values())


def mismatched(name: str, *recompute: tuple[int, int, int]) -> fxpipe.Build:
    """Two workers; the first runs all of forward, the second the backward of the last two thirds."""
    count = len(numbered(name).units)
    return lowered(name, cuts=Cuts((0, count, count), (0, count // 3, count), recompute=recompute))


def crossing(build: fxpipe.Build, kind: str) -> int:
    return sum(e.tensor.bytes for e in build.plan.edges if e.kind == kind)


@pytest.mark.parametrize("name", CASES)
def test_a_mismatched_run_is_recomputed_from_what_enters_it(name: str) -> None:
    case, model, _ = captured(name)
    count = len(numbered(name).units)
    sent, again = mismatched(name), mismatched(name, (1, count // 3, count))
    assert crossing(again, "saved") < crossing(sent, "saved") * 2 / 3
    assert "_again" in again.files["stage_1.py"]
    assert f"repeats   forward of units {count // 3} to {count - 1}" in again.files["stage_1.py"]
    assert again.workers[1].backward > sent.workers[1].backward
    batch = case.batches(1)[0]
    found, expected = (compare_with_eager(build, model, case.loss, batch) for build in (again, sent))
    assert found == expected, "recomputation moves no bit"
    readers = {p.name: p.readers for p in again.plan.parameters}
    assert any((1, "B") in places for name, places in readers.items() if name.endswith("bias"))


def test_batch_norm_is_recomputed_without_its_statistics_and_updates_them_once() -> None:
    _, _, program = captured("conv")
    count = len(numbered("conv").units)
    cuts = Cuts((0, count, count), (0, 4, count), recompute=((1, 4, count),))
    before = {n for n in emitted(program, cuts) if "_again" in n.name}
    norms = [n for n in before if "batch_norm" in n.name]
    assert len(norms) == 3
    assert all(n.target is torch.ops.aten._native_batch_norm_legit.no_stats for n in norms)
    plan = mismatched("conv", (1, count // 3, count)).plan
    assert not any("running" in edge.name for edge in plan.edges)
    assert all(buffer.home == 0 and buffer.workers == (0,) for buffer in plan.buffers)


@pytest.mark.parametrize("autocast", [None, "bf16"])
@pytest.mark.parametrize("affine", [True, False])
def test_a_recomputed_batch_norm_keeps_its_precision(affine: bool, autocast: str | None) -> None:
    """In bf16 and without weights the statistics make it compute in float32, so they are sent."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=affine), nn.ReLU(), nn.Conv2d(4, 2, 3))

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).float().square().mean()

    batch = torch.randn(4, 3, 8, 8)
    program = fxpipe.capture(model, loss, batch, autocast=autocast)
    count = len(run_passes(program, [Fold(), Units()]).units)
    again = ((1, 1, count),)
    builds = [
        fxpipe.lower(program, cost="analytic", cuts=Cuts((0, count, count), (0, 1, count), recompute=recompute))
        for recompute in ((), again)
    ]
    sent, recomputed = (compare_with_eager(build, model, loss, batch) for build in builds)
    assert recomputed == sent
    assert "batch_norm_legit_functional_again" in builds[1].files["stage_1.py"]
    running = [e.name for e in builds[1].plan.edges if "running" in e.name]
    assert bool(running) == (autocast is not None and not affine)


def test_what_was_drawn_at_random_is_sent_and_the_rest_recomputed() -> None:
    count = len(numbered("gpt-dropout").units)
    build = mismatched("gpt-dropout", (1, count // 3, count))
    saved = [e.name for e in build.plan.edges if e.kind == "saved"]
    assert any("dropout_getitem_1" in name for name in saved), "masks"
    assert not any("native_dropout_again" in source for source in build.files.values())
    assert not any("gelu" in name or "softmax" in name for name in saved)
    stash = {"schedule": "async", "policy": "stash"}
    losses = [b.local(**stash).run(captured("gpt-dropout")[0].batches(6)) for b in (build, mismatched("gpt-dropout"))]
    assert losses[0] == losses[1], "under stash a recomputing backward sees the weights that its forward saw"


def test_what_the_workers_own_forward_has_is_not_recomputed() -> None:
    """Worker 1 runs forward from `middle` on, and receives what enters it: its backward keeps that."""
    program = numbered("function")
    middle, count = program.units.index("layers.3"), len(program.units)
    cuts = Cuts((0, middle, count), (0, middle - 2, count), recompute=((1, middle - 2, count),))
    build = lowered("function", cuts=cuts)
    entering = next(e.name for e in build.plan.edges if e.kind == "activation")
    assert entering == "mul_4"
    backward = build.files["stage_1.py"].split("def backward")[1]
    again = [line.split(" = ")[0].strip() for line in backward.splitlines() if "_again = " in line]
    assert again == ["layers_2_t_again", "layers_2_addmm_again"], "of the two units only what mul_4 was made of"
    assert [e.name for e in build.plan.edges if e.kind == "saved"] == ["mul_2"]


def test_units_of_the_workers_own_forward_are_not_recomputed() -> None:
    count = len(numbered("function").units)
    plain = lowered("function", cuts=Cuts((0, 6, count), (0, 6, count)))
    asked = lowered("function", cuts=Cuts((0, 6, count), (0, 6, count), recompute=((0, 0, 6), (1, 6, count))))
    assert [s.split('"""')[2] for s in asked.files.values()] == [s.split('"""')[2] for s in plain.files.values()]


def test_of_a_tuple_that_backward_computes_again_weight_gradients_get_the_elements() -> None:
    """Not the tuple, of which a graph of tensors alone has no input, and which would keep all of them."""
    options = {"workers": 2, "schedule": "v-half", "cuts": random_cuts("gpt-dropout", 4, seed=5)}
    stage = lowered("gpt-dropout", 4, **options).plan.stages[2]
    assert stage.weights is not None
    assert any("_getitem_" in name and name.endswith("_again") for name in stage.weights.deferred)
    assert not any("_split" in name for name in stage.weights.deferred)
