"""What other numbers of microbatches would do: estimates beside builds that have them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.inspection.other_microbatches import Prospect, own_and_others, prospects
from fxpipe.simulator.forecast import forecast


def built(microbatches: int, policy: str = "spectrain") -> fxpipe.Build:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)))
    return fxpipe.compile(
        model,
        _loss,
        torch.randn(256, 256),
        workers=4,
        forward_at=("2", "4", "6"),
        microbatches=microbatches,
        policy=policy,
        cost="analytic",
    )


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@pytest.fixture(scope="module")
def of_four() -> fxpipe.Build:
    return built(4)


def test_its_own_number_is_the_forecast(of_four: fxpipe.Build) -> None:
    own, *others = own_and_others(of_four)
    assert own.microbatches == 4
    assert own.samples_per_second == pytest.approx(forecast(of_four.plan, of_four.costs).samples_per_second(256))
    assert [prospect.microbatches for prospect in others] == [1, 2, 8]
    assert [prospect.staleness.updates for prospect in (own, *others)] == [1, 3, 2, 1]
    assert own.memory_bytes == max(worker.memory_bytes for worker in of_four.costs.workers)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_an_estimate_is_near_a_build_of_that_number(of_four: fxpipe.Build, count: int) -> None:
    assert of_four.nodes is not None
    (estimate,) = prospects(of_four.plan, of_four.costs, of_four.nodes, [count])
    own = own_and_others(built(count))[0]
    assert estimate.samples_per_second == pytest.approx(own.samples_per_second, rel=0.1)
    assert estimate.memory_bytes == pytest.approx(own.memory_bytes, rel=0.05)
    assert estimate.staleness == own.staleness


def test_what_the_policy_refuses_is_left_out() -> None:
    build = built(4, "2bw+predict+ef")
    found = own_and_others(build)
    assert [prospect.microbatches for prospect in found] == [4, 8]
    assert str(found[0].staleness) == "weights are at most 1 update old, predicted, with error feedback"
    assert isinstance(found[1], Prospect)


def test_nothing_is_known_without_costs(of_four: fxpipe.Build) -> None:
    assert own_and_others(dataclasses.replace(of_four, nodes=None)) == ()


@pytest.mark.parametrize(
    ("schedule", "policy", "expected"),
    [
        ("async", "stash", "weights are at most 3 updates old"),
        ("async", "latest+sc", "weights are at most 3 updates old, with spike compensation"),
        ("1f1b", "latest", "no weights are stale"),
    ],
)
def test_in_words(of_four: fxpipe.Build, schedule: str, policy: str, expected: str) -> None:
    plan = dataclasses.replace(of_four.plan, schedule=schedule, policy=policy)
    assert of_four.nodes is not None
    (prospect,) = prospects(plan, of_four.costs, of_four.nodes, [1])
    assert str(prospect.staleness) == expected
