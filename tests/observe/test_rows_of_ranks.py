"""What the workers of one rank did adds up to what the rank did, and no second counts twice."""

from __future__ import annotations

from typing import Any

import pytest

from fxpipe.observe.rows_of_ranks import plans_of_ranks, rows_of_ranks, share_ranks
from fxpipe.observe.time_losses import time_losses


def row(worker: int, rank: int, spent: dict[str, float], waits: dict[int, float]) -> dict[str, Any]:
    whole = {"F": 0.0, "B": 0.0, "update": 0.0, "wait": sum(waits.values()), **spent}
    whole["other"] = 10.0 - sum(whole.values())
    return {
        "worker": worker,
        "rank": rank,
        "busy": (whole["F"] + whole["B"] + whole["update"]) / 10.0,
        "seconds": 10.0,
        "spent": whole,
        "took": {kind: whole[kind] for kind in ("F", "B", "update")},
        "waits": [{"what": "activation", "from": source, "seconds": seconds} for source, seconds in waits.items()],
        "fill": 0.0,
    }


def rows() -> list[dict[str, Any]]:
    return [
        row(0, 0, {"F": 2.0, "B": 3.0}, {1: 0.5}),
        row(1, 1, {"F": 1.0, "B": 1.0}, {0: 4.0}),
        row(2, 0, {"F": 1.0, "B": 2.0, "update": 0.25}, {1: 0.25}),
    ]


def test_a_worker_has_its_ranks_other_workers_beside_it() -> None:
    found = rows()
    share_ranks(found)
    spent = [each["spent"] for each in found]
    assert [each.get("others") for each in spent] == [3.5, None, 5.5]
    assert [each["other"] for each in spent] == [1.0, 4.0, 1.0]
    assert all(sum(each.values()) == pytest.approx(10.0) for each in spent)


def test_ranks_are_sums_of_their_workers() -> None:
    found = rows()
    share_ranks(found)
    first, second = rows_of_ranks(found)
    assert first["spent"] == {"F": 3.0, "B": 5.0, "update": 0.25, "wait": 0.75, "other": 1.0}
    assert sum(first["spent"].values()) == 10.0
    assert (first["worker"], first["busy"], first["took"]["B"]) == (0, pytest.approx(0.825), 5.0)
    assert [(wait["from"], wait["seconds"]) for wait in first["waits"]] == [(1, 0.5), (1, 0.25)]
    assert [(wait["from"], wait["seconds"]) for wait in second["waits"]] == [(0, 4.0)]
    losses = time_losses([first, second], None, 10.0, 100, 1, "1f1b")
    assert (losses[0]["worker"], losses[0]["share"]) == (1, 0.4)


def test_plans_are_added_up_alike() -> None:
    planned = [{"forward_ms": 1.0 + k, "backward_ms": 2.0, "update_ms": None, "copy_ms": 0.5} for k in range(3)]
    assert plans_of_ranks(planned, (0, 1, 0)) == [
        {"forward_ms": 4.0, "backward_ms": 4.0, "update_ms": 0.0, "copy_ms": 1.0},
        {"forward_ms": 2.0, "backward_ms": 2.0, "update_ms": 0.0, "copy_ms": 0.5},
    ]
