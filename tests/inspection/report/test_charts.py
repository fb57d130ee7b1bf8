"""The charts, the map and the timeline draw the facts."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from report_facts import made_facts

from fxpipe.inspection.report import charts
from fxpipe.inspection.report.drawing import runs, ticks
from fxpipe.inspection.report.marks import chip, text_on
from fxpipe.inspection.table import ms

Facts = dict[str, Any]
FACTS = made_facts(workers=2, blocks=4)


@pytest.fixture(scope="module")
def page(written: Any) -> Any:
    return written(FACTS)


def placed(element: Any) -> dict[str, float]:
    """Where a box is, in percent."""
    return {name: float(value) for name, value in re.findall(r"([a-z]+):(-?[\d.]+)%", element.attrib["style"])}


def named(root: Any, name: str) -> list[Any]:
    """The elements of a class."""
    return [element for element in root.iter() if name in element.attrib.get("class", "").split()]


def points(path: Any) -> list[tuple[float, float]]:
    """The points of a line, with y upwards."""
    return [(float(x), 1000 - float(y)) for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path.attrib["d"])]


def charts_of(page: Any, section: str) -> list[Any]:
    return named(page.root.find(f".//section[@id='{section}']"), "chart")


def test_balance(page: Any) -> None:
    scales = []
    for panel, partition in zip(charts_of(page, "balance"), FACTS["partitions"], strict=True):
        (ideal,) = named(panel, "ideal")
        scale = placed(ideal)["left"] / partition["ideal_ms"]
        for kind, field in (("F", "forward_ms"), ("B", "backward_ms"), ("W", "weight_ms"), ("update", "update_ms")):
            drawn = sum(placed(box)["width"] for box in named(panel, f"k-{kind}"))
            assert drawn / scale == pytest.approx(sum(w[field] for w in partition["workers"]), rel=0.01), kind
        scales.append(scale)
    assert scales == pytest.approx([scales[0]] * 3, rel=1e-3), "one scale"


def test_memory(page: Any) -> None:
    (chart,) = charts_of(page, "memory")
    lines = list(chart.iter("path"))
    scale = points(lines[0])[0][1] / FACTS["timeline"]["memory"][0]["bytes"][0]
    for line, worker in zip(lines, FACTS["timeline"]["memory"], strict=True):
        assert [y / scale for _, y in points(line)[::2]] == pytest.approx(worker["bytes"], rel=0.01)
    assert "MiB" in "".join(chart.itertext())


def test_a_run(page: Any) -> None:
    loss, rate, spent = charts_of(page, "run")
    run = FACTS["run"]
    for chart, name in ((loss, "loss"), (rate, "samples_per_second")):
        line, _ = chart.iter("path")  # each step, and a mean
        heights = [y for _, y in points(line)]
        for (y, v), (other, w) in pairwise(zip(heights, run["metrics"][name], strict=True)):
            assert (y - other) * (v - w) >= 0 or abs(y - other) < 1
    widths = Counter[str]()
    for box in spent.iter("i"):
        widths[box.attrib["class"].split()[0]] += placed(box)["width"]
    scale = widths["k-F"] / sum(w["spent"]["F"] for w in run["workers"])
    assert sum(widths.values()) / scale == pytest.approx(sum(w["seconds"] for w in run["workers"]), rel=1e-3)


def run_of(losses: list[float | None], **more: Any) -> dict[str, Any]:
    return {"metrics": {"step": list(range(1, len(losses) + 1)), "loss": losses}} | more


def test_many_steps_have_a_trailing_mean() -> None:
    values = [float(i % 10) for i in range(500)]
    chart, key = charts.curves(run_of(values))["loss"]
    assert chart.count("<path") == 2
    assert [name for name, _ in key] == ["training", "training, mean of 10 steps"]
    assert charts.smooth([None, 1.0, 3.0, None, 5.0]) == [None, 1.0, 2.0, 2.0, 3.0]
    assert charts.smooth([*[1.0] * 10, 11.0])[-1] == 2.0, "a mean of ten"
    assert charts.curves(run_of(values[:3]))["loss"][0].count("<path") == 1


def test_what_is_no_number_is_not_drawn() -> None:
    assert charts.curves(run_of([float("nan"), None])) == {}
    chart, _ = charts.curves(run_of([1.0, 2.0, float("nan"), 2.0, 1.0]))["loss"]
    (d,) = re.findall(r' d="([^"]*)"', chart)
    assert re.sub(r"[^ML]", "", d) == "MLML"


def test_evaluations_are_points_next_to_what_training_gave() -> None:
    rows = [
        {"step": 2, "metrics": {"loss": 3.0, "accuracy": 0.5}, "averaged": {"loss": 2.5, "accuracy": None}},
        {"step": 4, "metrics": {"loss": 2.0, "accuracy": float("nan")}, "averaged": {"loss": 1.5, "accuracy": 0.75}},
    ]
    found = charts.curves(run_of([4.0, 3.5, 3.0, 2.5], step_metrics={"top": [0.1] * 4}, evaluations=rows))
    told = {name: [line for line, _ in key] for name, (_, key) in found.items()}
    held = ["held out", "held out, averaged weights"]
    assert told == {"loss": ["training", *held], "top": ["training"], "accuracy": held}
    loss, accuracy = (re.findall(r' d="([^"]*)"', found[name][0]) for name in ("loss", "accuracy"))
    assert len(loss) == 5, "training; of weights and of averages a line and the dots on it"
    assert [d.count("h0") for d in loss] == [0, 0, 2, 0, 2]
    assert [d.count("h0") for d in accuracy] == [0, 1, 0, 1]
    left, right = re.findall(r"M([-\d.]+) ([-\d.]+)", loss[2])
    assert (float(left[0]), float(right[0])) == (pytest.approx(1000 / 3, abs=0.1), 1000.0), "steps 2 and 4 of 1 to 4"


def test_colours_repeat_from_the_ninth_worker_on() -> None:
    assert chip(1) != chip(9)
    assert "w1" in chip(9)
    assert text_on(1) == text_on(9) == "#111111"


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ((0, 1), [0, 0.2, 0.4, 0.6, 0.8, 1]),
        ((0, 0.0032), [0, 0.001, 0.002, 0.003]),
        ((1.2, 1.3), [1.2, 1.22, 1.24, 1.26, 1.28, 1.3]),
        ((-0.5, 99), [0, 20, 40, 60, 80]),
    ],
)
def test_axes_have_round_numbers(ends: tuple[float, float], expected: list[float]) -> None:
    assert ticks(*ends) == pytest.approx(expected)


def test_the_map_shows_workers_cuts_and_mismatches(page: Any) -> None:
    units, parts = FACTS["units"], named(page.root, "part")
    total = sum(unit["forward_ms"] + unit["backward_ms"] for unit in units)
    expected = [(phase, worker) for phase in ("forward", "backward") for worker in (0, 1)]
    for part, (phase, worker) in zip(parts, expected, strict=True):
        mine = [unit for unit in units if unit[phase] == worker]
        spent = sum(unit["forward_ms"] if phase == "forward" else unit["backward_ms"] for unit in mine)
        assert part.attrib["title"].startswith(f"worker {worker}, {phase}: {ms(spent)}\n")
        share = sum(unit["forward_ms"] + unit["backward_ms"] for unit in mine) / total
        assert placed(part)["width"] == pytest.approx(100 * share, abs=1)
    apart = [placed(mark)["width"] for mark in named(page.root, "apart")]
    share = sum(unit["forward_ms"] + unit["backward_ms"] for unit in units if unit["apart"]) / total
    assert sum(apart) == pytest.approx(100 * share, abs=1)
    told = page.text("#map")
    assert f"FP cut {FACTS['workers'][1]['forward_from']}" in told
    assert f"BP cut {FACTS['workers'][1]['backward_from']}" in told


def test_the_map_names_modules_as_deep_as_there_is_room(page: Any, written: Any) -> None:
    paths = [unit["module"] or "(loss)" for unit in FACTS["units"]]
    assert [cell.attrib["title"] for cell in named(page.root, "cell")] == paths
    many = written(made_facts(workers=2, blocks=12, run=False))
    assert [cell.attrib["title"] for cell in named(many.root, "cell")] == [
        "tok", *(f"blocks.{b}" for b in range(12)), "head", "(loss)",
    ]  # fmt: skip


def test_weight_gradients_with_cuts_of_their_own_have_a_lane(written: Any) -> None:
    facts = made_facts(workers=2, blocks=2, run=False)
    for unit in facts["units"]:
        unit |= {"weights": 0, "weight_ms": 0.5, "apart": unit["backward"] == 1}
    page = written(facts)
    assert [part.attrib["title"].split(":")[0] for part in named(page.root, "part")][4:] == ["worker 0, weights"]
    said = [mark.attrib["title"].partition(": ")[2] for mark in named(page.root, "apart")]
    assert said[-1] == "backward on 1, weights on 0"
    assert "1 ≠ 0" in page.text("#map")


def test_the_timeline_has_every_span(page: Any) -> None:
    rows = named(page.root.find(".//*[@id='spans']"), "row")
    panels = [FACTS["timeline"]["spans"], FACTS["run"]["timeline"]["spans"]]
    assert len(rows) == 2 * 2
    end = 1.005 * max(span[5] for spans in panels for span in spans)
    for number, row in enumerate(rows):
        own = sorted((s for s in panels[number // 2] if s[0] == number % 2), key=lambda s: s[4])
        for span, box in zip(own, row, strict=True):
            _, kind, minibatch, _, start, stop = span
            assert box.attrib["class"].split()[0] == f"k-{kind}"
            at = placed(box)
            assert (at["left"], at["width"]) == pytest.approx((100 * start / end, 100 * (stop - start) / end), abs=1e-3)
            first, of, *_, times = box.attrib["title"].splitlines()
            assert first.endswith(f" on worker {number % 2}, {'measured' if number > 1 else 'simulated'}")
            assert of == f"minibatch {minibatch}"
            assert float(times.split()[0]) == pytest.approx(1e3 * (stop - start), rel=0.01)


def test_runs_of_equal_values() -> None:
    assert list(runs([1, 1, None, None, 2])) == [(0, 2, 1), (2, 4, None), (4, 5, 2)]
    assert list(runs([])) == []
