"""The charts, the map, the edges and the timeline draw the facts."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from report_facts import made_facts

from fxpipe.inspection.report import charts, formats
from fxpipe.inspection.report.drawing import room, runs, ticks
from fxpipe.inspection.report.edges import SINGLE
from fxpipe.inspection.report.marks import chip, text_on

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
        scale = placed(ideal)["bottom"] / partition["ideal_ms"]
        for kind, field in (("F", "forward_ms"), ("B", "backward_ms"), ("W", "weight_ms"), ("update", "update_ms")):
            drawn = sum(placed(box)["height"] for box in named(panel, f"k-{kind}"))
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
        (line,) = chart.iter("path")
        heights = [y for _, y in points(line)]
        for (y, v), (other, w) in pairwise(zip(heights, run["metrics"][name], strict=True)):
            assert (y - other) * (v - w) >= 0 or abs(y - other) < 1
        assert named(chart, "dot")[0].attrib["data-tip"] == f"step 1: {run['metrics'][name][0]:.4g}"
    widths = Counter[str]()
    for box in spent.iter("i"):
        widths[box.attrib["class"].split()[0]] += placed(box)["width"]
    scale = widths["k-F"] / sum(w["spent"]["F"] for w in run["workers"])
    assert sum(widths.values()) / scale == pytest.approx(sum(w["seconds"] for w in run["workers"]), rel=1e-3)


def test_many_steps_have_a_trailing_mean() -> None:
    values = [float(i % 10) for i in range(500)]
    assert charts.curve(range(500), values, "Loss", True).count("<path") == 2
    assert "mean to step 490: 4.5" in charts.curve(range(500), values, "Loss", True)
    assert charts.smooth([None, 1.0, 3.0, None, 5.0]) == [None, 1.0, 2.0, 2.0, 4.0]
    assert charts.curve(range(3), values[:3], "Loss", True).count("<path") == 1


def test_what_is_no_number_is_not_drawn() -> None:
    assert charts.curve([1, 2], [float("nan"), None], "Loss", False) == ""
    (d,) = re.findall(r' d="([^"]*)"', charts.curve(range(5), [1.0, 2.0, float("nan"), 2.0, 1.0], "Loss", False))
    assert re.sub(r"[^ML]", "", d) == "MLML"


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
    lanes = [r.attrib for r in page.root.iter("rect") if "data-lane" in r.attrib]
    assert [(lane["data-lane"], lane["data-worker"]) for lane in lanes] == [
        ("F", "0"), ("F", "1"), ("B", "0"), ("B", "1"),
    ]  # fmt: skip
    for lane in lanes:
        phase = "forward" if lane["data-lane"] == "F" else "backward"
        mine = [u for u in FACTS["units"] if u[phase] == int(lane["data-worker"])]
        times = (u["forward_ms"] if phase == "forward" else u["backward_ms"] + u["weight_ms"] for u in mine)
        assert float(lane["data-value"]) == pytest.approx(sum(times), rel=1e-5)
    apart = sum(u["apart"] for u in FACTS["units"])
    assert 0 < apart <= sum(u["forward"] != u["backward"] for u in FACTS["units"])
    assert sum(int(m.attrib["data-units"]) for m in named(page.root, "mismatch")) == apart
    told = page.text("#map")
    assert f"FP cut {FACTS['workers'][1]['forward_from']}" in told
    assert f"BP cut {FACTS['workers'][1]['backward_from']}" in told
    units = named(page.root, "unit")
    assert len(units) == len(FACTS["units"])
    assert re.search(r"^forward on worker 0: .* ms$", units[0].attrib["data-tip"], re.MULTILINE)


def test_a_module_has_one_name_amid_all_that_lies_in_it(written: Any) -> None:
    """Layers whose own work lies between that of their parts, as in nn.TransformerEncoderLayer."""
    facts = made_facts(workers=2, blocks=4, run=False)
    for unit in facts["units"]:
        unit |= {"forward_ms": 1.0, "backward_ms": 1.0}
        if re.fullmatch(r"blocks\.\d\.attention", unit["module"] or ""):
            unit |= {"module": unit["module"].removesuffix(".attention")}
    page = written(facts)
    names = [(name.text, float(name.attrib["x"])) for name in named(page.root, "strip")]
    assert [name for name, _ in names] == ["tok", *(f"blocks.{b}" for b in range(4)), "head", "(loss)"]
    cells = [(float(cell.attrib["x"]), float(cell.attrib["width"])) for cell in named(page.root, "cell")]
    left, right = cells[0][0], sum(cells[-1])
    for (name, middle), first, end in zip(names, [0, 1, 4, 7, 10, 13, 14], [1, 4, 7, 10, 13, 14, 15], strict=True):
        assert middle == pytest.approx(left + (right - left) * (first + end) / 2 / 15, abs=0.5), name
        assert room(name) <= (right - left) * (end - first) / 15 + 1, name


@pytest.mark.parametrize("workers", [2, 6, 12])
def test_parts_of_a_lane_say_alike(written: Any, workers: int) -> None:
    page = written(made_facts(workers=workers, blocks=workers, run=False))
    said = [" / ".join(text.text for text in named(part, "lane")) for part in named(page.root, "part")]
    assert len({re.sub(r"[\d.]+", "0", lines) for lines in said if lines.endswith(" ms")}) == 1, said
    assert all(re.fullmatch(r"\d*|.* ms", lines) for lines in said), said


@pytest.mark.parametrize("workers", [2, 8])
def test_every_edge_is_drawn_alone_or_in_a_bundle(written: Any, workers: int) -> None:
    facts = made_facts(workers=workers, blocks=12 * workers, inner=2, run=False)
    edges = facts["edges"]
    lines = [(line, json.loads(line.attrib["data-edges"])) for line in named(written(facts).root, "edge")]
    assert sorted(number for _, members in lines for number in members) == list(range(len(edges)))
    assert (len(lines) < len(edges)) == (len(edges) > SINGLE) == (workers == 8)
    for line, members in lines:
        total = sum(edges[number]["bytes"] for number in members)
        assert int(line.attrib["data-value"]) == total
        assert len({tuple(edges[number][key] for key in ("kind", "src", "dst")) for number in members}) == 1
        edge, tip = edges[members[0]], line.attrib["data-tip"]
        for what in (formats.size(total), edge["name"], edge["kind"], f"worker {edge['src']}", f"worker {edge['dst']}"):
            assert what in tip
        if edge["shape"] and len(members) == 1:
            assert f"{edge['dtype']}[{', '.join(map(str, edge['shape']))}]" in tip


def test_the_timeline_has_every_span(page: Any) -> None:
    rows = named(page.root.find(".//*[@id='spans']"), "row")
    panels = [FACTS["timeline"]["spans"], FACTS["run"]["timeline"]["spans"]]
    assert len(rows) == 2 * 2
    end = 1.005 * max(span[5] for spans in panels for span in spans)
    for number, row in enumerate(rows):
        own = sorted((s for s in panels[number // 2] if s[0] == number % 2), key=lambda s: s[4])
        drawn = [box for box in row if "idle" not in box.attrib["class"]]
        for span, box in zip(own, drawn, strict=True):
            _, kind, minibatch, _, start, stop = span
            assert box.attrib["class"].split()[0] == f"k-{kind}"
            at = placed(box)
            assert (at["left"], at["width"]) == pytest.approx((100 * start / end, 100 * (stop - start) / end), abs=1e-3)
            first, of, *_, times = box.attrib["data-tip"].splitlines()
            assert first.endswith(f" on worker {number % 2}, {'measured' if number > 1 else 'simulated'}")
            assert of == f"minibatch {minibatch}"
            assert float(times.split()[0]) == pytest.approx(1e3 * (stop - start), rel=0.01)


@pytest.mark.parametrize(("panel", "says"), [("simulated", "waits"), ("measured", "between actions")])
def test_an_idle_stretch_is_told_with_its_ends(panel: str, says: str, written: Any) -> None:
    facts = made_facts(workers=2, blocks=4)
    facts["run"]["timeline"]["spans"] = [s for s in facts["run"]["timeline"]["spans"] if s[1] != "wait"]
    spans = (facts["timeline"] if panel == "simulated" else facts["run"]["timeline"])["spans"]
    own = sorted((s for s in spans if s[0] == 0), key=lambda s: s[4])
    gaps = [(a[5], b[4]) for a, b in pairwise(own) if b[4] > a[5]]
    row = named(written(facts).root.find(".//*[@id='spans']"), "row")[0 if panel == "simulated" else 2]
    *idle, rest = named(row, "idle")
    for box, (start, stop) in zip(idle, gaps, strict=True):
        first, second = box.attrib["data-tip"].splitlines()
        assert first == f"worker 0, {panel}"
        found = re.fullmatch(rf"{says} ([\d.]+) ms, from ([\d.,]+) to ([\d.,]+)", second)
        assert found is not None, second
        length, begin, end = (float(number.replace(",", "")) for number in found.groups())
        assert (begin, end) == pytest.approx((1e3 * start, 1e3 * stop), abs=0.01 * length)
    assert rest.attrib["data-tip"].splitlines()[1].startswith("nothing more ")


def test_runs_of_equal_values() -> None:
    assert list(runs([1, 1, None, None, 2])) == [(0, 2, 1), (2, 4, None), (4, 5, 2)]
    assert list(runs([])) == []
