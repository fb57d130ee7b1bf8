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
    assert texts(found) == [
        "worker 0 waits 8% for gradients of worker 1",
        "worker 1's forwards take 1.2 times what was planned",
    ]
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


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ((4, 2, 2), "4 processes × 2 threads share 2 cores (fewer processes on this host, or --local)"),
        ((4, 2, 4), "4 processes × 2 threads share 4 cores (--threads 1, fewer processes on this host, or --local)"),
        ((1, 8, 2), "1 process × 8 threads share 2 cores (--threads 2)"),
        ((4, 1, 4, 0.4), "a worker had a core for at most 40% of that time: other programs use the cores (end them, "
         "or use another host)"),
        ((4, 1, 4), None),
        ((4, 4, 2, None), None),
    ],
)  # fmt: skip
def test_cores_that_others_take_are_the_cause(host: tuple[Any, ...], why: str | None) -> None:
    """158 times what was planned says nothing: who shares which cores says what to do."""
    slow = replace(FOUR, forward=(316.0,) * 4, backward=(632.0,) * 4, steps=1000)
    found = losses(slow, FOUR, host=host)[0]["text"]
    assert found == "forwards and backwards take 158.0 times what was planned, on all workers" + (
        f": {why}" if why else ""
    )
    one = losses(replace(FOUR, forward=(2.0, 2.0, 4.0, 2.0), steps=1000), FOUR, host=host)
    (text,) = (loss["text"] for loss in one if loss["worker"] == 2)
    assert text.split(";")[0] == "worker 2's forwards take 2.0 times what was planned" + (f": {why}" if why else "")
    assert not any(" share " in text or " core " in text for text in texts(losses(FOUR, FOUR, host=host)))


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
    waits = [("input", 0.1), ("token", 0.3), ("activation", 0.6)]
    second = row(1, F=9.0, wait=1.0) | {"waits": [{"what": w, "from": 0, "seconds": s} for w, s in waits]}
    assert texts(time_losses([row(0, F=10.0), second], None, 10.0, 10, 1)) == [
        "worker 1 waits 10% for activations and pace signals of worker 0"
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


@pytest.mark.parametrize("schedule", ["async", "1f1b"])
@pytest.mark.parametrize("slow", [0, 1, 3])
def test_a_slow_worker_is_named_and_those_that_wait_are_one_loss(schedule: str, slow: int) -> None:
    plan = replace(FOUR, schedule=schedule, microbatches=1 if schedule == "async" else 4)
    times = tuple(3.0 if k == slow else 2.0 for k in range(4))
    found = losses(replace(plan, forward=times, backward=tuple(2 * t for t in times)), plan, schedule=schedule)
    told = next(row for row in found if row["cause"] == "compute")
    assert told["text"] == f"worker {slow}'s forwards and backwards take 1.5 times what was planned"
    assert next(row for row in found if row["cause"] == "wait")["text"].endswith("; 2 other workers wait, too")
    assert {row["cause"] for row in found} <= {"compute", "wait", "flush", "fill"}


def test_uneven_cuts() -> None:
    uneven = Played((2.0, 2.0), (5.0, 3.0), steps=1000)
    found = losses(uneven, uneven)
    assert texts(found) == [
        "worker 1 waits 29% for activations of worker 0: worker 0 has 40% more to do (the cuts are uneven)"
    ]
    assert found[0]["cause"] == "uneven"
    slower = replace(uneven, forward=(3.0, 3.0), backward=(7.5, 4.5))
    assert "uneven" in [row["cause"] for row in losses(slower, uneven)], "all slower alike changes nothing about that"


@pytest.mark.parametrize("planned", [0.0, 3.0])
@pytest.mark.parametrize("slower", [1.3, 2.0, 3.0])
def test_messages_that_take_longer(planned: float, slower: float) -> None:
    plan = replace(EVEN, link=(planned,))
    found = losses(replace(plan, link=(slower * (planned or 5.0),)), plan)
    assert len(found) == 1
    assert found[0]["cause"] == "link"
    part = ", 33% planned" if planned else ""
    assert f"{part}: messages take longer than planned; worker" in found[0]["text"]


def test_what_was_planned_to_wait() -> None:
    plan = replace(EVEN, link=(3.0,))
    as_planned = losses(replace(plan, link=(3.1,)), plan)
    assert [row["cause"] for row in as_planned] == ["plan"]
    assert as_planned[0]["text"].endswith(", as planned; worker 0 waits, too")
    flush = replace(EVEN, schedule="1f1b", microbatches=4)
    found = losses(flush, flush, schedule="1f1b")
    assert found[0]["cause"] == "flush"
    assert "the pipeline empties after every minibatch" in found[0]["text"]
    assert losses(flush, flush)[0]["cause"] == "plan", "without the schedule's name"


def test_data_sends_and_predictions_are_told_of_whom_they_are() -> None:
    assert "worker 0 spends 14% in train_data()" in texts(losses(replace(EVEN, data=1.0), EVEN))
    found = texts(losses(replace(EVEN, send=(0.0, 0.6), predict=(0.5, 0.5)), EVEN))
    assert "worker 1's forwards and backwards take 1.3 times what was planned: it spends 16% sending" in found
    assert "worker 0's forwards take 1.2 times what was planned: it spends 6% predicting weights" in found
    unknown = losses(replace(EVEN, send=(0.0, 0.6), predict=(0.5, 0.5)))
    assert "worker 0 spends 6% predicting weights, the other 6%" in texts(unknown)
    plan = replace(EVEN, predict=(1.0, 1.0), steps=1000)
    assert losses(plan, plan) == [], "they are part of forwards"
    assert texts(losses(replace(plan, predict=(3.0, 3.0)), plan)) == [
        "forwards take 1.7 times what was planned, on all workers, which spend up to 33% predicting weights"
    ]


def test_norm_loss_and_weights_are_said_and_not_blamed() -> None:
    plan = {"bubble": 0.0, "workers": [{"forward_ms": 3.0, "backward_ms": 6.5, "update_ms": 0.0}] * 2}
    first = row(0, F=3.0, B=6.4, wait=0.6) | {"waits": [{"what": "up", "from": 1, "seconds": 0.4}]}
    first["waits"].append({"what": "loss", "from": 1, "seconds": 0.2})
    second = row(1, F=3.0, B=6.5, wait=0.5) | {"waits": [{"what": "weights", "from": 0, "seconds": 0.5}]}
    assert texts(time_losses([first, second], plan, 10.0, 1000, 1)) == [
        "worker 1 waits 5% for weights of worker 0",
        "worker 0 waits 4% for the gradients' norms or overflow check of worker 1",
        "worker 0 waits 2% for the loss of worker 1",
    ]


def test_copied_messages_are_planned_work() -> None:
    plan = replace(EVEN, copy=0.5, steps=1000)
    assert losses(plan, plan) == [], "the bubble has no room for them"
    three = Played((2.0,) * 3, (4.0,) * 3, copy=0.5, steps=1000)
    assert texts(losses(three, three)) == [
        "worker 0 waits 13% for gradients of worker 1: worker 1 has 14% more to do (it copies more messages); "
        "worker 2 waits, too"
    ]


@given(
    st.integers(2, 5),
    st.sampled_from(["async", "1f1b", "gpipe"]),
    st.sampled_from(["none", "compute", "uneven", "data", "link"]),
    st.integers(0, 4),
    st.floats(0.3, 2),
    st.sampled_from([0.0, 0.0, 1.0, 4.0]),
    st.sampled_from([0.0, 3.0]),
)
def test_nobody_is_blamed_who_did_nothing(
    n: int, schedule: str, fault: str, where: int, much: float, jitter: float, link: float
) -> None:
    """With one fault or none, and actions that now and then take longer, only what is there is named."""
    between, where = where % (n - 1), where % n
    batches = 1 if schedule == "async" else 3
    plan = case = Played(
        (2.0,) * n, (4.0,) * n, (link,) * (n - 1), schedule=schedule, microbatches=batches, steps=80
    )  # fmt: skip
    more = tuple(1 + much * (k == where) for k in range(n))
    if fault in ("compute", "uneven"):
        case = replace(plan, forward=tuple(2 * m for m in more), backward=tuple(4 * m for m in more))
        plan = case if fault == "uneven" else plan
    elif fault == "data":
        case = replace(plan, data=6 * much)
    elif fault == "link":  # 1.3 to 3 times slower, where it was planned
        case = replace(plan, link=tuple(link + (link or 20) * much * (k == between) for k in range(n - 1)))
    found = losses(replace(case, jitter=jitter), plan, schedule=schedule)
    for loss in found:
        assert loss["cause"] != "link" or fault == "link", loss
        assert loss["cause"] != "uneven" or fault == "uneven", loss
        assert "(the cuts are uneven)" not in loss["text"] or f"worker {where} has" in loss["text"]
        assert "train_data" not in loss["text"] or fault == "data", loss
        assert jitter or loss["cause"] != "compute" or fault == "compute", loss
        assert schedule != "async" or loss["cause"] != "flush"
        assert loss["cause"] not in ("update", "receive", "other")
    if jitter == 0 and fault in ("compute", "data"):
        assert fault in [loss["cause"] for loss in found], texts(found)
    if jitter == 0 and fault == "link" and schedule == "async" and n == 2:
        assert found[0]["cause"] == "link", texts(found)
