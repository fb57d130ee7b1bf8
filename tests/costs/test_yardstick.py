"""Times that are measured at different moments are made comparable by a program that runs in turn with each."""

from __future__ import annotations

import pytest
from cached import captured

from fxpipe.costs.node_times import Yardstick, measure
from fxpipe.ir.program import Program
from fxpipe.ir.transform import run_passes
from fxpipe.passes.fold import Fold
from fxpipe.passes.units import Units


def program_of(name: str) -> Program:
    return run_passes(captured(name)[2], [Fold(), Units()])


def test_a_slow_moment_is_taken_out() -> None:
    """A program as its own yardstick takes what the yardstick took then, whatever the machine does now."""
    program = program_of("conv")
    seconds, ratios, _ = measure(program, threads=1, repeats=5, yardstick=Yardstick(program, {"F": 100.0, "B": 300.0}))
    found = Yardstick.of(program, seconds).seconds
    assert 50 < found["F"] < 200
    assert 150 < found["B"] < 600
    assert 0 < min(ratios.values()) <= max(ratios.values()) < 10


def test_nodes_keep_their_shares() -> None:
    program = program_of("conv")
    plain, *_ = measure(program, threads=1, repeats=5)
    scaled, *_ = measure(program, threads=1, repeats=5, yardstick=Yardstick.of(program, plain))
    assert scaled.keys() == plain.keys()
    assert Yardstick.of(program, scaled).seconds == pytest.approx(Yardstick.of(program, plain).seconds, rel=0.8)
