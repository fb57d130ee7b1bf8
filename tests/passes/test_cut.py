"""Cuts by position: forward, backward and weight gradients apart, with parts that are empty."""

from __future__ import annotations

from typing import Any

import pytest
from cached import captured, lowered
from random_cuts import numbered, random_cuts
from small_models import CASES

from fxpipe.errors import CutError
from fxpipe.ir.program import info
from fxpipe.passes.cost import Cost
from fxpipe.passes.cut import Cut
from fxpipe.planner.cuts import Cuts


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        ({"forward": (0, 3, 9), "backward": (0, 9)}, "must have 3 positions, one more than there are workers"),
        ({"forward": (), "backward": ()}, "must have 2 positions, one more than there are workers"),
        ({"forward": (1, 3, 9), "backward": (0, 3, 9)}, "must start with 0, never fall, and end with 9 units"),
        ({"forward": (0, 3, 9), "backward": (0, 3, 8)}, "must start with 0, never fall, and end with 9 units"),
        ({"forward": (0, 5, 3, 9), "backward": (0, 3, 5, 9)}, "forward cuts .* never fall"),
        (
            {"forward": (0, 3, 9), "backward": (0, 4, 9), "weights": (0, 3, 9)},
            "weight gradients of unit 3 are on worker 1, after their backward on worker 0",
        ),
        ({"forward": (0, 3, 9), "backward": (0, 4, 9), "recompute": ((2, 3, 4),)}, "worker 2 cannot compute units 3"),
        ({"forward": (0, 3, 9), "backward": (0, 4, 9), "recompute": ((1, 3, 10),)}, "there are 2 workers and 9 units"),
    ],
)
def test_cuts_that_make_no_sense_are_refused(cuts: dict[str, Any], message: str) -> None:
    with pytest.raises(CutError, match=message):
        Cuts(**cuts)


def test_without_cuts_of_their_own_weight_gradients_go_with_backward() -> None:
    assert Cuts((0, 3, 9), (0, 4, 9)).weights == (0, 4, 9)
    plan = lowered("gpt", forward_at=[captured("gpt")[0].paths[2]]).plan
    assert all(stage.weight_units == stage.backward_units for stage in plan.stages)


@pytest.mark.parametrize("name", CASES)
def test_every_node_lies_where_the_cuts_say(name: str) -> None:
    cuts = random_cuts(name, 3, 0)
    program = Cut(cuts)(Cost()(numbered(name)))
    for node in program:
        record = info(node)
        bounds = cuts.forward if record.phase == "F" else cuts.weights if record.weight else cuts.backward
        assert record.worker is not None
        assert bounds[record.worker] <= record.unit < bounds[record.worker + 1]


def test_the_plan_and_its_summary_tell_weight_gradients_apart() -> None:
    count = len(numbered("function").units)
    cuts = Cuts((0, count, count, count), (0, 4, 8, count), (0, 8, 8, count))
    build = lowered("function", workers=3, cuts=cuts)
    assert [s.weight_units for s in build.plan.stages] == [(0, 8), (8, 8), (8, count)]
    assert [w.weight_units for w in build.workers] == [(0, 8), (8, 8), (8, count)]
    assert [w.begins for w in build.workers] == [
        ("layers.0", "layers.0"), ("nothing", "layers.2"), ("nothing", "layers.4")
    ]  # fmt: skip
    assert [w.forward > 0 for w in build.workers] == [True, False, False]
    assert [w.weight > 0 for w in build.workers] == [True, False, True]
    same = lowered("function", workers=3, cuts=Cuts(cuts.forward, cuts.backward))
    for whole in (build, same):
        total = sum(w.backward + w.weight for w in whole.workers)
        assert total == pytest.approx(sum(w.backward + w.weight for w in same.workers))
    assert build.workers[1].backward == pytest.approx(same.workers[1].backward)
    owners = {p.name: p.owner for p in build.plan.parameters}
    assert {owners[f"layers.{i}.weight"] for i in (0, 1, 2, 3)} == {0}
    assert (
        "backward  units 4 to 7, layers.2 to (no module)\nweights   gradients of nothing\n" in build.files["stage_1.py"]
    )
    assert "weights " not in same.files["stage_1.py"].split('"""')[1]
