"""The page's tables and numbers are the facts."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from report_facts import made_facts, made_schedules

from fxpipe.inspection import table, tables
from fxpipe.inspection.report.drawing import drawn

Facts = dict[str, Any]
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "%": 0.01}
FACTS = made_facts(workers=2, blocks=4)


@pytest.fixture(scope="module")
def page(written: Any) -> Any:
    return written(FACTS)


def read(text: str) -> float | None:
    """The number that a text begins with, in its unit; None for a dash."""
    found = re.match(r"(-?[\d,]+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(B|KiB|MiB|GiB|%)?", text)
    return float(found[1].replace(",", "")) * UNITS.get(found[2], 1) if found else None


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.0123"), (1.2, "1.20"), (99.96, "100"), (1234.5, "1,234"), (3e-6, "3.00e-06"), (None, "–")],
)
def test_numbers_have_three_digits_that_count(value: float | None, text: str) -> None:
    assert table.number(value) == text
    assert table.number(math.nan) == "–"


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (120 * 2**20, "120 MiB"), (2**41, "2.0 TiB")]
)
def test_sizes_have_a_unit(value: float, text: str) -> None:
    assert table.size(value) == text


def test_every_number_is_a_fact(page: Any) -> None:
    run = FACTS["run"]
    steps = ("step", "loss", "lr", "seconds", "samples_per_second")
    loads = [load for p in FACTS["partitions"] for load in p["workers"]]
    expected = {
        "Edges": [[edge["bytes"]] for edge in FACTS["edges"]],
        "Workers": [
            [w[f"{name}_ms"] for name in ("forward", "backward", "update")]
            + [w[name] for name in ("owned", "owned_bytes", "copies", "copy_bytes", "bytes_in", "bytes_out")]
            + [w[name] for name in ("saved_bytes", "in_flight", "memory_bytes")]
            for w in FACTS["workers"]
        ],
        "Modes of cuts": [
            [p["bottleneck_ms"], p["ideal_ms"], p["efficiency"], p["moved_bytes"]] for p in FACTS["partitions"]
        ],
        "Balance": [[*(load[part] for part in tables.PARTS.values()), load["total_ms"]] for load in loads],
        "Spans, simulated": [span[2:] for span in FACTS["timeline"]["spans"]],
        "Spans, measured": [span[2:] for span in run["timeline"]["spans"]],
        "Peak memory": [[max(m["bytes"])] for m in FACTS["timeline"]["memory"]],
        "Steps": list(zip(*(run["metrics"][name] for name in steps), strict=True)),
        "Seconds of the workers": [[w["seconds"], *w["spent"].values()] for w in run["workers"]],
        "Microbatches of the workers": [
            [w["busy"], w["forward_ms"], w["planned"]["forward_ms"]] for w in run["workers"]
        ],
        "Staleness": [
            [row[name] for name in ("group", "stale", "ahead", "samples", "rmse", "rms")]
            for w in run["workers"] for row in w["staleness"]
        ],
    }  # fmt: skip
    first = {"Edges": 4, "Workers": 3, "Balance": 2, "Spans, simulated": 2, "Spans, measured": 2, "Steps": 0}
    for caption, facts in expected.items():
        rows, at = page.table(caption), first.get(caption, 1)
        assert len(rows) == len(facts), caption
        for row, values in zip(rows, facts, strict=True):
            for said, value in zip(row[at : at + len(values)], values, strict=True):
                assert read(said) == pytest.approx(value, rel=0.05, abs=6e-4), (caption, row)


def test_schedules_that_were_compared_are_a_table(written: Any) -> None:
    page = written(FACTS | {"schedules": made_schedules()})
    rows = page.table("Schedules that were compared")
    assert [row[0] for row in rows] == ["async", "zb-h1", "gpipe", "all"]
    assert rows[0][3:] == ["1", "412", "+0.0 %", "4.3%", "44.8 MiB", "the one to take"]
    assert rows[1][5:] == ["+28.9 %", "21.0%", "58.2 MiB", "bubble 21% against 4%"]
    assert rows[2][3:] == ["–", "–", "–", "–", "2.8 GiB", "does not fit: 2.80 GiB would be enough"]
    assert "Against other schedules" in page.text("#schedule")
    assert "Against other schedules" not in written(FACTS).text("#schedule")


def test_names_are_in_the_tables(page: Any) -> None:
    edge = FACTS["edges"][1]
    assert page.table("Edges")[1] == [
        "F0 → F1", "activation", edge["name"], "f32[8, 64, 128]", "256 KiB", "blocks.3", "gpt.py:51",
    ]  # fmt: skip
    worker = FACTS["workers"][1]
    first, end = worker["forward_units"]
    assert page.table("Workers")[1][:2] == ["1", f"{worker['forward_from']} ({end - first} units)"]
    assert page.table("Parameters by worker")[0] == ["0", "blocks.0.qkv.weight", "–"]


def test_what_was_not_searched_is_not_called_proved(written: Any) -> None:
    facts = made_facts(workers=2, blocks=1)
    for partition, exact in zip(facts["partitions"], (True, False, None), strict=True):
        partition["exact"] = exact
    facts["partitions"].append(facts["partitions"][1] | {"mode": "pinned", "exact": None})
    rows = written(facts).table("Modes of cuts")
    assert [row[0] for row in rows] == ["same", "bidirectional ✓ chosen", "three-way", "pinned ✓ chosen"]
    assert [row[-1] for row in rows] == ["yes", "no", "–", "–"]


def test_speeds_are_shown_where_they_differ(page: Any, written: Any) -> None:
    facts = made_facts(workers=2, blocks=1)
    facts["workers"][1]["speed"] = 0.5
    assert [row[-1] for row in written(facts).table("Workers")] == ["1.00", "0.500"]
    assert "speed" not in page.text("#workers")


def test_waits_are_sorted(page: Any) -> None:
    rows = page.table("What the workers waited for")
    waits = [(w["worker"], wait) for w in FACTS["run"]["workers"] for wait in w["waits"]]
    assert sorted(rows) == sorted([str(k), x["what"], str(x["from"]), f"{x['seconds']:.3f}"] for k, x in waits)
    assert [row[3] for row in rows] == sorted((row[3] for row in rows), reverse=True)


def test_a_table_of_very_many_rows_is_thinned_and_says_so() -> None:
    made = drawn(tables.steps({"step": list(range(25_000)), "loss": [1.0] * 25_000}, {}))
    assert made.count("<tr>") == 1 + 8334
    assert "Of 25,000 rows one in 3 is shown" in made
    assert "is shown" not in drawn(tables.steps({"step": list(range(10_000))}, {}))


def test_many_edges_of_one_way_are_summed_up(written: Any) -> None:
    edges = [FACTS["edges"][2] | {"name": f"v{i}"} for i in range(tables.MANY + 1)]
    page = written(FACTS | {"edges": edges})
    assert page.table("Edges")[0][2:5] == [f"{tables.MANY + 1} edges", "–", "3.8 MiB"]
    assert len(page.table("Edges")) == 1 + len(edges)
