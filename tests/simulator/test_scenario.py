"""What cannot be simulated is refused, all of it at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fxpipe.errors import ProfileError
from fxpipe.planner.links import Links
from fxpipe.simulator import Message, Scenario, StageTime, WeightCopy

TWO = (StageTime(1, 2), StageTime(1, 2))


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"links": Links(bandwidth=0)}, "from worker 0 to 1 has bandwidth 0"),
        ({"links": Links(latency=((0, 0), (-1, 0)))}, "from worker 1 to 0 has bandwidth inf and latency -1"),
        ({"links": Links(copy=-1)}, "copy in -1 seconds a byte"),
        ({"links": Links(latency=((0.0,),))}, "latency matrix of the links is 1×1, for 2 workers"),
    ],
)
def test_nonsense_is_refused(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(ProfileError, match=what):
        Scenario(**{"workers": TWO, **fields})


def test_all_problems_are_listed() -> None:
    with pytest.raises(ProfileError) as caught:
        Scenario(TWO, links=Links(0.0, 0.0, -1.0))
    assert str(caught.value).count(";") == 2


def test_the_links_between_workers_that_never_speak_may_be_anything() -> None:
    far = Links(((0, 1, 0), (1, 0, 1), (0, 1, 0)))
    Scenario((*TWO, *TWO[:1]), links=far)
    with pytest.raises(ProfileError, match="from worker 0 to 2"):
        Scenario((*TWO, *TWO[:1]), (Message(0, "F", 2, "B", 1),), links=far)


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
