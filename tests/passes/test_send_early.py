"""Sends before weight gradients: what moves, how far memory lets it, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch
from cached import captured, cuts
from covering import covering
from program_text import placed, text
from small_models import CASES
from torch import nn
from two_layers import two_layers

import fxpipe
from fxpipe.ir.aten import is_random
from fxpipe.ir.program import Program, info
from fxpipe.ir.transform import Applied, run_passes
from fxpipe.ir.wire import is_send
from fxpipe.passes.analysis.edge_timings import edge_timings
from fxpipe.passes.analysis.liveness import part_memories
from fxpipe.passes.comm import Comm
from fxpipe.passes.send_early import SendEarly
from fxpipe.passes.split import Split
from fxpipe.plan.cost_records import PartMemory


def deep(layers: int = 6, width: int = 8, samples: int = 16) -> Program:
    """A wired program of equal layers on two workers; the second one has half of the layers and the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(layers)])
    program = fxpipe.capture(model, lambda m, x: m(x).square().sum(), torch.randn(samples, width))
    return run_passes(placed(program, layers), [Comm()])


def order(program: Program, worker: int) -> str:
    """What the backward of a worker makes, in its order: input gradients (i), weight gradients (w), sends (s)."""
    calls = [n for n in program if info(n).phase == "B" and info(n).worker == worker]
    products = [n for n in calls if is_send(n) or n.target is torch.ops.aten.mm.default]
    return "".join("s" if is_send(n) else "w" if info(n).weight else "i" for n in products)


def backwards(program: Program) -> list[PartMemory]:
    stages = run_passes(program, [Split()]).stages
    return [memory for stage in stages for memory in part_memories(stage) if memory.phase == "B"]


def test_the_last_weight_gradients_come_after_the_send() -> None:
    before = deep()
    after = run_passes(before, [SendEarly()])
    assert order(before, 1) == "wiwiwis"
    assert order(after, 1) == "wiiisww"
    assert order(after, 0) == order(before, 0), "it sends nothing"
    assert all(torch.equal(a, b) for a, b in zip(before.run(), after.run(), strict=True))


def test_the_send_is_foretold_earlier() -> None:
    before = deep()
    for node in before:
        info(node).seconds = 1.0 if node.target is torch.ops.aten.mm.default else 0.0
    made = {t.name: t.made for t in edge_timings(before)}
    early = {t.name: t.made for t in edge_timings(run_passes(before, [SendEarly()]))}
    (gradient,) = [name for name in made if name.startswith("d_")]
    assert made.pop(gradient) == 1.0
    assert early.pop(gradient) == pytest.approx(4 / 6)
    assert made == early


def test_one_more_would_take_more_memory() -> None:
    """Two layers hold the most at the first weight gradient: had it to wait, its inputs would be there longer."""
    program = run_passes(placed(two_layers(), 2), [Comm()])
    assert text(run_passes(program, [SendEarly()])) == text(program)


@pytest.mark.parametrize(("name", "schedule"), covering(CASES, ["1f1b", "zb-h1"], strength=1))
def test_values_memory_and_random_numbers_stay(name: str, schedule: str) -> None:
    case, _, captured_program = captured(name)
    steps: list[Applied] = []
    options = {"cost": "analytic", "schedule": schedule, "workers": 3, **cuts(case, 3, 1)}
    fxpipe.lower(captured_program, observers=[steps.append], **options)
    (applied,) = [each for each in steps if isinstance(each.step, SendEarly)]
    before, after = applied.before, applied.program
    assert sorted(n.name for n in before) == sorted(n.name for n in after)
    assert [n.name for n in before if is_random(n)] == [n.name for n in after if is_random(n)]
    for fewer, memory in zip(backwards(after), backwards(before), strict=True):
        assert fewer.peak <= memory.peak
        assert fewer.peak_unreceived <= memory.peak_unreceived
    torch.manual_seed(1)
    expected = before.run()
    torch.manual_seed(1)
    assert all(torch.equal(a, b) for a, b in zip(expected, after.run(), strict=True) if isinstance(a, torch.Tensor))
