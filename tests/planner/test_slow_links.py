"""Given the links, the planner cuts a model with skips where less crosses, and a build is faster for it."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from boundary_bytes import sent
from by_path import module_at

import fxpipe
from fxpipe.builds.build import Build
from fxpipe.ir.program import Program
from fxpipe.planner.links import Links
from fxpipe.simulator.of_build import forecast
from fxpipe.task.batch import split

EXAMPLES = Path(__file__).parents[2] / "examples"
FREE, SLOW = Links(), Links(bandwidth=100e6 / 8, latency=20e-3)
MICROBATCHES = 4


@functools.cache
def step_of(name: str) -> Program:
    module = module_at(EXAMPLES / name, f"{Path(name).stem}_of_test_slow_links")
    batch = next(iter(module.train_data()))
    return fxpipe.capture(module.model(), module.loss, split(batch, MICROBATCHES)[0])


@functools.cache
def planned(name: str, links: Links) -> Build:
    return fxpipe.lower(step_of(name), workers=4, microbatches=MICROBATCHES, cost="analytic", links=links)


def seconds(build: Build) -> float:
    """Of a minibatch, over the slow links."""
    return forecast(build.plan, build.costs, links=SLOW).seconds_per_minibatch


@pytest.mark.parametrize("name", ["unet.py", "attention_residuals.py", "gpt.py"])
def test_slow_links_move_the_cuts_to_smaller_edges(name: str) -> None:
    blind, seeing = planned(name, FREE), planned(name, SLOW)
    before, after = sent(blind.plan.edges), sent(seeing.plan.edges)
    assert sum(after.values()) < sum(before.values())
    assert max(after.values()) < max(before.values())
    assert seconds(seeing) < seconds(blind)


def test_a_unet_over_slow_links_keeps_all_workers_busy() -> None:
    blind, seeing = planned("unet.py", FREE), planned("unet.py", SLOW)
    for stage in seeing.plan.stages:
        assert stage.forward_units[0] < stage.forward_units[1]
        assert stage.backward_units[0] < stage.backward_units[1]
    assert seconds(seeing) < seconds(blind) / 4
