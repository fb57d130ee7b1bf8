"""What a run lost is told in words, the largest first, and nothing is told of what was planned."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from played_runs import EVEN, FOUR, Played, losses, row, texts

from fxpipe.observe.time_losses import time_losses


def test_a_run_as_planned_loses_nothing() -> None:
    assert losses(replace(EVEN, steps=1000), EVEN) == []


def test_only_its_forwards_are_slow() -> None:
    found = losses(replace(EVEN, forward=(2.0, 2.5)), EVEN)
    assert texts(found) == ["worker 0 waits 8% for gradients of worker 1, which computes 8% slower than planned"]
    alone = losses(Played((2.6,), (4.0,)), Played((2.0,), (4.0,)))
    assert texts(alone) == ["worker 0's forwards take 1.3 times what was planned"]
    assert alone[0]["share"] == pytest.approx(0.6 / 6.6)


def test_all_slower_alike_is_one_loss_and_nobody_waits() -> None:
    found = losses(replace(FOUR, forward=(3.0,) * 4, backward=(6.0,) * 4, steps=1000), FOUR)
    assert texts(found) == ["forwards and backwards take 1.5 times what was planned, on all workers"]
    assert found[0]["worker"] is None
    assert found[0]["share"] == pytest.approx(1 / 3, abs=0.01)


def test_slow_updates() -> None:
    plan = replace(EVEN, update=1.0)
    found = losses(replace(plan, update=2.0), plan)
    assert sorted(texts(found)) == [f"worker {k}'s updates take 2.0 times what was planned" for k in range(2)]
    unknown = losses(plan)
    assert "worker 0 spends 14% in updates, the other 14%" in texts(unknown)


def test_a_short_run_fills_and_empties() -> None:
    found = losses(replace(FOUR, steps=8), FOUR)
    fill = next(row for row in found if row["cause"] == "fill")
    assert fill["worker"] is None
    assert fill["text"].startswith("the pipeline fills and empties for ")
    assert fill["text"].endswith("of the run: train longer")
    assert not {"link", "compute"} & {row["cause"] for row in found}, "it waits for nothing but its ends"


@pytest.mark.parametrize("steps", [1, 2, 4, 8])
@pytest.mark.parametrize("known", [False, True])
def test_the_filling_is_not_told_again_as_waiting(steps: int, known: bool) -> None:
    case = replace(EVEN, steps=steps)
    found = losses(case, EVEN if known else None)
    assert found[0]["cause"] == "fill"
    assert found[0]["share"] == pytest.approx(6 / (6 + 6 * steps)), "worker 0, until its first gradient arrives"
    waits = [loss for loss in found if loss["cause"] == "wait"]
    assert sum(loss["share"] for loss in waits) == pytest.approx(2 / (6 + 6 * steps) if steps > 1 else 0, abs=1e-6)


def test_a_worker_fills_no_longer_than_it_waits() -> None:
    filled = row(0, F=5.0, wait=5.0) | {"fill": 7.0, "waits": [{"what": "gradient", "from": 1, "seconds": 5.0}]}
    assert [loss["cause"] for loss in time_losses([filled, row(1, F=10.0)], None, 10.0, 10, 1)] == ["fill"]
    waits = [("activation", 0, 3.0), ("gradient", 2, 1.0), ("loss", 3, 1.0)]
    middle = row(0, F=5.0, wait=5.0) | {"waits": [{"what": w, "from": s, "seconds": t} for w, s, t in waits]}
    kept = [loss["share"] for loss in time_losses([middle | {"fill": 2.0}], None, 10.0, 10, 1)]
    assert kept == pytest.approx([0.2, 0.15, 0.1]), "the filling, half of the waits for values, and for the loss"


def test_a_machine_that_is_twice_as_slow() -> None:
    plan = Played((2.72, 2.72), (6.0, 6.4), predict=(2.34, 2.0), update=1.0, steps=1000)
    slow = Played((5.08, 5.6), (14.0, 13.8), predict=(4.46, 4.2), update=2.1, steps=1000)
    first = losses(slow, plan)[0]
    assert first["text"].startswith("forwards and backwards take 2.1 times what was planned, on all workers")
    assert first["text"].endswith("on all workers, and updates 2.1 times")
    assert first["cause"] == "compute"
    first = losses(replace(slow, update=0.0), replace(plan, update=0.0))[0]
    assert first["text"] == "forwards and backwards take 2.1 times what was planned, on all workers"


def test_what_is_received_beyond_the_plan() -> None:
    plan = {"workers": [{"forward_ms": 4.0, "backward_ms": 4.0, "update_ms": 0.0, "copy_ms": 1.0}] * 2}
    rows = [row(k, F=4.0, B=4.0, receive=2.0) | {"took": {"F": 4.0, "B": 4.0, "update": 0.0}} for k in range(2)]
    found = time_losses(rows, plan, 10.0, 1000, 1)
    assert texts(found) == ["worker 0 spends 10% more receiving than planned, the other 10%"]
    sent = [row(k, F=4.0, B=4.0, send=1.0) | {"took": {"F": 4.5, "B": 4.5, "update": 0.0}} for k in range(2)]
    assert time_losses(sent, plan, 10.0, 1000, 1) == [], "copying was planned, if not as part of forwards"


def test_without_a_forecast_only_what_was_seen_is_said() -> None:
    found = losses(replace(EVEN, forward=(4.0, 2.0), steps=1000))
    assert texts(found) == ["worker 1 waits 25% for activations of worker 0"]
    assert found[0] == {"worker": 1, "share": pytest.approx(0.25, abs=0.01), "cause": "wait", "text": texts(found)[0]}


def test_several_kinds_of_values_of_one_worker_are_one_wait() -> None:
    waits = [("input", 0.3), ("token", 0.1), ("activation", 0.6)]
    second = row(1, F=9.0, wait=1.0) | {"waits": [{"what": w, "from": 0, "seconds": s} for w, s in waits]}
    assert texts(time_losses([row(0, F=10.0), second], None, 10.0, 10, 1)) == [
        "worker 1 waits 10% for activations and inputs of worker 0"
    ]


def test_nothing_to_say_of_nothing() -> None:
    assert time_losses([], None, 1.0, 1, 1) == []
    assert time_losses([row(0, F=1.0)], None, 10.0, 0, 1) == []
    assert time_losses([row(0, F=1.0)], None, 0.0, 5, 1) == []
    assert time_losses([{"worker": 0}], None, 1.0, 1, 1) == []


times = st.floats(0, 5)


@given(
    st.integers(1, 4).flatmap(
        lambda n: st.tuples(*[st.lists(times, min_size=n, max_size=n) for _ in range(6)], st.booleans())
    ),
    times,
)
def test_shares_are_shares_whatever_happens(columns: Any, data: float) -> None:
    forward, backward, link, send, f, b, known = columns
    case = Played(
        tuple(x + 0.01 for x in forward),
        tuple(x + 0.01 for x in backward),
        tuple(link),
        data,
        0.1,
        tuple(send),
        steps=9,
    )
    plan = replace(case, forward=tuple(x + 0.01 for x in f), backward=tuple(x + 0.01 for x in b)) if known else None
    found = losses(case, plan)
    assert found == losses(case, plan)
    assert len(found) <= 3
    assert [r["share"] for r in found] == sorted((r["share"] for r in found), reverse=True)
    for loss in found:
        assert 0.01 <= loss["share"] <= 1
        assert math.isfinite(loss["share"])
        assert "nan" not in loss["text"]
    json.dumps(found, allow_nan=False)
