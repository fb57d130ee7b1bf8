"""`costs.json`: what a build's workers take, and how its cuts came about."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fxpipe.errors import BuildError
from fxpipe.plan.build_folder import COSTS
from fxpipe.plan.costs import EdgeTiming, WorkerSummary
from fxpipe.planner.links import Links
from fxpipe.planner.partition import Partition
from fxpipe.planner.setting import MOMENTUM

if TYPE_CHECKING:
    from fxpipe.plan.costs import EngineTime, StageTime


@dataclass(frozen=True)
class BuildCosts:
    """The file's content.

    Attributes:
        workers: the summary of each worker.
        times: what each worker takes, measured stage by stage; empty where no one measured.
        timings: where in its stages each edge's value is made and needed, for the simulator.
        partitions: what the planner compared, the chosen one last; empty where the cuts were given.
        links, speeds: what the planner took them to be; no speeds: all equal.
        optimizer_bytes: of the optimizer's state, for each byte of trained weights.
        engine_times: what each part of a stage takes on which engine; empty where no one measured.
    """

    workers: tuple[WorkerSummary, ...] = ()
    times: tuple[StageTime, ...] = ()
    timings: tuple[EdgeTiming, ...] = ()
    partitions: tuple[Partition, ...] = ()
    links: Links = field(default_factory=Links)
    speeds: tuple[float, ...] = ()
    optimizer_bytes: float = MOMENTUM
    engine_times: tuple[EngineTime, ...] = ()

    def to_json(self) -> str:
        """The text of the file."""
        body = {
            "workers": [dataclasses.asdict(w) for w in self.workers],
            "times": [dataclasses.asdict(t) for t in self.times],
            "timings": [dataclasses.asdict(t) for t in self.timings],
            "engines": [dataclasses.asdict(t) for t in self.engine_times],
            "links": self.links.to_row(),
            "speeds": list(self.speeds),
            "optimizer_bytes": self.optimizer_bytes,
            "partitions": [dataclasses.asdict(p) for p in self.partitions],
        }
        return json.dumps(body, indent=1) + "\n"


def read_costs(folder: Path) -> BuildCosts | None:
    """The costs in a build's folder; None where the file is not there: a run does not need it.

    Raises:
        BuildError: it cannot be read.
    """
    from fxpipe.plan.costs import EngineTime, StageTime

    if not (folder / COSTS).is_file():
        return None
    try:
        body = json.loads((folder / COSTS).read_text())
        return BuildCosts(
            workers=tuple(WorkerSummary.from_row(row) for row in body["workers"]),
            times=tuple(StageTime.from_row(row) for row in body["times"]),
            timings=tuple(EdgeTiming(**row) for row in body["timings"]),
            partitions=tuple(Partition.from_row(row) for row in body["partitions"]),
            links=Links.from_row(body["links"]),
            speeds=tuple(body["speeds"]),
            optimizer_bytes=float(body.get("optimizer_bytes", MOMENTUM)),
            engine_times=tuple(EngineTime(**row) for row in body["engines"]),
        )
    except (ValueError, KeyError, TypeError, OSError) as error:
        hint = "compile again, or delete it: a run does not need it"
        raise BuildError(f"{COSTS} cannot be read: {error!r}", where=str(folder), hint=hint) from error
