"""Replicas that train independently: compiled is the pipeline of one of them, for its share of a minibatch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fxpipe.builds.build import Build
from fxpipe.lowering.option_rules import outer_spec
from fxpipe.lowering.options import CompileOptions
from fxpipe.policy.recipe import choose
from fxpipe.simulator.memory import peak_bytes
from fxpipe.task.batch import Batch


def with_replicas(build: Build, options: CompileOptions) -> Build:
    """The build of all replicas from the pipeline of one; unchanged if they add up their gradients."""
    outer = outer_spec(options)
    if outer is None:
        return build
    one = build.plan
    plan = replace(one, microbatches=one.microbatches * options.dp, replicas=(options.dp,) * one.workers, outer=outer)
    peaks = peak_bytes(plan, build.costs, choose(plan).demand)
    rows = tuple(replace(row, memory_bytes=peak) for row, peak in zip(build.costs.workers, peaks, strict=True))
    return replace(build, plan=plan, costs=replace(build.costs, workers=rows))


def of_one_replica(build: Build, batch: Any) -> tuple[Build, Batch]:
    """One replica's pipeline, as if it were alone, and its padded share of a batch; both unchanged in other builds."""
    plan = build.plan
    whole = Batch.of(batch).padded(plan.padding)
    if plan.outer is None:
        return build, whole
    share = whole.cut_as(plan.step.given).share(plan.microbatches, plan.dp)
    return replace(build, plan=plan.of_one_replica), share
