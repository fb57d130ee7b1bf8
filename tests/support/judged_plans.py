"""Random profiles and workers, and the planner's answer for them compared with brute force."""

from __future__ import annotations

import math

import naive_planner as naive
import pytest
from hypothesis import strategies as st

from fxpipe.planner.links import Links
from fxpipe.planner.partition import Partition, TooLittleMemory, partitions
from fxpipe.planner.profile import Profile, Unit, Value, backward_values
from fxpipe.planner.workers import Ratios, Workers

SMALL = st.sampled_from([0.0, 0.0, 1.0, 2.0, 3.0, 7.0])


@st.composite
def profiles(draw: st.DrawFn, most: int = 5) -> Profile:
    count = draw(st.integers(1, most))
    units = []
    for i in range(count):
        saved = draw(SMALL)
        units.append(
            Unit(
                f"u{i}",
                draw(SMALL),
                draw(SMALL),
                draw(SMALL),
                draw(st.sampled_from([0.0, 1.0])),
                output_bytes=draw(SMALL),
                gradient_bytes=draw(SMALL),
                saved_bytes=saved,
                weight_saved_bytes=draw(st.sampled_from([0.0, saved])),
                fixed_bytes=draw(st.sampled_from([0.0, saved / 2])),
                parameter_bytes=draw(SMALL),
                frozen_bytes=draw(SMALL),
                temporary_bytes=draw(SMALL),
            )
        )
    values = []
    for i in range(count - 1):
        readers = draw(st.sets(st.integers(i + 1, count - 1), min_size=0, max_size=2))
        if readers:
            values.append(Value(i, units[i].output_bytes, tuple(sorted(readers))))
    uncut = {1: "u1"} if count > 2 and draw(st.booleans()) else {}
    return Profile(tuple(units), tuple(values), backward_values(units, values), uncut)


@st.composite
def settings_of_workers(draw: st.DrawFn, most: int = 3) -> Workers:
    count = draw(st.integers(1, most))
    rate = st.sampled_from([250.0, 1000.0, 8000.0])
    if draw(st.booleans()):
        bandwidth: object = draw(rate)
        latency: object = draw(st.sampled_from([0.0, 0.001]))
    else:
        bandwidth = tuple(tuple(draw(rate) for _ in range(count)) for _ in range(count))
        latency = tuple(tuple(draw(st.sampled_from([0.0, 0.002])) for _ in range(count)) for _ in range(count))
    links = draw(st.sampled_from([Links(), Links(bandwidth, latency, draw(st.sampled_from([0.0, 0.0005])))]))  # type: ignore[arg-type]
    return Workers(
        count,
        speeds=tuple(draw(st.sampled_from([1.0, 0.5, 2.0])) for _ in range(count)),
        memory=tuple(draw(st.sampled_from([10.0, 30.0, 60.0, math.inf])) for _ in range(count)),
        links=links,
        microbatches=draw(st.sampled_from([1, 4])),
        owned_ms=tuple(draw(st.sampled_from([0.0, 0.05, 0.2])) for _ in range(count)),
        ratios=draw(ratios()),
    )


@st.composite
def ratios(draw: st.DrawFn) -> Ratios:
    """Of values that travel as they are, or of some that are packed."""
    packed = st.sampled_from([0.02, 0.25, 0.5, 1.0])
    return draw(st.sampled_from([Ratios(), Ratios(draw(packed), draw(packed), draw(packed), draw(packed))]))


def partition(profile: Profile, workers: Workers, mode: str = "bidirectional") -> Partition:
    """The planner's partition of one kind."""
    return partitions(profile, workers, (mode,))[mode]


def check_against_brute_force(profile: Profile, workers: Workers, mode: str) -> None:
    expected = naive.best(profile, workers, mode)
    if math.isinf(expected):
        with pytest.raises(TooLittleMemory, match="fits into memory") as caught:
            partition(profile, workers, mode)
        assert caught.value.share == pytest.approx(naive.least_share(profile, workers, mode), rel=1e-5)
        return
    found = partition(profile, workers, mode)
    assert 1e3 * found.bottleneck == pytest.approx(expected, rel=1e-7, abs=1e-9)
    assert found.exact
    check_consistent(found, profile, workers)


def check_consistent(found: Partition, profile: Profile, workers: Workers) -> None:
    """The plan that is handed out has the cost that it claims."""
    plan = (found.forward, found.backward, found.weights)
    assert plan in set(naive.every_plan(profile, workers, found.mode))
    claimed = [1e3 * load.total for load in found.loads]
    choices = [naive.costs(profile, workers, *plan, choice) for choice in naive.every_choice(workers)]
    assert any(claimed == pytest.approx(costs, rel=1e-7, abs=1e-9) for costs in choices)
    assert max(claimed) == pytest.approx(1e3 * found.bottleneck, rel=1e-7, abs=1e-9)
