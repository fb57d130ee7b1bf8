"""fold: what a backward takes and does not read; tests/passes/test_programs.py has the rest."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fxpipe.ir.program import INFO, NodeInfo
from fxpipe.passes.fold import _forget_seeds

aten = torch.ops.aten


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_an_attention_without_dropout_reads_no_seed_of_its_forward(dropout: float) -> None:
    """It would cross workers; and what a kernel leaves there is no value that another one could compute again."""
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in ("gradient", "q", "k", "v", "out", "sums", "seed", "offset")]
    for node in given:
        node.meta["val"] = torch.zeros((), dtype=torch.int64 if node.name in ("seed", "offset") else torch.float32)
    gradient, q, k, v, out, sums, seed, offset = given
    backward = graph.call_function(
        aten._scaled_dot_product_efficient_attention_backward.default,
        (gradient, q, k, v, None, out, sums, seed, offset, dropout, [True, True, True, False]),
    )
    backward.meta[INFO] = NodeInfo("B", unit=3)
    _forget_seeds(backward)
    made = backward.args[7:9]
    assert (made == (seed, offset)) == (dropout > 0)
    if not dropout:
        for node in made:
            assert isinstance(node, fx.Node)
            assert node.target is aten.zeros.default
            assert node.meta["val"].dtype == torch.int64
            assert node.meta[INFO].unit == 3
    assert backward.args[6] is sums
    assert backward.args[9] == dropout
