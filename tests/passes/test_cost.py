"""cost: every node has its seconds, computed or as they were measured."""

from __future__ import annotations

from two_layers import two_layers

from fxpipe.ir.program import info
from fxpipe.ir.transform import run_passes
from fxpipe.passes.cost import Cost
from fxpipe.passes.fold import Fold
from fxpipe.passes.units import Units


def test_seconds_are_computed_or_those_measured() -> None:
    program = run_passes(two_layers(), [Fold(), Units()])
    computed = {n.name: info(n).seconds for n in Cost()(program)}
    assert computed["_0_mm"] > computed["_0_t"] == 0
    measured = {n.name: float(i) for i, n in enumerate(program)}
    assert {n.name: info(n).seconds for n in Cost(measured)(program)} == measured
