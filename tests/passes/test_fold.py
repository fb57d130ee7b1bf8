"""fold: what computes nothing goes, and backward reads weights instead of forward's views of them."""

from __future__ import annotations

from fxpipe.passes.fold import Fold
from program_text import check_pass
from two_layers import CAPTURED, FOLDED, two_layers


def test_no_ops_dead_calls_and_transposed_transposes_go() -> None:
    check_pass(Fold(), two_layers(), CAPTURED, FOLDED)
