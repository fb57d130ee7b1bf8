"""A value that several workers read goes from each to the next, so that least crosses every boundary."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from boundary_bytes import least, sent
from by_path import module_at
from cached import captured
from fxpipe.passes import default_passes, wiring_passes
from fxpipe.passes.comm import Comm
from fxpipe.passes.cost import Cost
from random_cuts import legal_cuts, random_cuts, with_units
from small_models import CASES
from torch import Tensor, nn

import fxpipe
from fxpipe.ir.program import Program
from fxpipe.ir.transform import Pass, run_passes
from fxpipe.lowering.compare_with_eager import compare_with_eager
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.links import Links
from fxpipe.task.batch import split

EXAMPLES = Path(__file__).parents[2] / "examples"
SLOW = Links(bandwidth=12.5e6, latency=0.02)


def until_comm(passes: list[Pass]) -> list[Pass]:
    return passes[: [step.name for step in passes].index("comm")]


def crossings(program: Program, cuts: Cuts) -> tuple[dict[tuple[int, bool], int], dict[tuple[int, bool], int]]:
    """Bytes over each boundary as sent, and the lower bound, of a program with units and costs."""
    before = run_passes(program, wiring_passes(cuts)[:-1])
    return sent(Comm()(before).edges), least(before)


@pytest.fixture(scope="module")
def residuals() -> ModuleType:
    """The example, small."""
    module = module_at(EXAMPLES / "attention_residuals.py", "small_attention_residuals")
    module.WIDTH, module.HEADS, module.CONTEXT = 16, 2, 8  # type: ignore[attr-defined]
    return module


@pytest.fixture(scope="module")
def residuals_step(residuals: ModuleType) -> Program:
    batch = next(iter(residuals.train_data()))
    return fxpipe.capture(residuals.model(), residuals.loss, split(batch, 4)[0])


def unet_step() -> Program:
    module = module_at(EXAMPLES / "unet.py", "unet_of_test_relay")
    batch = next(iter(module.train_data()))
    return fxpipe.capture(module.model(), module.loss, split(batch, 4)[0])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(4))
def test_with_any_cuts_each_boundary_carries_its_lower_bound(name: str, seed: int) -> None:
    cuts = random_cuts(name, 4, seed)
    before = run_passes(captured(name)[2], until_comm(default_passes(cuts)))
    found = sent(Comm()(before).edges)
    assert found == least(before)
    assert found


@pytest.mark.parametrize("seed", range(4))
def test_attention_residuals_cross_once_with_any_cuts(residuals_step: Program, seed: int) -> None:
    program = with_units(residuals_step, 4)
    found, bound = crossings(Cost()(program), legal_cuts(program, 4, f"residuals/{seed}"))
    assert found == bound


@pytest.mark.parametrize("links", [Links(), SLOW], ids=["free links", "slow links"])
@pytest.mark.parametrize("model", ["unet", "residuals", "gpt"])
def test_the_plans_of_three_models_cross_with_their_lower_bound(
    model: str, links: Links, request: pytest.FixtureRequest
) -> None:
    if model == "residuals":
        step: Program = request.getfixturevalue("residuals_step")
    else:
        step = unet_step() if model == "unet" else captured("gpt", 4)[2]
    seen: dict[str, Program] = {}
    build = fxpipe.lower(
        step,
        workers=4,
        microbatches=4,
        cost="analytic",
        links=links,
        observers=[lambda applied: seen.update({applied.step.name: applied.program})],
    )
    assert sent(build.plan.edges) == least(seen["rematerialize"])


def test_each_block_output_and_its_gradient_cross_a_boundary_once(residuals_step: Program) -> None:
    """With two blocks a worker, forward carries all outputs before a boundary, and backward one sum for each."""
    blocks = ["blocks.2", "blocks.4", "blocks.6"]
    build = fxpipe.lower(
        residuals_step, workers=4, microbatches=4, cost="analytic", forward_at=blocks, backward_at=blocks
    )
    output = 2 * 8 * 16 * 4  # float32 [batch, length, width] of a microbatch
    for worker, outputs in ((0, 3), (1, 5), (2, 7)):  # the embedding's and those of the blocks before
        for kind, src, dst in (("activation", worker, worker + 1), ("gradient", worker + 1, worker)):
            sizes = [e.tensor.bytes for e in build.plan.edges if (e.kind, e.src, e.dst) == (kind, src, dst)]
            assert sizes == [output] * outputs, (kind, src, dst)


def test_attention_residuals_on_four_workers_equal_eager(residuals: ModuleType) -> None:
    torch.manual_seed(0)
    model = residuals.model()
    for depth in (*(block.depth for block in model.blocks), model.depth):
        nn.init.normal_(depth.query)  # all weights equal would hide a value in another's place
    batches = [batch for batch, _ in zip(residuals.train_data(), range(3), strict=False)]
    build = fxpipe.compile(
        model, residuals.loss, batches[0], workers=4, microbatches=4, schedule="1f1b", cost="analytic"
    )
    assert any(edge.src > 0 and ":" in edge.name for edge in build.plan.edges), "nothing is handed on"
    assert compare_with_eager(build, model, residuals.loss, batches[0]).largest < 1e-5
    pipeline = build.local(optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        loss = residuals.loss(model, batch)
        loss.backward()
        optimizer.step()
        assert float(pipeline.step(batch)) == pytest.approx(loss.item(), rel=1e-5)


class ReadTwice(nn.Module):
    """Two layers whose backwards read what the first layer made."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return (h.sin() + h.cos()).sum()


def loss_itself(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


def test_a_worker_that_only_hands_on_what_backwards_read_takes_it_in_forward() -> None:
    """Backwards run from the last worker to the first: worker 1's would have it too late for worker 2's."""
    torch.manual_seed(0)
    model, batch = ReadTwice(), torch.randn(3, 2)
    program = fxpipe.capture(model, loss_itself, batch)
    units = len(with_units(program).units)
    build = fxpipe.lower(
        program, workers=3, cost="analytic", schedule="1f1b", cuts=Cuts((0, units, units, units), (0, 1, 2, units))
    )
    ways = {
        e.name: (e.kind, f"{e.src_phase}{e.src}", f"{e.dst_phase}{e.dst}") for e in build.plan.edges if ":" in e.name
    }
    assert ways["first_mm:1"] == ("saved", "F0", "F1")
    assert ways["first_mm:2"] == ("saved", "F1", "B2")
    assert compare_with_eager(build, model, loss_itself, batch).largest < 1e-6
    pipeline = build.local(optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
    assert float(pipeline.step(batch)) == pytest.approx(model(batch).item(), rel=1e-6)
    assert float(pipeline.step(batch)) < model(batch).item()
