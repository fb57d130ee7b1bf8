"""Warnings say what the study measured, and nothing else."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from fxpipe.policy import default_for
from fxpipe.policy.accuracy_warnings import LOST, WORTH_A_WARNING, warning
from fxpipe.schedule import Async

RESULT = Path(__file__).parents[2] / "benchmarks" / "accuracy" / "result.json"
OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW"}


def measured() -> dict[tuple[str, str, int], float]:
    """The mean share lost, of all conditions with whole minibatches."""
    rows: list[dict[str, Any]] = json.loads(RESULT.read_text())["conditions"]
    goals = {(r["workload"], r["optimizer"]): r["mean"] for r in rows if r["method"] == "synchronous"}
    shares: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for r in rows:
        if r["method"] == "synchronous" or r["microbatches"] > 1:
            continue
        goal = goals[r["workload"], r["optimizer"]]
        worse = (r["mean"] - goal) if r["metric"] == "nats" else (goal - r["mean"])
        shares[r["method"], OPTIMIZERS[r["optimizer"]], r["workers"] - 1].append(worse / goal)
    return {key: mean(found) for key, found in shares.items()}


def test_the_table_is_the_studys() -> None:
    assert pytest.approx(measured(), abs=0.005) == LOST


def test_the_default_lost_least() -> None:
    """Of the policies that need no microbatches, over all optimizers and numbers of workers."""
    totals: dict[str, float] = defaultdict(float)
    for (policy, _, _), share in LOST.items():
        totals[policy] += share
    assert min(totals, key=lambda policy: totals[policy]) == default_for(Async(4))


def test_what_lost_much_is_warned_of() -> None:
    worst = max(LOST, key=lambda key: LOST[key])
    said = warning(*worst)
    assert said is not None
    assert f"policy {worst[0]} with {worst[1]} lost {LOST[worst]:.0%}" in said
    assert "benchmarks/accuracy" in said


def test_what_lost_little_or_was_not_studied_is_not() -> None:
    for (policy, optimizer, behind), share in LOST.items():
        assert (warning(policy, optimizer, behind) is None) == (share < WORTH_A_WARNING)
        assert warning(policy, optimizer, 2) is None, "nearer than anything that was studied"
    assert warning("latest+sc", "SGD", 7) is None
    assert warning("latest", "Lion", 7) is None


def test_more_staleness_than_studied_counts_as_the_most() -> None:
    assert warning("latest", "Adam", 63) == warning("latest", "AdamW", 7)
    assert warning("latest", "Adam", 5) == warning("latest", "AdamW", 3)
