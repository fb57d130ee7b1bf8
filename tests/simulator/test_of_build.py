"""A build as a scenario: what is simulated is what the runtime sends."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from itertools import product
from typing import Any

import pytest
from cached import captured, cuts, lowered
from torch import Tensor

from fxpipe.builds.build import Build
from fxpipe.errors import BuildError, PolicyError
from fxpipe.plan.cost_records import EdgeTiming, StageTime
from fxpipe.planner.links import Links
from fxpipe.policy.recipe import choose
from fxpipe.runtime.wires.wired import WiredTransport
from fxpipe.simulator.of_build import forecast, scenario_of
from fxpipe.simulator.scenario import Scenario
from fxpipe.simulator.script import scripts
from fxpipe.simulator.simulate import simulate


@functools.cache
def shifted(microbatches: int = 1, **options: Any) -> Build:
    """A GPT with a tied weight for three workers, its backward cut elsewhere than its forward."""
    case, _, _ = captured("gpt", microbatches)
    return lowered("gpt", microbatches, workers=3, **cuts(case, 3, 1), **options)


def scenario(build: Build, policy: str | None = None, **costs: Any) -> Scenario:
    """The build on links that cost nothing, without where its values are made, unless `costs` says otherwise."""
    changed = dataclasses.replace(build.costs, **{"links": Links(), "timings": (), **costs})
    return scenario_of(build.plan, changed, choose(build.plan, policy=policy).demand)


def test_times_are_the_tables() -> None:
    build = shifted()
    made = scenario(build, links=Links(latency=1e-3))
    assert made.links == Links(latency=1e-3)
    for cost, row in zip(made.workers, build.workers, strict=True):
        assert cost.forward == pytest.approx(row.forward)
        assert cost.backward == pytest.approx(row.backward + row.weight)
        assert row.weight > 0
        assert cost.update == pytest.approx(row.update)
        assert cost.update > 0


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2", "1f1b", "async"])
def test_weight_gradients_apart(schedule: str) -> None:
    """Their seconds and bytes are their own, and another worker's share of a tied weight's gradient arrives in W."""
    build = shifted(4, schedule="zb-h1")
    recipe = choose(build.plan, schedule)
    made = scenario_of(build.plan, dataclasses.replace(build.costs, links=Links()), recipe.demand)
    plain = dataclasses.replace(build.costs, links=Links(), timings=())
    for cost, row in zip(made.workers, build.workers, strict=True):
        assert cost.backward == pytest.approx(row.backward)
        assert cost.weight == pytest.approx(row.weight)
    arriving = {(m.src, m.src_phase, m.dst) for m in made.messages if m.dst_phase == "W"}
    assert (2, "B", 0) in arriving
    assert not any(phase == "W" for _, phase, _ in arriving)
    found = simulate(recipe.schedule, made, 2)
    kinds = {span.kind for spans in found.spans for span in spans}
    assert ("W" in kinds) == recipe.schedule.weights_apart
    run = simulate(recipe.schedule, scenario_of(build.plan, plain, recipe.demand), 2)
    busy = [sum(span.end - span.start for span in spans) for spans in run.spans]
    expected = [8 * (row.forward + row.backward + row.weight) + 2 * row.update for row in build.workers]
    assert busy == pytest.approx(expected)


def test_a_slower_worker_takes_longer() -> None:
    build = shifted()
    equal = simulate(choose(build.plan).schedule, scenario(build), 12)
    slow = scenario(build, speeds=(1.0,) * (build.plan.workers - 1) + (0.1,))
    found = simulate(choose(build.plan).schedule, slow, 12)
    assert found.seconds_per_minibatch > 3 * equal.seconds_per_minibatch


def test_measured_times_take_the_place_of_the_tables() -> None:
    build = shifted()
    made = scenario(build, times=(StageTime(1, 2, 3), StageTime(4, 5, 6), StageTime(7, 8, 9)))
    assert [(c.forward, c.backward, c.update) for c in made.workers] == [(1, 2, 3), (4, 5, 6), (7, 8, 9)]


def test_edges_become_messages_at_their_points() -> None:
    build = shifted()
    known = build.plan.edges[1]
    made = scenario(build, timings=(EdgeTiming(known.name, 0.25, 0.75, (3, 4)),))
    for edge, message in zip(build.plan.edges, made.messages, strict=True):
        assert (message.src, message.src_phase) == (edge.src, edge.src_phase)
        assert (message.dst, message.dst_phase) == (edge.dst, edge.dst_phase)
        assert message.bytes == edge.tensor.bytes > 0
        found = (message.made, message.needed, message.places)
        assert found == ((0.25, 0.75, (3, 4)) if edge is known else (1, 0, (1, 0)))


def test_a_build_without_costs_is_refused() -> None:
    with pytest.raises(BuildError, match="the build has no costs of its workers"):
        scenario(shifted(), workers=())


def test_a_policy_that_does_not_fit_the_schedule_is_refused() -> None:
    build = shifted()
    with pytest.raises(PolicyError):
        forecast(build.plan, build.costs, schedule="1f1b", policy="stash")


@pytest.mark.parametrize(
    ("schedule", "policy", "microbatches", "weights_codec"),
    [
        ("async", "spectrain", 1, ""),
        ("async", "stash", 1, ""),
        ("async", "latest", 1, ""),
        ("1f1b", "latest", 4, ""),
        ("async", "spectrain", 1, "int8"),
        ("1f1b", "latest", 4, "topk:0.1"),
    ],
)
def test_the_runtime_sends_the_same(
    monkeypatch: pytest.MonkeyPatch, schedule: str, policy: str, microbatches: int, weights_codec: str
) -> None:
    """The values sent and the weights received in a real run: ends, bytes and minibatch of each."""
    real: Counter[tuple[object, ...]] = Counter()
    send, receive = WiredTransport.send, WiredTransport.recv_weights

    def spied_send(self: WiredTransport, edge: Any, minibatch: int, microbatch: int, value: Tensor) -> None:
        real[edge.src, edge.dst, value.nbytes, f"{edge.src_phase}{minibatch}.{microbatch}"] += 1
        send(self, edge, minibatch, microbatch, value)

    def spied_receive(self: WiredTransport, owner: int, version: int, ahead: int) -> Tensor:
        block = receive(self, owner, version, ahead)
        if version:
            real[owner, self.worker, block.numel(), "weights", version] += 1
        return block

    monkeypatch.setattr(WiredTransport, "send", spied_send)
    monkeypatch.setattr(WiredTransport, "recv_weights", spied_receive)
    build = shifted(microbatches, schedule=schedule, policy=policy)
    build = dataclasses.replace(build, plan=dataclasses.replace(build.plan, weights_codec=weights_codec))
    minibatches = 9
    case, _, _ = captured("gpt", microbatches)
    build.local().run(case.batches(minibatches))

    made = scenario(build)
    schedule = choose(build.plan).schedule
    assert made.weight_copies
    simulated: Counter[tuple[object, ...]] = Counter()
    for m in made.messages:
        for i, j in product(range(minibatches), range(microbatches)):
            simulated[m.src, m.dst, m.bytes, f"{m.src_phase}{i}.{j}"] += 1
    for script in scripts(made, schedule, minibatches):
        for weights in script.outgoing:
            for version in range(1, weights.last + 1):
                simulated[weights.channel.src, weights.channel.dst, weights.channel.bytes, "weights", version] += 1
    assert simulated == real


@pytest.mark.parametrize("policy", ["spectrain", "stash", "latest"])
def test_versions_are_those_of_the_demand(policy: str) -> None:
    build = shifted(policy=policy)
    demand = choose(build.plan).demand
    made = scenario(build)
    for worker in range(3):
        wanted = {(r.owner, ph, r.lags) for ph in ("F", "B") for r in demand.readings(worker, ph) if r.owner != worker}
        found = {(r.owner, *read) for r in made.weight_copies if r.reader == worker for read in r.reads}
        assert found == wanted
    assert any(len(copy.reads) > 1 for copy in made.weight_copies) or policy == "latest"


@functools.cache
def of_four(microbatches: int) -> Build:
    case, _, _ = captured("gpt", microbatches)
    return lowered("gpt", microbatches, workers=4, schedule="async", policy="latest", **cuts(case, 4, 1))


@pytest.mark.parametrize(
    ("policy", "microbatches"),
    [
        *((policy, m) for m in (2, 4) for policy in ("latest", "stash", "spectrain", "pipeoptim+keep", "xpipe", "lwp")),
        ("2bw", 4),
    ],
)
def test_no_microbatch_waits_for_weights_that_only_later_ones_read(policy: str, microbatches: int) -> None:
    build = of_four(microbatches)
    found = simulate(choose(build.plan).schedule, scenario(build, policy), 12)
    assert found.seconds_per_minibatch > 0
