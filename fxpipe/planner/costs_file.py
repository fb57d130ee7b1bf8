"""`costs.json`: what a build's workers take, and how its cuts came about."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from fxpipe.errors import BuildError, ProfileError
from fxpipe.plan.build_folder import COSTS
from fxpipe.plan.cost_records import (
    EdgeTiming,
    EngineTime,
    PolicyTimes,
    ScheduleForecast,
    StageTime,
    StepMemory,
    WorkerSummary,
)
from fxpipe.plan.spec import Plan
from fxpipe.planner.links import Links
from fxpipe.planner.partition import Partition
from fxpipe.planner.profile import check_amounts
from fxpipe.planner.setting import MOMENTUM
from fxpipe.typed_json import Malformed, convert, explained, parse

FORMAT = 6
"""The first had milliseconds, and no `format`; the second no `places` of timings; the third no memory of functions; the
fourth said replicas for copies of weights; the fifth that predictions keep gradients."""


@dataclass(frozen=True)
class BuildCosts:
    """The file's content. All times are seconds.

    Attributes:
        workers: the summary of each worker.
        times: what each worker takes, measured stage by stage; empty if nothing was measured.
        timings: where in its stages each edge's value is made and needed, for the simulator.
        partitions: what the planner compared, the chosen one last; empty if the cuts were given.
        links, speeds: what the planner took them to be, between ranks and of ranks; no speeds: all equal.
        optimizer_bytes: of the optimizer's state, for each byte of trained weights.
        step_memory: of the optimizer's step.
        policy_times: of what policies do to weights.
        engines: what each part of a stage takes on which engine; empty if nothing was measured.
        without_codecs, with_codecs: seconds of a minibatch, by the operators' costs, if no edge had a codec, and with
            the codecs of the build; None where `auto` did not compare them.
        schedules: what `--schedule auto` compared, the chosen one first; empty if the schedule was given.
    """

    workers: tuple[WorkerSummary, ...] = ()
    times: tuple[StageTime, ...] = ()
    timings: tuple[EdgeTiming, ...] = ()
    partitions: tuple[Partition, ...] = ()
    links: Links = field(default_factory=Links)
    speeds: tuple[float, ...] = ()
    optimizer_bytes: float = MOMENTUM
    step_memory: StepMemory = field(default_factory=StepMemory)
    policy_times: PolicyTimes = field(default_factory=PolicyTimes)
    engines: tuple[EngineTime, ...] = ()
    without_codecs: float | None = None
    with_codecs: float | None = None
    schedules: tuple[ScheduleForecast, ...] = ()

    def time(self, worker: int) -> StageTime:
        """What a worker takes: measured, or else as the compiler estimates it."""
        return self.times[worker] if self.times else self.workers[worker].time

    def correction(self, worker: int) -> float | None:
        """A worker's microbatch as measured, over the sum of their node costs; None if one is missing."""
        if not self.times or not self.workers:
            return None
        estimate, measured = self.workers[worker].time, self.times[worker]
        return measured.microbatch / estimate.microbatch if estimate.microbatch else None

    def to_json(self) -> str:
        """The text of the file."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self), "links": self.links.to_row()}, indent=1) + "\n"


def read_costs(folder: Path, plan: Plan) -> BuildCosts | None:
    """The costs in the folder of a plan's build; None if the file is not there: a run does not need it.

    Raises:
        BuildError: it cannot be read, or is of another plan.
    """
    if not (folder / COSTS).is_file():
        return None
    with explained(folder / COSTS, error=BuildError, hint="compile again, or delete it: a run does not need it"):
        body = parse(folder / COSTS)
        if not isinstance(body, dict) or body.pop("format", None) != FORMAT:
            raise Malformed(f"its format is not {FORMAT}: another version of fxpipe wrote it", ", $")
        costs = convert(body, BuildCosts, lax=True)  # links that cost nothing are "inf"
        _check(costs, plan)
        return costs


def _check(costs: BuildCosts, plan: Plan) -> None:
    """Raise Malformed for costs that are not those of the plan's workers and units, or are no times or sizes."""
    for name, wanted in (("workers", plan.workers), ("times", plan.workers), ("speeds", plan.ranks)):
        if (count := len(getattr(costs, name))) not in (0, wanted):
            raise Malformed(f"there are {count} values for {wanted} workers", f", $.{name}")
    try:
        costs.links.check(plan.ranks)
    except ProfileError as error:
        raise Malformed(error.what, ", $.links") from error
    units = len(plan.units)
    for i, row in enumerate(costs.workers):
        ranges = (row.forward_units, row.backward_units, row.weight_units)
        if row.rank != i or not all(0 <= start <= end <= units for start, end in ranges):
            raise Malformed(f"it is not what worker {i} of the plan does", f", $.workers[{i}]")
    for i, engine in enumerate(costs.engines):
        if not 0 <= engine.worker < plan.workers:
            raise Malformed(f"there is no worker {engine.worker}", f", $.engines[{i}].worker")
    for i, timing in enumerate(costs.timings):
        if not (0 <= timing.made <= 1 and 0 <= timing.needed <= 1):
            raise Malformed("a share must be from 0 to 1", f", $.timings[{i}]")
    if not all(speed > 0 for speed in costs.speeds):
        raise Malformed("a speed is above 0", ", $.speeds")
    check_amounts({**dataclasses.asdict(costs), "links": None})
