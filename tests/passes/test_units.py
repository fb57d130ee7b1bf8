"""units: what a cut can separate has a number, and backward's numbers are forward's."""

from __future__ import annotations

from fxpipe.passes.fold import Fold
from fxpipe.passes.units import Units
from program_text import check_pass
from two_layers import FOLDED, NUMBERED, two_layers

from fxpipe.ir.transform import run_passes


def test_forward_opens_units_and_backward_takes_them() -> None:
    check_pass(Units(), run_passes(two_layers(), [Fold()]), FOLDED, NUMBERED)
