"""`costs.json`: what a build's workers take, and how its cuts came about."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from fxpipe.errors import BuildError
from fxpipe.plan.build_folder import COSTS
from fxpipe.plan.cost_records import EdgeTiming, EngineTime, StageTime, WorkerSummary
from fxpipe.planner.links import Links
from fxpipe.planner.partition import Partition
from fxpipe.planner.setting import MOMENTUM
from fxpipe.typed_json import Malformed, convert, explained, parse

FORMAT = 2
"""The first had milliseconds, and no `format`."""


@dataclass(frozen=True)
class BuildCosts:
    """The file's content. All times are seconds.

    Attributes:
        workers: the summary of each worker.
        times: what each worker takes, measured stage by stage; empty if nothing was measured.
        timings: where in its stages each edge's value is made and needed, for the simulator.
        partitions: what the planner compared, the chosen one last; empty if the cuts were given.
        links, speeds: what the planner took them to be; no speeds: all equal.
        optimizer_bytes: of the optimizer's state, for each byte of trained weights.
        engines: what each part of a stage takes on which engine; empty if nothing was measured.
    """

    workers: tuple[WorkerSummary, ...] = ()
    times: tuple[StageTime, ...] = ()
    timings: tuple[EdgeTiming, ...] = ()
    partitions: tuple[Partition, ...] = ()
    links: Links = field(default_factory=Links)
    speeds: tuple[float, ...] = ()
    optimizer_bytes: float = MOMENTUM
    engines: tuple[EngineTime, ...] = ()

    def time(self, worker: int) -> StageTime:
        """What a worker takes: measured, or else as the compiler estimates it."""
        return self.times[worker] if self.times else self.workers[worker].time

    def correction(self, worker: int) -> float | None:
        """A worker's forward and backward as measured, over the sum of their node costs; None if one is missing."""
        if not self.times or not self.workers:
            return None
        estimate, measured = self.workers[worker].time, self.times[worker]
        whole = estimate.forward + estimate.backward
        return (measured.forward + measured.backward) / whole if whole else None

    def to_json(self) -> str:
        """The text of the file."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self), "links": self.links.to_row()}, indent=1) + "\n"


def read_costs(folder: Path) -> BuildCosts | None:
    """The costs in a build's folder; None if the file is not there: a run does not need it.

    Raises:
        BuildError: it cannot be read.
    """
    if not (folder / COSTS).is_file():
        return None
    with explained(folder / COSTS, error=BuildError, hint="compile again, or delete it: a run does not need it"):
        body = parse(folder / COSTS)
        if not isinstance(body, dict) or body.pop("format", None) != FORMAT:
            raise Malformed(f"it is not of format {FORMAT}, but of another fxpipe", ", $")
        costs = convert(body, BuildCosts, lax=True)  # links that cost nothing are "inf"
        if not costs.links.possible:
            raise Malformed("no message travels like this", ", $.links")
        return costs
