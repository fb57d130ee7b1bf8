"""Forecasts charge what a backward does not hide of the sums over replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cached import captured

import fxpipe
from fxpipe.planner.links import Links
from fxpipe.simulator.replica_sums import exposed_sums


def built(dp: int) -> fxpipe.Build:
    return fxpipe.lower(captured("gpt", 2, size=12)[2], workers=1, dp=dp, microbatches=2 // dp, cost="analytic")


def test_a_worker_without_replicas_waits_for_none() -> None:
    assert exposed_sums(built(1).plan, 0, Links(1e6, 1.0), 0.0) == 0


def test_what_the_backward_does_not_hide_is_waited_for() -> None:
    plan = built(2).plan
    (bucket,) = plan.stages[0].buckets
    size, links = bucket.bytes, Links(1e6, 0.25)
    whole = size / 1e6 + 0.5  # 2 (R - 1) / R is 1
    assert exposed_sums(plan, 0, links, backward=0.0) == pytest.approx(whole)
    assert exposed_sums(plan, 0, links, backward=99.0) == pytest.approx(whole)  # the last bucket comes at its end
    three = replace(plan.stages[0], buckets=(replace(bucket, name="a"), replace(bucket, name="b"), bucket))
    three_of = replace(plan, stages=(three,))
    assert exposed_sums(three_of, 0, links, backward=0.0) == pytest.approx(3 * whole)
    assert exposed_sums(three_of, 0, links, backward=1.5 * whole) == pytest.approx(1.5 * whole)
    assert exposed_sums(three_of, 0, links, backward=99.0) == pytest.approx(whole)


def test_the_processors_copy_what_is_sent_and_received() -> None:
    plan = built(2).plan
    size = plan.stages[0].buckets[0].bytes
    assert exposed_sums(plan, 0, Links(copy=1e-9), backward=0.0) == pytest.approx(2e-9 * size)
