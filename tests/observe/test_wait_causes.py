"""What a run waited is blamed on what made it: runs are played with a known fault, and the words must name it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from played_runs import EVEN, FOUR, Played, losses, row, texts

from fxpipe.observe.time_losses import time_losses


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_worker(slow: int) -> None:
    times = tuple(4.0 if k == slow else 2.0 for k in range(2)), tuple(6.0 if k == slow else 4.0 for k in range(2))
    found = losses(replace(EVEN, forward=times[0], backward=times[1]), EVEN)
    values = "activations" if slow == 0 else "gradients"
    assert found[0]["cause"] == "compute"
    effect = f"worker {1 - slow} waits 40% for {values} of worker {slow}"
    assert found[0]["text"] == f"{effect}, which computes 67% slower than planned"
    assert found[0]["share"] == pytest.approx(0.4, abs=0.02)


def test_one_slow_worker_among_many_is_one_loss() -> None:
    found = losses(replace(FOUR, forward=(2.0, 3.0, 2.0, 2.0), backward=(4.0, 6.0, 4.0, 4.0)), FOUR)
    assert found[0]["cause"] == "compute"
    assert found[0]["text"].endswith("; 2 other workers wait, too")
    assert "worker 1" in found[0]["text"]
    assert "computes 50% slower than planned" in found[0]["text"]
    assert not any("link" in row["text"] for row in found)


def test_uneven_cuts() -> None:
    uneven = Played((2.0, 2.0), (5.0, 3.0), steps=1000)
    found = losses(uneven, uneven)
    assert texts(found) == [
        "worker 1 waits 29% for activations of worker 0: worker 0 has 40% more to do (the cuts are uneven)"
    ]
    assert found[0]["cause"] == "uneven"
    slower = replace(uneven, forward=(3.0, 3.0), backward=(7.5, 4.5))
    assert "uneven" in [row["cause"] for row in losses(slower, uneven)], "all slower alike changes nothing about that"


def test_a_slow_link_between_two() -> None:
    found = losses(replace(EVEN, link=(10.0,)), EVEN)
    assert len(found) == 1
    assert found[0]["cause"] == "link"
    assert "the link between them is slower than planned; worker" in found[0]["text"]
    assert losses(replace(EVEN, link=(10.0,)), replace(EVEN, link=(10.0,)))[0]["cause"] == "plan", "it was planned so"


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_which_of_many_links_is_slow(slow: int) -> None:
    found = losses(replace(FOUR, link=tuple(30.0 if k == slow else 0.0 for k in range(3))), FOUR)
    assert found[0]["cause"] == "link"
    named = f"link between workers {slow} and {slow + 1} is slower than planned"
    between = "link between them is slower than planned"
    pair = {f"worker {slow}", f"worker {slow + 1}"}
    head = found[0]["text"]
    assert named in head or (between in head and all(name in head for name in pair))
    assert {row["cause"] for row in found} <= {"link", "fill"}


def test_data() -> None:
    found = losses(replace(EVEN, data=1.0), EVEN)
    assert found[0]["cause"] == "data"
    assert texts(found) == [
        "worker 1 waits 14% for activations of worker 0, which spends 14% in train_data()"
    ] or texts(found) == ["worker 0 spends 14% in train_data(); worker 1 waits for it"]


def test_sending_and_predicting() -> None:
    found = losses(replace(EVEN, send=(0.0, 0.6), predict=(0.5, 0.5)), EVEN)
    assert {row["cause"] for row in found} == {"send", "predict"}
    slow = "worker 1's forwards and backwards take 1.3 times what was planned"
    assert texts(found) == [
        f"{slow}: it spends 16% sending; worker 0 waits for it",
        "worker 0's forwards take 1.2 times what was planned: it spends 6% predicting weights",
    ]
    sends = losses(replace(EVEN, send=(0.0, 0.6)), EVEN)
    assert texts(sends)[0].startswith("worker 0 waits 17% for gradients of worker 1, which spends 17% sending")
    unknown = losses(replace(EVEN, send=(0.0, 0.6), predict=(0.5, 0.5)))
    assert "worker 0 spends 6% predicting weights, the other 6%" in texts(unknown)


def test_the_flush_of_a_synchronous_schedule() -> None:
    plan = replace(EVEN, schedule="1f1b", microbatches=4)
    found = losses(plan, plan, schedule="1f1b")
    assert found[0]["cause"] == "flush"
    assert "waits 20% for" in found[0]["text"]
    assert "the pipeline empties after every minibatch" in found[0]["text"]
    assert "link" not in " ".join(texts(found))
    assert losses(plan, plan)[0]["cause"] == "plan", "without the schedule's name"
    slow = losses(replace(plan, forward=(4.0, 2.0), backward=(8.0, 4.0)), plan, schedule="1f1b")
    assert "worker 0 computes 100% slower than planned" in slow[0]["text"]
    assert "link" not in " ".join(texts(slow))


def test_norm_loss_and_weights_are_said_and_not_blamed() -> None:
    plan = {"bubble": 0.0, "workers": [{"forward_ms": 3.0, "backward_ms": 6.5, "update_ms": 0.0}] * 2}
    first = row(0, F=3.0, B=6.4, wait=0.6) | {"waits": [{"what": "norm", "from": 1, "seconds": 0.4}]}
    first["waits"].append({"what": "loss", "from": 1, "seconds": 0.2})
    second = row(1, F=3.0, B=6.5, wait=0.5) | {"waits": [{"what": "weights", "from": 0, "seconds": 0.5}]}
    assert texts(time_losses([first, second], plan, 10.0, 1000, 1)) == [
        "worker 1 waits 5% for weights of worker 0",
        "worker 0 waits 4% for the gradients' norm of worker 1",
        "worker 0 waits 2% for the loss of worker 1",
    ]


def test_many_workers() -> None:
    plan = Played((1.0,) * 64, (2.0,) * 64)
    found = losses(replace(plan, forward=(2.0, *(1.0,) * 63), steps=300), plan)
    assert found[0]["cause"] == "compute"
    assert found[0]["text"].endswith("62 other workers wait, too")


@pytest.mark.parametrize("slower", [1.3, 1.5, 2.0, 2.2, 3.0])
def test_a_link_that_was_planned_and_is_slower(slower: float) -> None:
    plan = replace(EVEN, link=(3.0,))
    found = losses(replace(plan, link=(3.0 * slower,)), plan)
    assert len(found) == 1
    assert found[0]["cause"] == "link"
    assert ", 33% planned: the link between them is slower than planned; worker" in found[0]["text"]
    as_planned = losses(replace(plan, link=(3.1,)), plan)
    assert [row["cause"] for row in as_planned] == ["plan"]
    assert as_planned[0]["text"].endswith(", as planned; worker 0 waits, too")


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("slow", range(4))
def test_a_flush_does_not_head_a_run_with_a_slow_worker(schedule: str, slow: int) -> None:
    plan = replace(FOUR, schedule=schedule, microbatches=4)
    times = tuple(3.0 if k == slow else 2.0 for k in range(4))
    case = replace(plan, forward=times, backward=tuple(2 * time for time in times))
    found = losses(case, plan, schedule=schedule)
    assert f", 43% planned: worker {slow} computes 50% slower than planned; 2 other workers wait" in found[0]["text"]
    assert [row["cause"] for row in found] == ["compute", "flush"]
    assert f"worker {slow} waits" in found[1]["text"], "it waits as planned"


def test_a_link_with_a_slow_worker() -> None:
    plan = replace(EVEN, link=(3.0,))
    found = losses(replace(plan, forward=(2.0, 3.0), backward=(4.0, 6.0)), plan)
    slow = "worker 0 waits 42% for gradients of worker 1, 33% planned: worker 1 computes 50% slower than planned"
    assert found[0]["text"] == slow
    assert "link" not in " ".join(texts(found))


def test_a_wait_beyond_the_plan_whose_cause_cannot_be_told() -> None:
    plan = {"milliseconds": 10.0, "workers": [{"forward_ms": 3.0, "backward_ms": 5.0, "update_ms": 0.0}] * 2}
    first = row(0, F=3.0, B=4.0, wait=3.0) | {"waits": [{"what": "gradient", "from": 1, "seconds": 3.0}]}
    found = time_losses([first, row(1, F=4.0, B=6.0)], plan, 10.0, 1000, 1)
    assert "worker 0 waits 30% for gradients of worker 1, 20% planned: worker 1 computes 25%" in found[0]["text"]
    found = time_losses([first, row(1, F=3.0, B=5.0)], plan, 10.0, 1000, 1)
    assert texts(found) == [
        "worker 0 waits 30% for gradients of worker 1, 20% planned: it computes 12% faster than planned"
    ]
    first["spent"], first["took"] = first["spent"] | {"B": 5.0}, first["took"] | {"B": 5.0}
    found = time_losses([first, row(1, F=3.0, B=5.0)], plan, 10.0, 1000, 1)
    assert texts(found) == ["worker 0 waits 30% for gradients of worker 1, 20% planned"]
    assert found[0]["cause"] == "wait"


def test_copied_messages_are_planned_work() -> None:
    plan = replace(EVEN, copy=0.5, steps=1000)
    assert losses(plan, plan) == [], "the bubble has no room for them"
    three = Played((2.0,) * 3, (4.0,) * 3, copy=0.5, steps=1000)
    assert texts(losses(three, three)) == [
        "worker 0 waits 13% for gradients of worker 1: worker 1 has 14% more to do (it copies more messages); "
        "worker 2 waits, too"
    ]
    linked = replace(plan, link=(5.0,))
    assert [row["cause"] for row in losses(linked, linked)] == ["plan"]
    assert [row["cause"] for row in losses(replace(linked, link=(7.0,)), linked)] == ["link"]


def test_slow_predictions() -> None:
    plan = replace(EVEN, predict=(1.0, 1.0), steps=1000)
    assert losses(plan, plan) == [], "they are part of forwards"
    found = losses(replace(plan, predict=(1.0, 3.0)), plan)
    assert texts(found) == ["worker 0 waits 22% for gradients of worker 1, which spends 33% predicting weights"]
    assert found[0]["cause"] == "predict"
    found = losses(replace(plan, predict=(3.0, 3.0)), plan)
    assert texts(found) == [
        "forwards take 1.7 times what was planned, on all workers, which spend up to 33% predicting weights"
    ]


FAULTS = ["none", "compute", "uneven", "data", "link", "predict"]


@given(
    st.integers(2, 5),
    st.sampled_from(["async", "1f1b", "gpipe"]),
    st.sampled_from(FAULTS),
    st.integers(0, 4),
    st.floats(0.3, 2),
    st.sampled_from([0.0, 0.0, 1.0, 4.0]),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([0.0, 3.0]),
    st.sampled_from([0.0, 0.3]),
)
def test_nobody_is_blamed_who_did_nothing(
    n: int, schedule: str, fault: str, where: int, much: float, jitter: float, predict: float, link: float, copy: float
) -> None:
    """With one fault or none, and actions that now and then take longer, only what is there is named."""
    between = where % (n - 1)
    where %= n
    batches = 1 if schedule == "async" else 3
    even = Played(
        (2.0,) * n, (4.0,) * n, (link,) * (n - 1), predict=(predict,) * n, copy=copy, schedule=schedule,
        microbatches=batches, steps=80,
    )  # fmt: skip
    more = tuple(1 + much * (k == where) for k in range(n))
    plan = case = even
    if fault in ("compute", "uneven"):
        case = replace(even, forward=tuple(2 * m for m in more), backward=tuple(4 * m for m in more))
        plan = case if fault == "uneven" else even
    elif fault == "data":
        case = replace(even, data=6 * much)
    elif fault == "link":  # 1.3 to 3 times slower, where it was planned
        case = replace(even, link=tuple(link + (link or 20) * much * (k == between) for k in range(n - 1)))
    elif fault == "predict":
        case = replace(even, predict=tuple(predict + 4 * (m - 1) for m in more))
    case = replace(case, jitter=jitter)
    found = losses(case, plan, schedule=schedule)
    for loss in found:
        text = loss["text"]
        if fault != "link":
            assert loss["cause"] != "link", (text, fault)
        elif "link" in text:
            assert schedule == "async", "with a flush it cannot be told which"
            pair = (between, between + 1)
            assert all(f"worker {k}" in text for k in pair) or f"workers {pair[0]} and {pair[1]}" in text
        if "(the cuts are uneven)" in text:
            assert fault == "uneven"
            assert f"worker {where} has" in text
        if "train_data" in text:
            assert fault == "data"
        if jitter == 0 and fault == "compute" and "slower than planned" in text:
            assert f"worker {where} computes" in text or f"worker {where}, which computes" in text
        if jitter == 0 and fault != "compute":
            assert loss["cause"] != "compute", text
        if jitter == 0 and loss["cause"] in ("predict", "send"):
            assert fault == "predict"
            assert f"worker {where}" in text
        if schedule == "async":
            assert loss["cause"] != "flush"
            assert loss["cause"] != "plan" or link
        assert loss["cause"] != "uneven" or fault == "uneven" or (copy and n > 2)
        assert loss["cause"] not in ("update", "receive", "other")
    if jitter == 0 and fault in ("compute", "data", "predict"):
        assert fault in [loss["cause"] for loss in found], texts(found)
    if jitter == 0 and fault == "link" and schedule == "async" and n == 2:
        assert found[0]["cause"] == "link", texts(found)
