"""What `auto` takes and what is warned of is what the study measured, and nothing else."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from fxpipe.codecs.accuracy import HARMLESS, LOST, STUDIED, keeps_the_result
from fxpipe.codecs.encoding import Encoding

RESULT = Path(__file__).parents[2] / "benchmarks" / "accuracy" / "result.json"


def measured() -> dict[tuple[str, str], tuple[float, float]]:
    """The mean share lost, and that of a standard deviation without a codec, where three seeds have trained on both
    sides."""
    rows: list[dict[str, Any]] = json.loads(RESULT.read_text())["codecs"]
    plain = {_condition(row): row for row in rows if row["codec"] == "none" and row["n"] == 3}
    lost: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        none = plain.get(_condition(row))
        if row["codec"] != "none" and row["n"] == 3 and none is not None:
            assert row["mean"] is not None, "a training that diverges loses all"
            worse = row["mean"] - none["mean"] if row["metric"] == "nats" else none["mean"] - row["mean"]
            lost[row["codec"], row["workload"]].append((worse / none["mean"], none["std"] / none["mean"]))
    return {key: (mean(share for share, _ in found), mean(std for _, std in found)) for key, found in lost.items()}


def _condition(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("workload", "optimizer", "method", "workers", "microbatches", "rate", "steps"))


def test_the_table_is_the_studys() -> None:
    found = measured()
    assert set(found) == set(LOST)
    for key, shares in LOST.items():
        assert shares == pytest.approx(found[key], abs=0.0001), key


def test_auto_takes_what_kept_the_result_within_a_deviation_everywhere() -> None:
    found = measured()
    kept = {c for c in STUDIED if all(lost <= std for (name, _), (lost, std) in found.items() if name == c)}
    assert set(HARMLESS) == kept
    whole = [dataclasses.replace(Encoding.parse(name), weights="none") for name in HARMLESS]  # not studied
    assert Encoding.parse("auto").candidates == tuple(whole)


def test_what_was_not_studied_does_not_count_as_harmless() -> None:
    for name in ("topk", "lowrank", "bf16", "none", ""):
        assert not keeps_the_result(name)
