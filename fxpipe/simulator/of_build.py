"""Forecasts a run of a build: its stages, edges, weight copies and sums over replicas as a scenario, simulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fxpipe.codecs.packs import outer_bytes
from fxpipe.errors import BuildError
from fxpipe.plan.cost_records import EdgeTiming, StageTime
from fxpipe.plan.plan import Plan
from fxpipe.plan.spec import BucketSpec, EdgeSpec, Phase
from fxpipe.plan.urgency import turn_of
from fxpipe.planner.costs_file import BuildCosts
from fxpipe.planner.links import Links
from fxpipe.policy.copy_messages import STEADY, CopyMessages, Filling
from fxpipe.policy.demand import Demand
from fxpipe.policy.recipe import Recipe, choose
from fxpipe.schedule import Async, AsyncLate
from fxpipe.schedule.action import Action
from fxpipe.simulator.scenario import NEVER, Message, Scenario, WeightCopy
from fxpipe.simulator.simulate import Simulation, simulate, steady_minibatches


def forecast(
    plan: Plan, costs: BuildCosts, *, schedule: str | None = None, policy: str | None = None, links: Links | None = None
) -> Simulation:
    """Simulate a build, with the measured times of its stages if it has them; None means the build's own.

    Raises:
        BuildError: the costs are empty, as in a loaded build without `costs.json`.
    """
    return expect(plan, replace(costs, links=links or costs.links), choose(plan, schedule, policy))[1]


LEAST = 0.98
"""A schedule with late updates is worth its staleness if its time is at most this share of the other schedule's."""


def late_instead(plan: Plan, costs: BuildCosts, seconds: float) -> tuple[str, float] | None:
    """A schedule with late updates that is faster than the build's own, whose updates wait for sums over replicas; None
    if there is none. Its name, and its seconds for a minibatch, against the `seconds` of the build's own schedule.
    """
    if plan.dp == 1 or plan.schedule != Async.name:
        return None
    late_seconds = forecast(plan, costs, schedule=AsyncLate.name, policy=plan.policy).seconds_per_minibatch
    return (AsyncLate.name, late_seconds) if late_seconds < LEAST * seconds else None


def expect(plan: Plan, costs: BuildCosts, recipe: Recipe) -> tuple[Scenario, Simulation]:
    """The scenario that `forecast` simulates, and the simulation, for a build and a recipe.

    Raises:
        BuildError: like `forecast`.
    """
    scenario = scenario_of(plan, costs, recipe.demand)
    return scenario, simulate(recipe.schedule, scenario, steady_minibatches(recipe.schedule))


def scenario_of(plan: Plan, costs: BuildCosts, demand: Demand) -> Scenario:
    """A build on the links it was planned for, as a scenario for `simulate(choose(plan, …).schedule, …)`.

    All times are divided by the speeds that the build was planned for. If workers have different numbers of replicas, r
    replicas count as one that is r times as fast.

    Args:
        costs: measured `times` replace the compiler's estimates. An edge that `timings` does not name is made at the
            end of its action and needed at the start.
        demand: which worker needs which version of which weights.

    Raises:
        BuildError: the costs are empty.
        CodecError: only the model file knows the codec of the weights or of outer steps, and it was not imported.
    """
    if not costs.workers:
        raise BuildError("the build has no costs of its workers", hint="compile the model again")
    sizes = CopyMessages(demand)
    timings = {timing.name: timing for timing in costs.timings}
    workers, sums = [], []
    for worker in range(plan.workers):
        time = _time(costs, worker, plan.rank_of(worker))
        busy = plan.own_microbatches * time.microbatch + time.update
        waits, copied = exposed_sums(plan, worker, costs.links, time.weight or time.backward, busy)
        turns = plan.replicas_of(worker) if plan.crossing else 1
        update = time.update + costs.links.copy * copied
        workers.append(StageTime(time.forward / turns, time.backward / turns, update, time.weight / turns))
        sums.append(waits)
    return Scenario(
        workers=tuple(workers),
        messages=tuple(_message(edge, timings.get(edge.name)) for edge in plan.edges),
        weight_copies=tuple(copy for owner in range(plan.workers) for copy in _weight_copies(demand, sizes, owner)),
        links=costs.links.on([plan.rank_of(worker) for worker in range(plan.workers)]),
        placement=plan.placement,
        sums=tuple(sums),
    )


def _message(edge: EdgeSpec, timing: EdgeTiming | None) -> Message:
    sent = Message(
        edge.src, edge.src_phase, edge.dst, edge.dst_phase, edge.sent.bytes, turn=turn_of(edge.kind, edge.sent.bytes)
    )
    return sent if timing is None else replace(sent, made=timing.made, needed=timing.needed, places=timing.places)


def _time(costs: BuildCosts, worker: int, rank: int) -> StageTime:
    time, speed = costs.time(worker), costs.speeds[rank] if costs.speeds else 1.0
    return StageTime(time.forward / speed, time.backward / speed, time.update / speed, time.weight / speed)


def _weight_copies(demand: Demand, sizes: CopyMessages, owner: int) -> Iterator[WeightCopy]:
    """The messages that an owner sends after an update: one for each reader and prediction distance."""
    version, filling = STEADY, Filling()
    for reader in demand.readers(owner):
        turn = demand.turn(owner, reader)
        reads: dict[int, list[tuple[Phase, tuple[int, ...]]]] = {}
        for reading in demand.readings_of(owner, reader):
            distances = [
                demand.ahead(reading, Action(reading.phase, version + lag, microbatch), version)
                for microbatch, lag in enumerate(reading.lags)
            ]
            for ahead in dict.fromkeys(distances):
                of_message = (lag if of == ahead else NEVER for of, lag in zip(distances, reading.lags, strict=True))
                reads.setdefault(ahead, []).append((reading.phase, tuple(of_message)))
        for message in demand.messages(owner, reader, version, 0, None):
            pack = sizes.pack(owner, reader, version, message.ahead, filling)
            yield WeightCopy(owner, reader, tuple(reads[message.ahead]), pack.bytes, turn)


def exposed_sums(plan: Plan, worker: int, links: Links, backward: float, minibatch: float = 0.0) -> tuple[float, float]:
    """The cost of sums over replicas for a worker in a minibatch: `link_times.exposed_exchange`, bucket by bucket.

    Each replica sends 2(R − 1)/R of every bucket, in two rounds (the lower bound of Patarasuk and Yuan 2009). Buckets
    are sent one after the other while the last microbatch's gradients are made; the last bucket is complete only at
    their end. If replicas share the update, the first round has gradients; the second has new weights, comes after the
    update, and is not hidden. If replicas train separately, it is the average cost of an outer step, which sums all
    trained weights, or sends what a codec makes of them to all replicas; with a delay, the minibatches up to the next
    outer step hide it.

    Args:
        links: between the pipeline's ranks; links between replicas are assumed to be like the slowest of them.
        backward: seconds of a microbatch's backward.
        minibatch: the least seconds of a minibatch.

    Returns:
        The seconds for which the update waits, and the bytes that the processor copies.
    """
    buckets, outer = plan.stages[worker].buckets, plan.outer
    replicas = plan.replicas_of(worker)
    bandwidth, latency = links.slowest(plan.ranks)
    if outer is not None:
        size, rounds = outer_bytes(plan, worker, outer.codec), 1 if outer.codec else 2
        waits = max(0.0, size / bandwidth + rounds * latency - outer.delay * outer.every * minibatch) if size else 0.0
        return waits / outer.every, 2 * size / outer.every
    if replicas == 1 or not buckets:
        return 0.0, 0.0
    once = [_round(plan, bucket, replicas) / bandwidth + latency for bucket in buckets]
    times, after = (once, sum(once)) if plan.sharded else ([2 * time for time in once], 0.0)
    copied = 4 * (replicas - 1) / replicas * sum(bucket.bytes for bucket in buckets)  # sent and received
    return max(times[-1], sum(times) - backward) + after, copied


def _round(plan: Plan, bucket: BucketSpec, replicas: int) -> float:
    """The most bytes that a replica sends or receives in one round of a bucket's exchange."""
    if not bucket.sharded:
        return (replicas - 1) / replicas * bucket.bytes
    sizes = {name: p.tensor.sum_bytes for p in plan.parameters for name in p.names}
    parts = [0] * replicas
    for name, replica in zip(bucket.parameters, bucket.updaters, strict=True):
        parts[replica] += sizes[name]
    return float(max((replicas - 1) * max(parts), sum(parts) - min(parts)))
