"""What a run waited is blamed on what made it: runs are played with a known fault, and the words must name it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from played_runs import EVEN, FOUR, Played, losses, row, texts

from fxpipe.time_losses import time_losses


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
    assert "worker 0 waits 16% for gradients of worker 1, which spends 16% sending" in texts(found)
    predict = next(row for row in found if row["cause"] == "predict")
    assert predict["text"] == "worker 0 spends 6% predicting weights, the other 6%"


def test_the_flush_of_a_synchronous_schedule() -> None:
    plan = replace(EVEN, schedule="1f1b", microbatches=4)
    found = losses(plan, plan, schedule="1f1b")
    assert found[0]["cause"] == "flush"
    assert "waits 20% for" in found[0]["text"]
    assert "the pipeline empties after every minibatch" in found[0]["text"]
    assert "link" not in " ".join(texts(found))
    assert losses(plan, plan)[0]["cause"] == "plan", "without the schedule's name"
    slow = losses(replace(plan, forward=(4.0, 2.0), backward=(8.0, 4.0)), plan, schedule="1f1b")
    assert any("worker 0, which computes 100% slower than planned" in text for text in texts(slow))
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


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 5),
    st.sampled_from(["async", "1f1b", "gpipe"]),
    st.sampled_from(["none", "compute", "uneven", "data", "link"]),
    st.integers(0, 4),
    st.floats(0.3, 3),
    st.floats(0, 4),
)
def test_nobody_is_blamed_who_did_nothing(
    n: int, schedule: str, fault: str, where: int, much: float, jitter: float
) -> None:
    """With one fault or none, and actions that now and then take longer, only what is there is named."""
    where %= n
    batches = 1 if schedule == "async" else 3
    even = Played((2.0,) * n, (4.0,) * n, schedule=schedule, microbatches=batches, steps=80)
    more = tuple(1 + much * (k == where) for k in range(n))
    plan = case = even
    if fault in ("compute", "uneven"):
        case = replace(even, forward=tuple(2 * m for m in more), backward=tuple(4 * m for m in more))
        plan = case if fault == "uneven" else even
    elif fault == "data":
        case = replace(even, data=6 * much)
    elif fault == "link":
        case = replace(even, link=tuple(20 * much * (k == where % (n - 1)) for k in range(n - 1)))
    case = replace(case, jitter=jitter)
    found = losses(case, plan, schedule=schedule)
    for loss in found:
        text = loss["text"]
        if fault != "link":
            assert loss["cause"] != "link", (text, fault)
        elif "link" in text:
            assert schedule == "async", "with a flush it cannot be told which"
            pair = sorted((where % (n - 1), where % (n - 1) + 1))
            assert all(f"worker {k}" in text for k in pair) or f"workers {pair[0]} and {pair[1]}" in text
        if "uneven" in text:
            assert fault == "uneven"
            assert f"worker {where} has" in text
        if "train_data" in text:
            assert fault == "data"
        if "slower than planned" in text and "computes" in text and fault == "compute" and jitter == 0:
            assert f"worker {where}" in text
        if jitter == 0 and fault != "compute":
            assert loss["cause"] != "compute"
        if schedule == "async":
            assert loss["cause"] not in ("flush", "plan")
