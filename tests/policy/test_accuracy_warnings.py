"""Warnings say what the study measured, and nothing else."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from fxpipe.policy import default_for
from fxpipe.policy.accuracy_warnings import LOST, WORTH_A_WARNING, warning
from fxpipe.schedule import Async, Versions, make

RESULT = Path(__file__).parents[2] / "benchmarks" / "accuracy" / "result.json"
OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW", "muon": "Muon"}
ENOUGH = {"SGD": 6, "AdamW": 2, "Muon": 2}
"""Of how many workloads a mean is one to warn by."""


@functools.cache
def behind(workers: int, microbatches: int) -> int:
    """How many updates the first worker's forward misses."""
    return Versions(make("async", workers, microbatches)).lag("F", 0, 0)


def measured() -> dict[tuple[str, str, int], float]:
    """The mean share lost, by policy, optimizer and how many updates the first worker's forward misses."""
    rows: list[dict[str, Any]] = json.loads(RESULT.read_text())["conditions"]
    shares: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for r in rows:
        if r["lost"] is not None and r["method"] not in ("synchronous", "1f1b"):
            missed = behind(r["workers"], r["microbatches"])
            shares[r["method"], OPTIMIZERS[r["optimizer"]], missed].append(r["lost"])
    return {key: mean(found) for key, found in shares.items() if len(found) >= ENOUGH[key[1]]}


def test_the_table_is_the_studys() -> None:
    assert pytest.approx(measured(), abs=0.001) == LOST


def test_the_default_loses_nothing_by_default() -> None:
    """With the default number of microbatches, which leaves one update."""
    policy = default_for(Async(8))
    for optimizer in OPTIMIZERS.values():
        assert LOST[policy, optimizer, 1] < 0.02


def test_what_lost_much_is_warned_of() -> None:
    worst = max(LOST, key=lambda key: LOST[key])
    said = warning(*worst)
    assert said is not None
    assert f"policy {worst[0]} with {worst[1]} lost {LOST[worst]:.0%}" in said
    assert "benchmarks/accuracy" in said


def test_what_lost_little_or_was_not_studied_is_not() -> None:
    for (policy, optimizer, behind), share in LOST.items():
        assert (warning(policy, optimizer, behind) is None) == (share < WORTH_A_WARNING)
        assert warning(policy, optimizer, 0) is None, "nearer than anything that was studied"
    assert warning("stash+ef", "SGD", 7) is None
    assert warning("latest", "Lion", 7) is None


def test_more_staleness_than_studied_counts_as_the_most() -> None:
    assert warning("latest", "Adam", 63) == warning("latest", "AdamW", 15)
    assert warning("latest", "Adam", 5) == warning("latest", "AdamW", 3)
