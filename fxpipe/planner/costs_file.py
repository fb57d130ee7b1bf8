"""`costs.json`: the times and memory of a build's workers, and how its cuts were chosen."""

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
from fxpipe.plan.plan import Plan
from fxpipe.planner.links import Links
from fxpipe.planner.partition import Partition
from fxpipe.planner.profile import check_amounts
from fxpipe.planner.setting import MOMENTUM
from fxpipe.typed_json import Malformed, convert, explained, parse

FORMAT = 7


@dataclass(frozen=True)
class BuildCosts:
    """The file's content. All times are seconds.

    Attributes:
        workers: the summary of each worker.
        times: what each worker takes, measured stage by stage; empty if nothing was measured.
        timings: when, in its stages, each edge's value is made and needed; for the simulator.
        partitions: what the planner compared, the chosen one last; empty if the cuts were given.
        links, speeds: what the planner assumed, between ranks and of ranks; empty speeds mean all equal.
        memory: of each rank, in bytes; empty without a limit.
        optimizer_bytes: bytes of optimizer state for each byte of trained weights.
        step_memory: the memory of the optimizer's step.
        policy_times: the times of policies' work on weights.
        engines: what each part of a stage takes on each engine; empty if nothing was measured.
        without_codecs, with_codecs: seconds of a minibatch, computed from the operators' costs, without codecs and with
            those of the build; None if `auto` did not compare them.
        schedules: what `--schedule auto` compared, the chosen one first; empty if the schedule was given.
    """

    workers: tuple[WorkerSummary, ...] = ()
    times: tuple[StageTime, ...] = ()
    timings: tuple[EdgeTiming, ...] = ()
    partitions: tuple[Partition, ...] = ()
    links: Links = field(default_factory=Links)
    speeds: tuple[float, ...] = ()
    memory: tuple[float, ...] = ()
    optimizer_bytes: float = MOMENTUM
    step_memory: StepMemory = field(default_factory=StepMemory)
    policy_times: PolicyTimes = field(default_factory=PolicyTimes)
    engines: tuple[EngineTime, ...] = ()
    without_codecs: float | None = None
    with_codecs: float | None = None
    schedules: tuple[ScheduleForecast, ...] = ()

    def time(self, worker: int) -> StageTime:
        """What a worker takes: measured, or else estimated by the compiler."""
        return self.times[worker] if self.times else self.workers[worker].time

    def correction(self, worker: int) -> float | None:
        """A worker's measured time for a microbatch, divided by the estimate; None if one is missing."""
        if not self.times or not self.workers:
            return None
        estimate, measured = self.workers[worker].time, self.times[worker]
        return measured.microbatch / estimate.microbatch if estimate.microbatch else None

    def to_json(self) -> str:
        """The text of the file."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self), "links": self.links.to_row()}, indent=1) + "\n"


def read_costs(folder: Path, plan: Plan) -> BuildCosts | None:
    """The costs in the folder of a plan's build; None if there is no such file, which a run does not need.

    Raises:
        BuildError: the file cannot be read, or is of another plan.
    """
    if not (folder / COSTS).is_file():
        return None
    with explained(folder / COSTS, error=BuildError, hint="compile again, or delete it: a run does not need it"):
        body = parse(folder / COSTS)
        if not isinstance(body, dict) or body.pop("format", None) != FORMAT:
            raise Malformed(f"its format is not {FORMAT}: another version of fxpipe wrote it", ", $")
        costs = convert(body, BuildCosts, lax=True)  # "inf" where a link costs nothing
        _check(costs, plan)
        return costs


def _check(costs: BuildCosts, plan: Plan) -> None:
    """Raise Malformed if costs do not match the plan's workers and units, or are not times or sizes."""
    of_ranks = (("speeds", plan.ranks), ("memory", plan.ranks))
    for name, wanted in (("workers", plan.workers), ("times", plan.workers), *of_ranks):
        if (count := len(getattr(costs, name))) not in (0, wanted):
            raise Malformed(f"there are {count} values for {wanted} workers", f", $.{name}")
    try:
        costs.links.check(plan.ranks)
    except ProfileError as error:
        raise Malformed(error.what, ", $.links") from error
    units = len(plan.step.units)
    for i, row in enumerate(costs.workers):
        ranges = (row.forward_units, row.backward_units, row.weight_units)
        if row.rank != i or not all(0 <= start <= end <= units for start, end in ranges):
            raise Malformed(f"the rank or the units differ from worker {i} of the plan", f", $.workers[{i}]")
    for i, engine in enumerate(costs.engines):
        if not 0 <= engine.worker < plan.workers:
            raise Malformed(f"there is no worker {engine.worker}", f", $.engines[{i}].worker")
    for i, timing in enumerate(costs.timings):
        if not (0 <= timing.made <= 1 and 0 <= timing.needed <= 1):
            raise Malformed("made and needed must be shares, from 0 to 1", f", $.timings[{i}]")
    if not all(speed > 0 for speed in costs.speeds):
        raise Malformed("every speed must be above 0", ", $.speeds")
    check_amounts({**dataclasses.asdict(costs), "links": None})
