"""Random operators that give every sample the same number, so that a batch and its parts agree."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, distributions
from torch.nn import functional as F

from fxpipe.lowering.steady_randomness import SteadyRandomness

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "rand": lambda x: x + torch.rand_like(x) + torch.rand(x.shape) + torch.empty_like(x).uniform_(2, 3),
    "randn": lambda x: x + torch.randn_like(x) + torch.randn(x.shape) + torch.empty_like(x).normal_(2, 3),
    "normal": lambda x: torch.normal(x, x.exp()) + torch.normal(x, 2.0) + torch.normal(1.0, x.exp()),
    "exponential": lambda x: x + torch.empty_like(x).exponential_(2),
    "log_normal": lambda x: x + torch.empty_like(x).log_normal_(),
    "cauchy": lambda x: x + torch.empty_like(x).cauchy_(1, 2),
    "geometric": lambda x: x + torch.empty_like(x).geometric_(0.3),
    "bernoulli": lambda x: x * torch.bernoulli(x.sigmoid()),
    "poisson": lambda x: x + torch.poisson(x.exp()),
    "binomial": lambda x: x + torch.binomial(torch.full_like(x, 5), x.sigmoid()),
    "multinomial": lambda x: x.gather(1, torch.multinomial(x.exp(), 3)) + torch.multinomial(x.exp(), 9, True)[:, 6:],
    "categorical": lambda x: x + distributions.Categorical(logits=x).sample()[:, None],
    "gumbel": lambda x: F.gumbel_softmax(x),
    "gamma": lambda x: distributions.Gamma(x.exp(), 1 + x.exp()).rsample(),
    "beta": lambda x: distributions.Beta(x.exp(), 1 + x.exp()).rsample(),
    "dirichlet": lambda x: distributions.Dirichlet(x.exp()).rsample(),
    "laplace": lambda x: distributions.Laplace(x, x.exp()).rsample(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_batch_and_its_parts_agree(draw: Callable[[Tensor], Tensor]) -> None:
    def drawn(x: Tensor) -> Tensor:
        with SteadyRandomness() as steady:
            found = draw(x)
        assert not steady.unknown
        assert bool(found.isfinite().all())
        return found

    whole = torch.linspace(-1, 1, 24).view(4, 6)
    assert torch.equal(drawn(whole), torch.cat([drawn(part) for part in whole.chunk(2)]))
