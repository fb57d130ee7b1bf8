"""Pipelines that train together add up their gradients: cuts are chosen by what that costs, too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from judged_plans import partition
from torch import nn

import fxpipe
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.links import Links
from fxpipe.planner.partition import Partition, of_cuts
from fxpipe.planner.profile import Profile, Unit, Value, backward_values
from fxpipe.planner.setting import Setting
from fxpipe.planner.workers import Workers
from fxpipe.schedule import make
from fxpipe.search import Question, Sized, search
from fxpipe.search.simulated_plan import Judge
from fxpipe.simulator.of_partition import scenario_of_partition


def chain(*units: Unit) -> Profile:
    values = [Value(i, unit.output_bytes, (i + 1,)) for i, unit in enumerate(units[:-1])]
    return Profile(units, tuple(values), backward_values(units, values))


TWO = chain(
    Unit("front", 12.0, 20.0, 10.0, update_ms=3.0, output_bytes=2000.0, parameter_bytes=1000.0),
    Unit("back", 3.0, 5.0, update_ms=6.0, parameter_bytes=9000.0),
)
LAYERS = [Unit(f"u{i}", 10.0, 20.0, output_bytes=1e3, parameter_bytes=1e3 if i < 8 else 2e7) for i in range(10)]
PROFILE = chain(*LAYERS)
SETTING = Setting("gpipe", microbatches=2, links=Links(1e9), dp=2)


def test_a_worker_costs_what_replicas_of_it_cost() -> None:
    """Two pipelines with two microbatches each, or two replicas that share four."""
    for links in (Links(1e5), Links(1e5, 0.01, 1e-6), Links(((1.0, 1e5), (2e5, 1.0)), 0.01)):
        shared = replace(links, bandwidth=1e5)
        together = of_cuts(TWO, Workers(1, links=shared, microbatches=2, dp=2), Cuts((0, 2), (0, 2)))
        replicas = Workers(1, links=shared, microbatches=4, replicas=(2,))
        assert together.bottleneck * 2 == pytest.approx(of_cuts(TWO, replicas, Cuts((0, 2), (0, 2))).bottleneck * 4)
        two = [Workers(2, links=each, microbatches=2, dp=2) for each in (links, shared)]
        found = [of_cuts(TWO, each, Cuts((0, 1, 2), (0, 1, 2))).loads[1] for each in two]
        assert found[0].exposed >= found[1].exposed - 1e-3  # sums go at the rate of the slowest link


def test_heavy_weights_at_the_end_get_less_work() -> None:
    """The last two layers' sums take 20 or 40 ms, and its last backward hides some: the worker gets fewer layers."""
    alone = partition(PROFILE, replace(SETTING, dp=1).workers(2), "same")
    workers = SETTING.workers(2)
    found = partition(PROFILE, replace(workers, links=Links(2e8)), "same")
    assert alone.forward == (0, 5, 10)
    assert found.forward == (0, 6, 10)
    slow = [
        of_cuts(PROFILE, replace(workers, links=Links(2e8)), Cuts((0, at, 10), (0, at, 10))).bottleneck
        for at in range(11)
    ]
    assert found.bottleneck == pytest.approx(min(slow))
    assert slow.index(min(slow)) == 6


def test_a_simulated_plan_waits_for_the_sums() -> None:
    workers, schedule = replace(SETTING.workers(2), links=Links(2e8, 0.001, 1e-9)), make("gpipe", 2, 2)
    plan = _cut(workers, 5)
    together = scenario_of_partition(PROFILE, plan, workers, schedule)
    alone = replace(workers, dp=1)
    apart = scenario_of_partition(PROFILE, _cut(alone, 5), alone, schedule)
    more = [a.update - b.update for a, b in zip(together.workers, apart.workers, strict=True)]
    size = 2 * 2e7 + 3 * 1e3
    exchange, backward = size / 2e8 + 2 * 0.001, 5 * 0.020
    assert more == pytest.approx([2e-9 * 5e3, exchange - backward + 2e-9 * size])


def _cut(workers: Workers, at: int) -> Partition:
    return of_cuts(PROFILE, workers, Cuts((0, at, 10), (0, at, 10)))


def test_a_search_takes_what_is_fastest_with_the_sums() -> None:
    found, question = {}, Question(2, ("gpipe",), modes=("same",))
    for dp in (1, 2):
        sized = Sized(replace(SETTING, links=Links(1e8), dp=dp), PROFILE, PROFILE)
        best = search([sized], question).best
        judge = Judge.of(best.candidate, question)
        trials = judge.of_cuts([Cuts((0, at, 10), (0, at, 10)) for at in range(11)])
        assert best.seconds == pytest.approx(min(trial.seconds for trial in trials if trial is not None))
        found[dp] = best.partition.forward
    assert found == {1: (0, 5, 10), 2: (0, 7, 10)}


class Table(nn.Module):
    """Many weights, and next to nothing to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4096, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table.sum(0)


def test_a_compile_takes_other_cuts() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)), Table())
    begins = []
    for dp, microbatches in ((1, 2), (2, 1)):
        build = fxpipe.compile(
            *(model, lambda net, batch: net(batch).square().mean(), torch.randn(2048, 64)),
            **{"workers": 2, "dp": dp, "microbatches": microbatches},
            **{"schedule": "gpipe", "cost": "analytic", "cuts": "same", "links": Links(3e8)},
        )
        begins.append(build.plan.stages[1].forward_units[0])
    assert begins[0] < begins[1]
