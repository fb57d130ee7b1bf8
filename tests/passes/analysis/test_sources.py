"""What is made again where it is read, instead of being sent or saved."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

import fxpipe
from fxpipe.ir.aten import is_random
from fxpipe.ir.program import info
from fxpipe.passes.analysis.sources import sources_of


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("constant", torch.randn(4, 4))
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        product = self.weight @ self.constant  # fixed, and not cheap
        mask = x > 0  # cheap, and of the batch
        self.count.add_(1.0)  # cheap, of a buffer that changes
        dropped = nn.functional.dropout(self.weight, 0.5)  # random
        return (x @ product) * mask + self.count + x @ dropped


def test_what_values_are_made_of() -> None:
    program = fxpipe.capture(Mixed(), lambda m, x: m(x).sum(), torch.randn(3, 4))
    sources = sources_of(program)

    def one(operator: str) -> fx.Node:
        return next(n for n in program if str(n.target).startswith(f"aten.{operator}."))

    product, mask = one("mm"), one("gt")
    assert product in sources.fixed - sources.cheap
    assert {leaf.name for leaf in sources.leaves[product]} == {"weight", "constant"}
    assert sources.made_of(product, {"weight"})
    assert mask in sources.cheap - sources.fixed
    assert not any(sources.made_of(n, {"count"}) for n in sources.fixed)
    assert not any(is_random(n) for n in sources.leaves)
    assert all(info(n).phase == "F" for n in sources.leaves)
