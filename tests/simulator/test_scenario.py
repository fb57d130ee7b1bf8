"""What is simulated, and what it keeps workers busy with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxpipe.errors import ProfileError
from fxpipe.plan.cost_records import StageTime
from fxpipe.planner.links import Links
from fxpipe.simulator.scenario import Message, Scenario, WeightCopy

TWO = (StageTime(1, 2), StageTime(1, 2))


def test_links_of_another_number_of_workers_are_refused() -> None:
    with pytest.raises(ProfileError, match="latency matrix of the links is 1×1, for 2 workers"):
        Scenario(TWO, links=Links(latency=((0.0,),)))


def test_a_minibatchs_busy_seconds() -> None:
    scenario = Scenario(
        (StageTime(1, 2, 4), StageTime(8, 16), StageTime(32, 64)),
        (Message(0, "F", 1, "F", 100), Message(1, "B", 0, "B", 10)),
        (WeightCopy(1, 0, (("F", (1, 1, 1)), ("B", (0, 0, 0))), 1000),),
        Links(copy=0.5),
    )
    more = replace(scenario, workers=(replace(scenario.workers[0], weight=7), *scenario.workers[1:]))
    assert more.busy(0, 3) == scenario.busy(0, 3) + 21
    assert [scenario.busy(worker, 3) for worker in range(3)] == [
        3 * (1 + 2 + 55) + 4 + 500,
        3 * (8 + 16 + 55) + 500,
        3 * (32 + 64),
    ]
