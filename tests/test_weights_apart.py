"""Weight gradients as actions of their own: schedules without them, whose weights they read, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from cached import cuts, lowered
from pipelines import optimizer
from random_cuts import random_cuts
from small_models import CASES

from fxpipe.errors import BuildError, ScheduleError
from fxpipe.plan import consistency
from fxpipe.plan.spec import PHASES
from fxpipe.policy.recipe import choose
from fxpipe.stages.loaded import load_stage_text
from fxpipe.typed_json import Malformed


@pytest.mark.parametrize("policy", ["stash", "spectrain", "vertical"])
def test_weight_gradients_read_the_version_of_their_backward(policy: str) -> None:
    """What they compute again is made of weights: those that the backward read."""
    where = random_cuts("conv", 3, 2)
    build = lowered("conv", 4, workers=3, schedule="zb-h1", cuts=where)
    demand = choose(build.plan, "async", policy).demand
    lags = {
        (worker, phase, name): reading.lags
        for worker in range(3)
        for phase in PHASES
        for reading in demand.readings(worker, phase)
        for name in reading.names
    }
    both = [(worker, name) for worker, phase, name in lags if phase == "W" and (worker, "B", name) in lags]
    assert both
    for worker, name in both:
        assert lags[worker, "W", name] == lags[worker, "B", name]


def test_a_stage_without_them_among_others_is_refused(tmp_path: Path) -> None:
    build = lowered("gpt", 2, workers=2, schedule="zb-h1", **cuts(CASES["gpt"], 2, 0))
    first, second = build.plan.stages
    mixed = build.plan.with_step(stages=(first, replace(second, weights=None)))
    with pytest.raises(Malformed, match="other stages have a separate function for weight gradients"):
        consistency.check(mixed)


def test_an_edited_stage_that_does_not_fit_is_refused() -> None:
    build = lowered("gpt", 2, workers=2, schedule="zb-h1", **cuts(CASES["gpt"], 2, 0))
    text, spec = build.files["stage_0.py"], build.plan.stages[0]
    assert spec.weights is not None
    assert set(load_stage_text(text, spec).functions) == {"F", "B", "W"}
    with pytest.raises(BuildError, match="there is no function weights"):
        load_stage_text(text.replace("def weights(", "def others("), spec)
    one = f"    return [{spec.weights.deferred[0]}]"
    with pytest.raises(
        BuildError, match=rf"backward returns 1 deferred values, the plan has {len(spec.backward.deferred)}"
    ):
        load_stage_text(re.sub(r"    return \[[^\]]*\]\n", one + "\n", text), spec)


def test_a_build_without_them_is_told_how_to_compile() -> None:
    build = lowered("gpt", 2, workers=2, schedule="1f1b", **cuts(CASES["gpt"], 2, 0))
    with pytest.raises(ScheduleError, match="'zb-h1' has separate weight gradients") as caught:
        build.local(optimizer=optimizer, schedule="zb-h1")
    assert caught.value.hint is not None
    assert "fxpipe compile MODEL -n 2 --schedule zb-h1" in caught.value.hint
