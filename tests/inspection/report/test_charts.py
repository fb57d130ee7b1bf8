"""The charts draw the facts."""

from __future__ import annotations

from typing import Any

import pytest
from report_facts import made_facts

from fxpipe.inspection.report import charts
from fxpipe.inspection.report.marks import chip, text_on, tint

FACTS = made_facts(workers=2, blocks=2)


@pytest.fixture(scope="module")
def page(written: Any) -> Any:
    return written(FACTS)


def test_balance(page: Any) -> None:
    panels = page.charts("balance")
    for panel, partition in zip(panels, FACTS["partitions"], strict=True):
        for kind, field in (("F", "forward_ms"), ("B", "backward_ms"), ("W", "weight_ms"), ("update", "update_ms")):
            drawn = sum(sum(trace["y"]) for trace in panel["data"] if trace["meta"] == kind)
            assert drawn == pytest.approx(sum(w[field] for w in partition["workers"])), kind
        assert panel["layout"]["shapes"][0]["y0"] == partition["ideal_ms"]
    assert len({panel["layout"]["yaxis"]["range"][1] for panel in panels}) == 1, "one scale"


def test_memory(page: Any) -> None:
    (chart,) = page.charts("memory")
    for trace, worker in zip(chart["data"], FACTS["timeline"]["memory"], strict=True):
        assert [y * 2**20 for y in trace["y"][:-1]] == pytest.approx(worker["bytes"])
    assert chart["layout"]["yaxis"]["title"]["text"] == "MiB"


def test_a_run(page: Any) -> None:
    loss, rate, spent, staleness = page.charts("run")
    run = FACTS["run"]
    assert loss["data"][0]["y"] == run["metrics"]["loss"]
    assert rate["data"][0]["y"] == run["metrics"]["samples_per_second"]
    assert sum(sum(t["x"]) for t in spent["data"]) == pytest.approx(sum(w["seconds"] for w in run["workers"]))
    assert [t["y"] for t in staleness["data"]] == [log["rmse"] for log in run["staleness"]]


def test_many_steps_have_a_trailing_mean() -> None:
    values = [float(i % 10) for i in range(500)]
    each, mean = charts.curve(range(500), values, from_zero=True)["data"]
    assert each["y"] == values
    assert mean["y"][499] == pytest.approx(4.5)
    assert charts.smooth([None, 1.0, 3.0, None, 5.0]) == [None, 1.0, 2.0, 2.0, 4.0]
    assert len(charts.curve(range(3), values[:3], from_zero=True)["data"]) == 1


def test_lines_of_staleness_differ_and_are_named(written: Any) -> None:
    facts = made_facts(workers=2, blocks=1)
    for log in facts["run"]["staleness"]:
        log["stale"] = log["ahead"] = [i % 3 for i in range(len(log["step"]))]
    facts["run"]["staleness"] += [log | {"group": 1} for log in facts["run"]["staleness"]]
    page = written(facts)
    drawn = page.charts("run")[-1]["data"]
    expected = {
        f"worker {w} · group {k} · {n} behind, predicted {n}" for w in range(2) for k in range(2) for n in range(3)
    }
    assert {trace["name"] for trace in drawn} == expected
    assert len({(trace["line"]["color"], trace["line"]["dash"]) for trace in drawn}) == len(expected)
    for name in expected:
        assert name in page.text(".//ul[@aria-label='Lines']")
    assert "optimizer's parameter groups" in page.text("#run")


def test_colours_repeat_from_the_ninth_worker_on() -> None:
    assert chip(1) != chip(9)
    assert text_on(1) == text_on(9) == "#111111"
    assert tint(0, 0.5) == tint(8, 0.5) == "rgba(68,119,170,0.5)"
