"""A build as a scenario: its stages' costs, its edges and its replicas of weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from fxpipe.errors import BuildError
from fxpipe.plan.packing import Pack
from fxpipe.plan.spec import Phase, Plan
from fxpipe.planner.links import Links
from fxpipe.policy.demand import PHASES, Demand
from fxpipe.policy.recipe import choose
from fxpipe.schedule.action import Action
from fxpipe.simulator.model import Message, Replica, Scenario, WorkerCost

if TYPE_CHECKING:
    from fxpipe.plan.costs import EdgeTiming, WorkerSummary


class Costed(Protocol):
    """What of a build says what it costs: no tensor is among it."""

    @property
    def plan(self) -> Plan: ...
    @property
    def workers(self) -> Sequence[WorkerSummary]: ...
    @property
    def speeds(self) -> Sequence[float]: ...


class WorkerTimes(Protocol):
    """Measured seconds of one worker: of a microbatch's F and B, and of a minibatch's update."""

    @property
    def forward(self) -> float: ...
    @property
    def backward(self) -> float: ...
    @property
    def update(self) -> float: ...


def scenario_of(
    build: Costed,
    links: Links,
    timings: Sequence[EdgeTiming] = (),
    times: Sequence[WorkerTimes] | None = None,
    schedule: str | None = None,
    policy: str | None = None,
    demand: Demand | None = None,
) -> Scenario:
    """What a build would do on such links, for `simulate(choose(build.plan, …).schedule, …)`.

    Memory is the table's of `fxpipe compile`: weights, gradients, replicas, and saved values for each microbatch in
    flight. Stashed and predicted copies, the optimizer's state and temporaries are not in it. All times are divided by
    the speeds that the build was planned for.

    Args:
        timings: where each edge's value is made and needed; an edge that is not among them is made at the end of its
            action and needed at the start.
        times: measured seconds by worker, instead of the compiler's estimates.
        schedule, policy: the build's own where None; they say who needs which version of which weights.
        demand: what follows from them, for who has it already: with many workers it takes a second.

    Raises:
        BuildError: a loaded build has no `costs.json`, or `times` are those of another number of workers.
        ScheduleError, PolicyError: an unknown name, or a combination that makes no sense.
    """
    plan = build.plan
    if not build.workers:
        raise BuildError("the build does not say what its workers cost", hint="compile the model again")
    if len(build.workers) != plan.workers:
        raise BuildError(f"the build says what {len(build.workers)} workers cost, it has {plan.workers}")
    if times is not None and len(times) != plan.workers:
        raise BuildError(f"there are times of {len(times)} workers, the build has {plan.workers}")
    points = {timing.name: (timing.made, timing.needed) for timing in timings}
    demand = demand or choose(plan, schedule, policy).demand
    return Scenario(
        workers=tuple(_cost(build, worker, times) for worker in range(plan.workers)),
        messages=tuple(
            Message(e.src, e.src_phase, e.dst, e.dst_phase, e.tensor.bytes, *points.get(e.name, (1.0, 0.0)))
            for e in plan.edges
        ),
        replicas=tuple(replica for owner in range(plan.workers) for replica in _replicas(demand, owner)),
        links=links,
    )


def _cost(build: Costed, worker: int, times: Sequence[WorkerTimes] | None) -> WorkerCost:
    row = build.workers[worker]
    spent = [row.forward_ms / 1e3, (row.backward_ms + row.weight_ms) / 1e3, row.update_ms / 1e3]
    if times is not None:
        spent = [times[worker].forward, times[worker].backward, times[worker].update]
    speed = build.speeds[worker] if build.speeds else 1.0
    forward, backward, update = (seconds / speed for seconds in spent)
    held = row.memory_bytes - row.saved_bytes * row.in_flight
    return WorkerCost(forward, backward, update, static_bytes=held, saved_bytes=row.saved_bytes)


def _replicas(demand: Demand, owner: int) -> Iterator[Replica]:
    """What an owner sends after an update: one message for each reader and distance of prediction."""
    version = 1  # all are alike but the first, which serves the whole warm-up and is never sent
    for reader in demand.readers(owner):
        reads: dict[int, dict[tuple[Phase, int], None]] = {}
        for reading in (r for phase in PHASES for r in demand.readings(reader, phase) if r.owner == owner):
            for microbatch, lag in enumerate(reading.lags):
                ahead = demand.ahead(reading, Action(reading.phase, version + lag, microbatch), version)
                # Microbatches of one minibatch may read different versions; the simulator waits for the oldest one.
                reads.setdefault(ahead, {})[reading.phase, max(reading.lags)] = None
        for message in demand.messages(owner, reader, version, 0, None):
            size = Pack([demand.parameters[name].tensor for name in message.names]).bytes
            yield Replica(owner, reader, tuple(reads[message.ahead]), size)
