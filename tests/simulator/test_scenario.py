"""What cannot be simulated is refused, all of it at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fxpipe.errors import ProfileError
from fxpipe.planner.links import Links
from fxpipe.simulator import NEVER, Message, Scenario, StageTime, WeightCopy

TWO = (StageTime(1, 2), StageTime(1, 2))


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"workers": ()}, "at least one worker"),
        ({"workers": (StageTime(-1, 2),)}, r"worker 0 costs StageTime\(forward=-1"),
        ({"workers": (StageTime(1, float("nan")),)}, "worker 0 costs"),
        ({"sums": (1.0,)}, r"sums of 2 workers take \(1.0,\)"),
        ({"messages": (Message(0, "F", 2, "F", 1),)}, r"Message\(src=0.* names a worker that is not there"),
        ({"messages": (Message(1, "F", 1, "B", 1),)}, "or one twice"),
        ({"messages": (Message(-1, "F", 1, "B", 1),)}, "names a worker that is not there"),
        ({"messages": (Message(0, "F", 1, "F", -1),)}, "no bytes above zero"),
        ({"messages": (Message(0, "F", 1, "F", 1, made=1.5),)}, "a point outside 0 to 1"),
        ({"messages": (Message(0, "F", 1, "F", 1, needed=-0.5),)}, "a point outside 0 to 1"),
        ({"messages": (Message(1, "F", 0, "F", 1),)}, "forwards of earlier workers alone"),
        ({"messages": (Message(0, "B", 1, "F", 1),)}, "forwards of earlier workers alone"),
        ({"messages": (Message(0, "B", 1, "B", 1),)}, "sends to earlier workers alone"),
        ({"messages": (Message(0, "W", 1, "F", 1),)}, "forwards of earlier workers alone"),
        ({"messages": (Message(1, "W", 0, "B", 1),)}, "a backward waits for no weight gradients"),
        ({"messages": (Message(0, "W", 1, "W", 1),)}, "sends to earlier workers alone"),
        (
            {"weight_copies": (WeightCopy(0, 2, (("F", (0,)),), 1),)},
            r"Copy\(owner=0.* names a worker that is not there",
        ),
        ({"weight_copies": (WeightCopy(1, 1, (("F", (0,)),), 1),)}, "or one twice"),
        ({"weight_copies": (WeightCopy(0, 1, (), 1),)}, "no reader"),
        ({"weight_copies": (WeightCopy(0, 1, (("F", (NEVER, NEVER)),), 1),)}, "a lag below zero"),
        ({"weight_copies": (WeightCopy(0, 1, (("F", (1, -2)),), 1),)}, "a lag below zero"),
        ({"weight_copies": (WeightCopy(0, 1, (("F", (0,)),), -1),)}, "no bytes above zero"),
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
        Scenario((StageTime(-1, 2), StageTime(1, 2)), (Message(0, "F", 5, "F", 1), Message(1, "F", 0, "F", 1)))
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
