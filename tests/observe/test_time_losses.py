"""What a run lost by filling, uneven cuts and crowded cores: nothing is said of what was planned, or small."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.observe.run_json import LostTime, WorkerJson
from fxpipe.observe.time_losses import LEAST, time_losses
from fxpipe.observe.trace import KINDS

STEPS = 1000


def row(number: int, rank: int | None = None, fill: float = 0.0, seconds: float = 10.0, **spent: float) -> WorkerJson:
    return WorkerJson(
        worker=number,
        rank=number if rank is None else rank,
        seconds=seconds,
        spent=dict.fromkeys(KINDS, 0.0) | spent,
        took={kind: spent.get(kind, 0.0) for kind in ("F", "B", "update")},
        fill=fill,
    )


def host_of(processes: int, threads: int, cores: int, seconds: float | None) -> dict[str, Any]:
    return {"processes": processes, "threads": threads, "cores": cores, "cpu_seconds": seconds}


def losses(rows: Sequence[WorkerJson], *planned: tuple[float, ...]) -> list[LostTime]:
    """Of a run of ten seconds.

    Args:
        planned: forward, backward, update and copies of each worker, in milliseconds of a minibatch.
    """
    keys = ("forward_ms", "backward_ms", "update_ms", "copy_ms")
    forecast = (
        {"workers": [dict(zip(keys, (*times, 0.0, 0.0), strict=False)) for times in planned]} if planned else None
    )
    return time_losses(rows, forecast, 10.0, STEPS, 1)


def texts(rows: Sequence[LostTime]) -> list[str]:
    return [row["text"] for row in rows]


def test_a_run_as_planned_loses_nothing() -> None:
    assert losses([row(0, F=3.0, B=6.5), row(1, F=3.0, B=6.5)], (3.0, 6.5), (3.0, 6.5)) == []


def test_a_short_run_fills_and_empties() -> None:
    ends = [row(0, F=3.0, B=5.0, wait=2.0, fill=1.5), row(1, F=3.0, B=5.0, seconds=9.0, wait=1.0, fill=1.0)]
    assert losses(ends) == [
        {
            "worker": None,
            "share": pytest.approx(0.2),
            "cause": "fill",
            "text": "the pipeline fills and empties for 20% of the run: train longer",
        }
    ]


def test_a_worker_fills_no_longer_than_it_waits() -> None:
    (loss,) = losses([row(0, F=4.0, B=5.0, wait=1.0, fill=7.0)])
    assert loss["share"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("planned", "share", "more"),
    [
        (((2.0, 4.0), (1.0, 3.0)), 1 / 6, "worker 0 has 20% more to do than the mean: the cuts are uneven"),
        (((2.0, 4.0), (2.0, 1.5, 1.0, 0.5)), 1 / 12, "worker 0 has 9% more to do than the mean: the cuts are uneven"),
        (((2.0, 4.0), (2.0, 3.5, 0.2, 0.2)), None, ""),
        (((0.0, 0.0), (2.0, 4.0)), 0.5, "worker 1 has 100% more to do than the mean: the cuts are uneven"),
    ],
)
def test_uneven_cuts(planned: Any, share: float | None, more: str) -> None:
    """By the plan: a slow machine makes no cuts uneven."""
    found = losses([row(0, F=3.0, B=6.0), row(1, F=5.0, B=5.0)], *planned)
    assert texts(found) == ([more] if more else [])
    assert [loss["share"] for loss in found] == ([pytest.approx(share)] if share else [])


def test_without_a_forecast_what_was_measured_is_uneven() -> None:
    found = losses([row(0, F=2.0, B=4.0), row(1, F=3.0, B=6.0)])
    assert texts(found) == ["worker 1 has 20% more to do than the mean: the cuts are uneven"]
    assert found[0]["cause"] == "uneven"


def test_workers_of_a_rank_are_one() -> None:
    found = losses([row(0, 0, F=1.0, B=2.0), row(1, 1, F=2.0, B=2.0), row(2, 0, F=3.0, B=4.0)])
    assert texts(found) == ["rank 0 has 43% more to do than the mean: the cuts are uneven"]
    assert losses([row(0, 0, F=1.0, B=2.0), row(1, 1, F=3.0, B=4.0), row(2, 0, F=2.0, B=2.0)]) == []


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ((4, 2, 2), "4 processes × 2 threads share 2 cores (fewer processes on this host, or --local)"),
        ((4, 2, 4), "4 processes × 2 threads share 4 cores (--threads 1, fewer processes on this host, or --local)"),
        ((1, 8, 2), "1 process × 8 threads share 2 cores (--threads 2)"),
        ((4, 1, 4, 0.4), "worker 1 had a core for at most 40% of its work: other programs use the cores (end them, or "
         "use another host)"),
        ((4, 1, 4), None),
        ((4, 4, 2, None), None),
    ],
)  # fmt: skip
def test_crowded_cores(host: tuple[Any, ...], why: str | None) -> None:
    """158 times what was planned says nothing: who shares which cores says what to do."""
    *counts, share = host if len(host) == 4 else (*host, 1.0)
    rows = [row(0, F=2.5, B=6.0), row(1, F=3.0, B=6.0)]
    for each in rows:
        computes = each.spent["F"] + each.spent["B"]
        each.host = host_of(*counts, None if share is None else share * computes)
    found = losses(rows, (1.0, 2.0), (1.0, 2.0))
    assert texts(found) == ([] if why is None else [why])
    if why is not None:
        assert (found[0]["worker"], found[0]["share"], found[0]["cause"]) == (1, pytest.approx(0.6), "cores")
    assert losses(rows, (2.5, 6.0), (3.0, 5.9)) == [], "all took what was planned"


def test_without_a_forecast_what_no_core_computed_is_lost() -> None:
    alone = row(0, F=4.0, B=5.0)
    alone.host = host_of(1, 1, 4, 3.0)
    (loss,) = losses([alone])
    assert (loss["cause"], loss["share"]) == ("cores", pytest.approx(0.6))


def test_nothing_to_say_of_nothing() -> None:
    assert time_losses([], None, 1.0, 1, 1) == []
    assert time_losses([row(0, F=1.0)], None, 10.0, 0, 1) == []
    assert time_losses([row(0, F=1.0)], None, 0.0, 5, 1) == []


times = st.floats(0, 12)


@given(st.lists(st.tuples(times, times, times, times, times, times), min_size=1, max_size=4), st.booleans())
def test_shares_are_shares_whatever_happens(columns: list[tuple[float, ...]], forecast: bool) -> None:
    rows = [row(k, F=f, B=b, wait=w, fill=fill) for k, (f, b, w, fill, _, _) in enumerate(columns)]
    for each in rows:
        each.host = host_of(2, 2, 2, 1.0)
    found = losses(rows, *([c[4:] for c in columns] if forecast else []))
    assert [loss["share"] for loss in found] == sorted((loss["share"] for loss in found), reverse=True)
    for loss in found:
        assert LEAST <= loss["share"] <= 1
        assert math.isfinite(loss["share"])
        assert "nan" not in loss["text"]
    json.dumps(found, allow_nan=False)
