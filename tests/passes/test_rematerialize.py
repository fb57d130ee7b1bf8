"""What is computed again, and what never is."""

from __future__ import annotations

import pytest
import torch
from cached import captured, cuts, lowered
from fxpipe.passes import Options, default_passes
from torch import fx, nn

import fxpipe
from fxpipe.agreement import compare_with_eager
from fxpipe.aten import is_random
from fxpipe.program import Program, info
from fxpipe.transform import run_passes


def wired(program: Program, **options: object) -> Program:
    return run_passes(program, default_passes(Options(cost="analytic", **options)))  # type: ignore[arg-type]


def depends_on_weights_alone(program: Program, node: fx.Node) -> bool:
    weights = {p.node for p in program.parameters}
    inputs = node.all_input_nodes
    if node.op == "placeholder":
        return node.name in weights
    return bool(inputs) and all(depends_on_weights_alone(program, n) for n in inputs)


@pytest.mark.parametrize("shift", [0, 1, -1])
@pytest.mark.parametrize("name", ["gpt", "conv", "lstm"])
def test_backward_never_reads_a_forward_view_of_a_weight(name: str, shift: int) -> None:
    case, _, program = captured(name)
    program = wired(program, workers=3, **cuts(case, 3, shift))
    for node in program:
        if info(node).phase == "B":
            for source in node.all_input_nodes:
                if source.op == "call_function" and info(source).phase == "F":
                    assert not depends_on_weights_alone(program, source), (node, source)


def test_weight_casts_are_made_again_in_backward_under_autocast() -> None:
    case, model, _ = captured("gpt")
    batch = case.batches(1)[0]
    program = wired(fxpipe.capture(model, case.loss, batch, autocast="bf16"), workers=2, **cuts(case, 2, 0))
    saved = [n for s in program.stages for n in s.backward.spec.saved]
    assert any("blocks_0" in n for n in saved)
    assert not any(n.endswith(("_to_copy", "weight")) for n in saved)
    build = fxpipe.compile(model, case.loss, batch, autocast="bf16", cost="analytic", **cuts(case, 2, 0))
    agreement = compare_with_eager(build, model, case.loss, batch)
    assert agreement.largest < 1e-5


def test_checkpointed_blocks_are_recomputed_from_their_input() -> None:
    _, _, program = captured("checkpoint")
    program = wired(program, workers=2)
    again = [n.name for n in program if n.name.endswith("_again") and info(n).phase == "B"]
    for block in range(4):
        assert any(n.startswith(f"blocks_{block}_1_gelu") for n in again), again
    for stage in program.stages:
        assert not any("gelu" in name or "tanh" in name for name in stage.backward.spec.saved)


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
    program = wired(captured_program, workers=3)
    assert sum(is_random(n) for n in program) == before == 3
    build = fxpipe.lower(captured_program, workers=3, cost="analytic")
    assert compare_with_eager(build, model, lambda m, b: m(b).square().mean(), batch).largest < 1e-5


def test_masks_are_made_where_they_are_used_not_sent() -> None:
    case = captured("gpt")[0]
    build = lowered("gpt", workers=3, **cuts(case, 3, 0))
    assert not any(edge.tensor.dtype == "bool" for edge in build.plan.edges)
    assert all("aten.tril" in source for source in build.files.values())
