"""The report in Chromium: it is quiet, asks for nothing, shows the numbers it was given, and can be used by all."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.inspection.facts import facts as facts_of
from fxpipe.inspection.subject import subject_of

pytestmark = [pytest.mark.browser, pytest.mark.slow]

Facts = dict[str, Any]
Open = Callable[..., Any]
Share = Callable[[Facts], Any]
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "%": 0.01}


class Block(nn.Module):
    """A block of a small transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(torch.softmax(q @ k.transpose(-1, -2), -1) @ v)
        return x + self.down(torch.relu(self.up(x)))


class Transformer(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.tok = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(blocks))
        self.head = nn.Linear(8, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def built(blocks: int, workers: int, **options: Any) -> Facts:
    """The facts of a transformer's build, costs computed."""
    ids = torch.randint(0, 16, (2, 4))
    program = fxpipe.capture(Transformer(blocks), lambda m, b: nn.functional.cross_entropy(m(b).mT, b), ids)
    return facts_of(subject_of(fxpipe.lower(program, workers=workers, cost="analytic", **options)))


@pytest.fixture(scope="module")
def small(made_facts: Callable[..., Facts]) -> Facts:
    """A build of two workers whose forward and backward are cut apart, with a made-up run."""
    facts = built(2, 2, forward_at=("blocks.1.out",), backward_at=("blocks.1",))
    return facts | {"run": made_facts(workers=2)["run"]}


@pytest.fixture(scope="module")
def large(made_facts: Callable[..., Facts]) -> Facts:
    """55 blocks with more than 5,000 nodes."""
    facts = made_facts(workers=4, blocks=55, inner=31, run=False)
    assert len(facts["nodes"]["rows"]) > 5000
    return facts


@pytest.fixture(scope="module")
def other(made_facts: Callable[..., Facts]) -> Facts:
    """A build seen under another schedule and policy, whose own cuts and whose best were not searched for."""
    facts = made_facts(workers=2, blocks=4)
    pair = {"schedule": "gpipe", "policy": "latest"}
    pinned = facts["partitions"][1] | {"mode": "pinned", "exact": None}
    proved = zip(facts["partitions"], (True, False, None), strict=True)
    rows = [row | {"chosen": False, "exact": exact} for row, exact in proved]
    workers = [worker | {"speed": speed} for worker, speed in zip(facts["workers"], (1.0, 0.5), strict=True)]
    return facts | {
        "forecast": facts["forecast"] | pair, "grid": facts["grid"] | pair, "partitions": [*rows, pinned],
        "workers": workers, "run": facts["run"] | {"efficiency": None, "bubble": None},
    }  # fmt: skip


def at(facts: Facts, path: str) -> Any:
    """The value at a path: `workers.0.forward_ms`."""
    value: Any = facts
    for key in path.split("."):
        value = value[int(key) if isinstance(value, list) else key]
    return value


def read(text: str) -> float | None:
    """The number that a text begins with, in its unit."""
    found = re.match(r"(-?[\d,]+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(B|KiB|MiB|GiB|%)?", text)
    return float(found[1].replace(",", "")) * UNITS.get(found[2], 1) if found else None


def unfold(page: Any) -> None:
    """Open all tables; they are made after the event."""
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    page.wait_for_function("[...document.querySelectorAll('details')].every((d) => d.children.length > 1)")


def to_the_middle(chart: Any) -> None:
    """Scroll to a chart and wait for the event of it, which hides the tooltip."""
    chart.evaluate(
        "c => new Promise((done) => { c.scrollIntoView({block: 'center', behavior: 'instant'});"
        " requestAnimationFrame(() => requestAnimationFrame(() => done())); })"
    )


def test_every_number_is_a_fact(small: Facts, shared: Share) -> None:
    page = shared(small)
    unfold(page)
    assert page.evaluate("JSON.parse(document.getElementById('facts').textContent)") == json.loads(json.dumps(small))
    shown = page.eval_on_selector_all(
        "[data-fact]", "all => all.map((e) => [e.dataset.fact, e.dataset.value ?? null, e.textContent])"
    )
    assert len(shown) > 500
    numbers = 0
    for path, raw, text in shown:
        fact = at(small, path)
        if fact is None:
            assert (raw, text) == (None, "–"), path
        elif isinstance(fact, int | float):
            assert float(raw) == fact, path
            said = read(text)
            assert said == pytest.approx(fact, rel=0.05, abs=6e-4), path
            numbers += 1
        elif isinstance(fact, str):
            assert (raw, text) == (fact, fact), path
        else:
            assert json.loads(raw) == fact, path
    assert numbers > 400
    for part in ("build", "forecast", "workers", "modules", "edges", "partitions", "timeline", "run"):
        assert any(path.startswith(part + ".") for path, *_ in shown), part


def test_charts_draw_the_facts(small: Facts, shared: Share) -> None:
    page = shared(small)
    charts = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('.js-plotly-plot')].map((c, i) => "
        "[`${c.closest('section').id}.${i}`, c.data.map((t) => ({meta: t.meta, x: t.x, y: t.y, on: t.yaxis ?? 'y'}))]))"
    )
    by_section: dict[str, list[Any]] = {}
    for name, traces in charts.items():
        by_section.setdefault(name.split(".")[0], []).append(traces)
    (balance,) = by_section["balance"]
    for kind, field in (("F", "forward_ms"), ("B", "backward_ms"), ("W", "weight_ms"), ("update", "update_ms")):
        drawn = sum(sum(trace["y"]) for trace in balance if trace["meta"] == kind)
        assert drawn == pytest.approx(sum(w[field] for p in small["partitions"] for w in p["workers"])), kind
    (timeline,) = by_section["timeline"]
    for axis, spans in (("y", small["timeline"]["spans"]), ("y2", small["run"]["timeline"]["spans"])):
        for kind in {span[1] for span in spans}:
            drawn = sum(t["x"].count(None) + 1 for t in timeline if t["meta"] == kind and t["on"] == axis)
            assert drawn == sum(span[1] == kind for span in spans), (axis, kind)
    (memory,) = by_section["memory"]
    unit = max(max(m["bytes"]) for m in small["timeline"]["memory"]) / max(max(t["y"]) for t in memory)
    for trace, worker in zip(memory, small["timeline"]["memory"], strict=True):
        assert [y * unit for y in trace["y"][:-1]] == pytest.approx(worker["bytes"])
    loss, rate, spent, staleness = by_section["run"]
    assert loss[0]["y"] == small["run"]["metrics"]["loss"]
    assert rate[0]["y"] == small["run"]["metrics"]["samples_per_second"]
    assert sum(sum(t["x"]) for t in spent) == pytest.approx(sum(w["seconds"] for w in small["run"]["workers"]))
    assert [t["y"] for t in staleness] == [log["rmse"] for log in small["run"]["staleness"]]


def test_the_map_shows_workers_cuts_and_mismatches(small: Facts, shared: Share) -> None:
    page = shared(small)
    lanes = page.eval_on_selector_all(
        ".map [data-lane]", "all => all.map((r) => [r.dataset.lane, +r.dataset.worker, +r.dataset.value])"
    )
    assert [lane[:2] for lane in lanes] == [["F", 0], ["F", 1], ["B", 0], ["B", 1]]
    for lane, worker, time in lanes:
        mine = [u for u in small["units"] if u["forward" if lane == "F" else "backward"] == worker]
        times = (u["forward_ms"] if lane == "F" else u["backward_ms"] + u["weight_ms"] for u in mine)
        assert time == pytest.approx(sum(times))
    apart = sum(u["apart"] for u in small["units"])
    assert 0 < apart <= sum(u["forward"] != u["backward"] for u in small["units"])
    drawn = page.eval_on_selector_all(".map .mismatch", "all => all.map((m) => +m.dataset.units)")
    assert sum(drawn) == apart
    runs = "run" if apart > 1 else "runs"
    words = f"of {len(small['units'])} {runs} forward on one worker and backward on another."
    assert words in page.locator(".summary").inner_text()
    texts = page.locator(".map").text_content()
    assert f"FP cut {small['workers'][1]['forward_from']}" in texts
    assert f"BP cut {small['workers'][1]['backward_from']}" in texts
    page.locator(".map").hover(position={"x": 400, "y": 60})
    assert re.search(r"forward on worker 0: .* ms", page.locator("#tip").text_content())


def test_cuts_of_their_own_are_told_where_units_are_apart(
    small: Facts, made_facts: Callable[..., Facts], opened: Open, shared: Share
) -> None:
    said = "Forward and backward have cuts of their own."
    assert said in shared(small).locator("#model > .lead").inner_text()
    facts = made_facts(workers=2, blocks=2, run=False)
    for unit in facts["units"]:
        unit |= {"backward": unit["forward"], "weights": unit["forward"], "apart": False}
    assert said not in opened(facts).page.locator("#model > .lead").inner_text()


def test_a_module_has_one_name_amid_all_that_lies_in_it(made_facts: Callable[..., Facts], opened: Open) -> None:
    """Layers whose own work lies between that of their parts, as in nn.TransformerEncoderLayer."""
    facts = made_facts(workers=2, blocks=4, run=False)
    for unit in facts["units"]:
        unit |= {"forward_ms": 1.0, "backward_ms": 1.0}
        if re.fullmatch(r"blocks\.\d\.attention", unit["module"] or ""):
            unit |= {"module": unit["module"].removesuffix(".attention")}
    page = opened(facts).page
    names = page.eval_on_selector_all(
        ".map .strip", "all => all.map((t) => [t.textContent, +t.getAttribute('x'), t.getBBox().width])"
    )
    assert [name for name, *_ in names] == ["tok", *(f"blocks.{b}" for b in range(4)), "head", "(loss)"]
    cells = page.eval_on_selector_all(".map .cell", "all => all.map((c) => [c.x.baseVal.value, c.width.baseVal.value])")
    left, right = cells[0][0], sum(cells[-1])
    for (name, middle, width), first, end in zip(
        names, [0, 1, 4, 7, 10, 13, 14], [1, 4, 7, 10, 13, 14, 15], strict=True
    ):
        assert middle == pytest.approx(left + (right - left) * (first + end) / 2 / 15, abs=0.5), name
        assert width <= (right - left) * (end - first) / 15, name


@pytest.mark.parametrize("width", [320, 360, 420, 700, 1280])
def test_parts_of_a_lane_say_alike(width: int, made_facts: Callable[..., Facts], opened: Open) -> None:
    facts = made_facts(workers=2, blocks=4, run=False)
    page = opened(facts, width=width).page
    said = page.eval_on_selector_all(
        ".map g:has(> [data-lane])", "all => all.map((g) => [...g.querySelectorAll('.lane')].map((t) => t.textContent))"
    )
    assert len(said) == 4
    assert len({re.sub(r"[\d.]+", "0", " / ".join(lines)) for lines in said}) == 1, said
    assert all(lines[-1].endswith(" ms") for lines in said)


def test_modules_fold_by_mouse(large: Facts, opened: Open) -> None:
    page = opened(large).page
    rows = page.locator("#tree tbody tr")
    assert page.locator("#tree").get_attribute("role") == "treegrid"
    assert rows.count() < 60, "only the first levels"
    row = page.locator('#tree tr[data-key="m0"] ~ tr', has_text="blocks").first
    assert row.get_attribute("aria-expanded") == "false"
    before = rows.count()
    row.click()
    assert row.get_attribute("aria-expanded") == "true"
    assert rows.count() == before + 55
    block = row.locator("xpath=following-sibling::tr[1]")
    assert (block.get_attribute("aria-level"), block.get_attribute("aria-setsize")) == ("3", "55")
    block.click()
    norm = block.locator("xpath=following-sibling::tr[1]")
    norm.click()
    node = norm.locator("xpath=following-sibling::tr[1]")
    index = int(node.get_attribute("data-key")[1:])
    columns = large["nodes"]["columns"]
    told = dict(zip(columns, large["nodes"]["rows"][index], strict=True))
    for what in ("name", "op", "type", "text"):
        assert str(told[what]) in node.text_content(), what
    row.click()
    assert rows.count() == before


def test_modules_fold_by_keyboard(large: Facts, opened: Open) -> None:
    page = opened(large).page

    def key() -> str:
        found: str = page.evaluate("document.activeElement.dataset.key")
        return found

    def press(*keys: str) -> None:
        for name in keys:
            page.keyboard.press(name)

    page.locator("#search").focus()
    press("Tab")
    if page.evaluate("document.activeElement.tagName") != "TR":
        press("Tab")  # over the part that scrolls
    assert key() == "m0"
    press("ArrowDown", "ArrowDown")
    blocks = page.locator(":focus")
    assert "blocks" in blocks.text_content()
    home = key()
    press("ArrowRight")
    assert blocks.get_attribute("aria-expanded") == "true"
    press("ArrowRight")
    assert page.locator(":focus").get_attribute("aria-level") == "3"
    press("Enter")
    assert page.locator(":focus").get_attribute("aria-expanded") == "true"
    press("ArrowLeft", "ArrowLeft")
    assert key() == home
    press("ArrowLeft")
    assert page.locator(":focus").get_attribute("aria-expanded") == "false"
    press("End")
    assert page.evaluate("document.activeElement.nextElementSibling") is None
    press("ArrowUp", "Home")
    assert key() == "m0"
    assert page.locator('#tree tr[tabindex="0"]').count() == 1


def test_search_finds_modules_and_nodes(large: Facts, opened: Open) -> None:
    page = opened(large).page
    page.locator("#search").fill("blocks.54.mlp")
    page.wait_for_selector(".bar [role=status]:not(:empty)")
    paths = page.eval_on_selector_all("#tree .path", "all => all.map((p) => p.title)")
    assert paths == ["", "blocks", "blocks.54", "blocks.54.mlp"]
    page.locator("#search").fill("softmax")
    node = page.locator("#tree tr[data-key^=n]", has_text="softmax").first
    node.click()
    link = page.locator("#tree [data-node]").first
    target = link.get_attribute("data-node")
    link.click()
    assert page.evaluate("document.activeElement.dataset.key") == f"n{target}"
    assert page.locator("#search").input_value() == ""


def test_a_link_followed_from_a_search_leaves_the_tree_as_it_was(small: Facts, opened: Open) -> None:
    page = opened(small).page

    def rows() -> list[str]:
        found: list[str] = page.eval_on_selector_all("#tree tbody tr", "all => all.map((row) => row.dataset.key)")
        return found

    def search(text: str) -> None:
        page.locator("#search").fill(text)
        page.wait_for_function(
            "text => (document.querySelector('.bar [role=status]').textContent !== '') === (text !== '')", arg=text
        )

    before = rows()
    search("blocks")
    assert len(rows()) > 2 * len(before), "everything found is open"
    page.locator("#tree tr[data-key^=n]", has_text="softmax").first.click()
    page.locator("#tree [data-node]").first.click()
    after = rows()
    node = small["nodes"]["rows"][int(page.evaluate("document.activeElement.dataset.key")[1:])]
    own = [i for i, row in enumerate(small["nodes"]["rows"]) if row[2] == node[2]]
    assert [key for key in after if key in before] == before
    assert {key for key in after if key not in before} == {f"n{i}" for i in own}
    search("relu")
    assert rows() != after
    search("")
    assert rows() == after


def test_no_mark_but_where_units_are_apart(made_facts: Callable[..., Facts], opened: Open) -> None:
    """A module may have its nodes on several workers, and a unit its places, without any unit being apart."""
    facts = made_facts(workers=2, blocks=2, run=False)
    assert any(u["apart"] for u in facts["units"])
    for row in facts["modules"] + facts["units"]:
        row["apart"] = 0
    first = facts["units"].index(next(u for u in facts["units"] if u["forward"] != u["backward"]))
    row = next(i for i, m in enumerate(facts["modules"]) if m["path"] == facts["units"][first]["module"])
    facts["modules"][row]["apart"] = 1
    page = opened(facts).page
    assert page.locator(".map .mismatch").count() == 0
    assert "Every unit runs forward and backward on the same worker." in page.locator(".summary").inner_text()
    marked = page.eval_on_selector_all("#tree tr:has(.split)", "all => all.map((r) => r.dataset.key)")
    assert marked == [f"m{row}"]


def test_another_schedule_and_policy_are_named(other: Facts, small: Facts, shared: Share) -> None:
    pair = "under gpipe · latest"
    page = shared(other)
    for label in ("samples a second, forecast", "milliseconds a minibatch, forecast", "bubble, forecast"):
        assert page.locator("#top dt", has_text=f"{label} {pair}").count() == 1, label
    for section in ("balance", "timeline", "memory"):
        assert pair in page.locator(f"#{section} > .lead").inner_text(), section
    assert "under" not in shared(small).locator("#top .figures").inner_text()


def test_what_was_not_searched_is_not_called_proved(other: Facts, shared: Share) -> None:
    page = shared(other)
    cells = page.locator("#balance .scroll").first.locator("tbody tr").all_inner_texts()
    assert [row.split()[0] for row in cells] == ["same", "bidirectional", "three-way", "pinned"]
    assert [row.split()[-1] for row in cells] == ["yes", "no", "–", "–"]
    assert ["chosen" in row for row in cells] == [False, False, False, True]


def test_speeds_are_shown_where_they_differ(other: Facts, small: Facts, shared: Share) -> None:
    speeds = '[data-fact$=".speed"]'
    assert shared(other).locator(speeds).all_inner_texts() == ["1.00", "0.500"]
    assert shared(small).locator(speeds).count() == 0


def test_waits_have_a_table(small: Facts, shared: Share) -> None:
    page = shared(small)
    table = page.locator('[aria-label="What the workers waited for"]')
    rows = [row.split() for row in table.locator("tbody tr").all_inner_texts()]
    waits = [(w["rank"], wait) for w in small["run"]["workers"] for wait in w["waits"]]
    expected = [[str(k), wait["what"], str(wait["from"]), f"{wait['seconds']:.3f}"] for k, wait in waits]
    assert sorted(rows) == sorted(expected)
    assert [row[3] for row in rows] == sorted((row[3] for row in rows), reverse=True)


def test_the_key_of_edges_says_their_way(small: Facts, shared: Share) -> None:
    keys = shared(small).locator("#edges .key li").all_inner_texts()
    for kind, way in (("activation", "F → F"), ("gradient", "B → B")):
        assert sum(f"{kind}, {way}: " in said for said in keys) == 1, keys


def test_hovering_an_edge_shows_its_bytes(small: Facts, shared: Share) -> None:
    page = shared(small)
    lines = page.eval_on_selector_all(".edge", "all => all.map((e) => [JSON.parse(e.dataset.edges), +e.dataset.value])")
    assert sorted(i for members, _ in lines for i in members) == list(range(len(small["edges"])))
    for place, (members, size) in enumerate(lines):
        assert size == sum(small["edges"][i]["bytes"] for i in members)
        edge = small["edges"][members[0]]
        page.locator(".edge").nth(place).dispatch_event("pointermove", {"clientX": 300, "clientY": 300})
        tip = page.locator("#tip").inner_text()
        said = re.search(r", ([\d.]+ (?:B|KiB))", tip)
        assert said is not None
        assert read(said[1]) == pytest.approx(size, rel=0.05)
        for what in (edge["name"], edge["kind"], f"worker {edge['src']}", f"worker {edge['dst']}"):
            assert what in tip
        if edge["shape"]:
            assert f"{edge['dtype']}[{', '.join(map(str, edge['shape']))}]" in tip
    page.locator("h1").scroll_into_view_if_needed()
    page.locator(".edge").first.focus()
    page.wait_for_function("!document.getElementById('tip').hidden")  # also while it scrolls there
    first = page.locator("#tip").inner_text()
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip").inner_text() != first
    assert page.locator("#live").text_content() != ""
    box = page.locator(".edge .hit").first.bounding_box()
    page.mouse.move(0, 0)
    page.locator("#edges .drawing").scroll_into_view_if_needed()
    box = page.evaluate(
        "(() => { const p = document.querySelector('.edge .hit'), at = p.getPointAtLength(p.getTotalLength() / 2),"
        " m = p.getScreenCTM(); return {x: at.x * m.a + m.e, y: at.y * m.d + m.f}; })()"
    )
    page.mouse.move(box["x"], box["y"])
    assert page.locator("#tip").is_visible()


def test_many_edges_are_bundled(made_facts: Callable[..., Facts], opened: Open) -> None:
    facts = made_facts(workers=8, blocks=100, inner=2)
    page = opened(facts).page
    page.wait_for_selector(".edges", state="attached")
    lines = page.eval_on_selector_all(".edge", "all => all.map((e) => [JSON.parse(e.dataset.edges), +e.dataset.value])")
    assert len(lines) < len(facts["edges"])
    assert sorted(i for members, _ in lines for i in members) == list(range(len(facts["edges"])))
    for members, size in lines:
        ends = {tuple(facts["edges"][i][k] for k in ("kind", "src", "dst")) for i in members}
        assert len(ends) == 1
        assert size == sum(facts["edges"][i]["bytes"] for i in members)


def test_both_timelines_share_their_axis(small: Facts, shared: Share) -> None:
    page = shared(small)
    chart = page.locator(".timeline")
    assert "Of 40 minibatches only the first 20 are shown." in page.locator("#timeline").inner_text()

    def ranges() -> list[list[float]]:
        found: list[list[float]] = chart.evaluate("c => [c._fullLayout.xaxis.range, c._fullLayout.xaxis2.range]")
        return found

    before = ranges()
    assert before[0] == before[1]
    page.get_by_role("button", name="Zoom in").click()
    after = ranges()
    assert after[0] == after[1]
    assert after[0][1] - after[0][0] == pytest.approx((before[0][1] - before[0][0]) / 2)
    page.get_by_role("button", name="Show all of the time").click()
    span = next(span for span in small["run"]["timeline"]["spans"] if span[:3] == [1, "B", 3])
    to_the_middle(chart)
    x, y = chart.evaluate(
        "(c, [x, y]) => { const l = c._fullLayout, box = c.getBoundingClientRect();"
        " return [box.x + l.xaxis2._offset + l.xaxis2.l2p(x), box.y + l.yaxis2._offset + l.yaxis2.l2p(y)]; }",
        [500 * (span[4] + span[5]), span[0]],
    )
    page.mouse.move(x, y)
    tip = page.locator("#tip").inner_text()
    assert tip.startswith("B3 on worker 1, measured\nminibatch 3\n")
    assert read(tip.splitlines()[2]) == pytest.approx(1e3 * (span[5] - span[4]), rel=0.01)
    chart.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert "on worker 1" in page.locator("#tip").inner_text()


@pytest.mark.parametrize(("panel", "says"), [("timeline", "waits"), ("run", "between actions")])
def test_an_idle_stretch_is_told_with_its_ends(
    panel: str, says: str, made_facts: Callable[..., Facts], opened: Open
) -> None:
    facts = made_facts(workers=2, blocks=4)
    facts["run"]["timeline"]["spans"] = [s for s in facts["run"]["timeline"]["spans"] if s[1] != "wait"]
    page = opened(facts).ready()
    timeline = facts["timeline"] if panel == "timeline" else facts["run"]["timeline"]
    spans = sorted((s for s in timeline["spans"] if s[0] == 0), key=lambda s: s[4])
    start, stop = max(((a[5], b[4]) for a, b in itertools.pairwise(spans)), key=lambda gap: gap[1] - gap[0])
    place = "" if panel == "timeline" else "2"
    chart = page.locator(".timeline")
    to_the_middle(chart)

    def tip(seconds: float) -> list[str]:
        x, y = chart.evaluate(
            "(c, [x, place]) => { const l = c._fullLayout, box = c.getBoundingClientRect(), [a, b] = ["
            "l[`xaxis${place}`], l[`yaxis${place}`]];"
            " return [box.x + a._offset + a.l2p(x), box.y + b._offset + b.l2p(0)]; }",
            [seconds * 1e3, place],
        )
        page.mouse.move(x, y)
        told: list[str] = page.locator("#tip").inner_text().splitlines()
        return told

    lines = tip(start + 0.3 * (stop - start))
    assert lines == tip(start + 0.7 * (stop - start)), "wherever the mouse is in it"
    assert lines[0] == f"worker 0, {'simulated' if panel == 'timeline' else 'measured'}"
    found = re.fullmatch(rf"{says} ([\d.]+) ms, from ([\d.,]+) to ([\d.,]+)", lines[1])
    assert found is not None, lines
    length, begin, end = (float(number.replace(",", "")) for number in found.groups())
    assert (begin, end) == pytest.approx((1e3 * start, 1e3 * stop), abs=0.01 * length)
    assert length == pytest.approx(1e3 * (stop - start), rel=0.01)


def test_the_timeline_says_how_far_it_goes(small: Facts, shared: Share) -> None:
    told = shared(small).locator("#timeline").inner_text()
    for name, timeline in (("Simulated", small["timeline"]), ("Measured", small["run"]["timeline"])):
        found = re.search(rf"{name}: (\d+) minibatches, \d+ spans, until ([\d.,]+) ms", told)
        assert found is not None, name
        assert int(found[1]) == timeline["minibatches"]
        assert read(found[2]) == pytest.approx(1e3 * max(s[5] for s in timeline["spans"]), rel=0.01)
    assert told.count("its lanes are blank from there on") == 1
    assert "time between actions" in told


def test_lines_of_staleness_differ_and_are_named(made_facts: Callable[..., Facts], opened: Open) -> None:
    facts = made_facts(workers=2, blocks=2)
    for log in facts["run"]["staleness"]:
        log["stale"] = log["ahead"] = [i % 3 for i in range(len(log["step"]))]
    facts["run"]["staleness"] += [log | {"group": 1} for log in facts["run"]["staleness"]]
    page = opened(facts).ready()
    names = page.locator('#run [aria-label="Lines"] li').all_inner_texts()
    expected = {
        f"worker {w} · group {k} · {n} behind, predicted {n}" for w in range(2) for k in range(2) for n in range(3)
    }
    assert set(names) == expected
    chart = page.locator('#run .chart[aria-label^="Root mean square"]')
    drawn = chart.evaluate("c => c.data.map((t) => [t.name, t.line.color, t.line.dash])")
    assert [name for name, *_ in drawn] == names
    assert len({(colour, dash) for _, colour, dash in drawn}) == len(expected)
    title = chart.locator(".ytitle")
    assert title.text_content() == "root mean square of the difference (RMSE)"
    box, whole = title.bounding_box(), chart.bounding_box()
    assert whole["y"] <= box["y"] < box["y"] + box["height"] <= whole["y"] + whole["height"], "not cut off"
    assert "optimizer's parameter groups" in page.locator("#run").inner_text()


def test_light_and_dark_follow_the_system(small: Facts, shared: Share) -> None:
    page = shared(small)

    def looks() -> list[str]:
        found: list[str] = page.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,"
            "getComputedStyle(document.querySelector('#balance .xtick text')).fill,"
            "getComputedStyle(document.querySelector('#balance .gridlayer path')).stroke,"
            "getComputedStyle(document.querySelector('#balance .main-svg')).backgroundColor]"
        )
        return found

    light = looks()
    page.emulate_media(color_scheme="dark")
    dark = looks()
    assert light[4] == dark[4] == "rgba(0, 0, 0, 0)", "charts are transparent"
    assert all(a != b for a, b in zip(light[:4], dark[:4], strict=True)), (light, dark)

    def brightness(colour: str) -> float:
        return sum(map(int, re.findall(r"\d+", colour)[:3]))

    assert brightness(light[0]) > 700
    assert brightness(dark[0]) < 100
    assert brightness(dark[2]) > brightness(dark[0]) + 250, "text of charts can be read"
    page.emulate_media(color_scheme="light")
    assert looks() == light


@pytest.mark.parametrize("workers", [2, 24])
def test_a_phone_scrolls_one_way(workers: int, made_facts: Callable[..., Facts], opened: Open) -> None:
    facts = made_facts(workers=workers, blocks=workers, inner=2, name="a_model_file_with_a_rather_long_name_indeed.py")
    page = opened(facts, width=360).ready()
    unfold(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_paper_holds_everything(small: Facts, opened: Open, tmp_path: Path) -> None:
    page = opened(small, scheme="dark").page  # at once, before the charts below are drawn
    page.pdf(path=tmp_path / "report.pdf", prefer_css_page_size=True)
    assert len(re.findall(rb"/Type\s*/Page\b", (tmp_path / "report.pdf").read_bytes())) > 2
    assert page.locator(".chart:not([data-drawn])").count() == 0
    page.set_viewport_size({"width": 680, "height": 962})
    page.emulate_media(media="print", color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("document.documentElement.scrollWidth") == 680, "nothing is cut off"
    assert page.locator("nav").is_hidden()
    assert page.locator("#tree tbody tr").count() > 5


def test_it_opens_in_two_seconds(large: Facts, opened: Open) -> None:
    """Loaded and painted: the head, the map and the tree are there. Charts further down follow when it is idle."""
    taken = []
    for _ in range(3):
        report = opened(large)
        page = report.page
        painted = page.evaluate(
            "new Promise((done) => new PerformanceObserver((list) => list.getEntries().forEach((e) => "
            "e.name === 'first-contentful-paint' && done(e.startTime))).observe({type: 'paint', buffered: true}))"
        )
        taken.append(max(painted, page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")))
        assert page.locator(".map [data-lane]").count() == 8
        report.close()  # its charts would be drawn beside the next
    assert statistics.median(taken) < 2000, taken


def test_ten_thousand_nodes_and_64_workers(made_facts: Callable[..., Facts], opened: Open) -> None:
    facts = made_facts(workers=64, blocks=110, inner=32, run=False)
    assert len(facts["nodes"]["rows"]) > 10_000
    page = opened(facts).page
    assert page.locator("#tree tbody tr").count() < 60
    assert page.evaluate("document.documentElement.scrollWidth") == 1280


def test_what_is_missing_is_said(made_facts: Callable[..., Facts], opened: Open) -> None:
    facts = made_facts(run=False) | {"nodes": None, "partitions": [], "timeline": None, "forecast": None}
    for unit in facts["units"]:
        unit.update(forward_ms=None, backward_ms=None, weight_ms=None)
    page = opened(facts).ready()
    for section, said in {
        "top": "There is no forecast", "model": "compile again to see the nodes", "balance": "compile again",
        "timeline": "no simulated timeline", "memory": "no memory over time", "run": "No run was given",
    }.items():  # fmt: skip
        assert said in page.locator(f"#{section}").inner_text(), section
    assert page.locator(".map [data-lane]").count() == 8, "by the number of units"


def test_a_run_that_did_not_end(made_facts: Callable[..., Facts], opened: Open) -> None:
    facts = made_facts()
    kept = ("folder", "metrics", "staleness", "timeline")
    problem = "run.json is missing: the run did not end"
    facts["run"] = {key: facts["run"][key] for key in kept} | {"problems": [problem], "timeline": None, "staleness": []}
    page = opened(facts).ready()
    assert problem in page.locator(".warnings").inner_text()
    told = page.locator("#run").inner_text()
    assert "run.json is not there" in told
    assert "Staleness was not logged" in told
    assert "left no trace" in page.locator("#timeline").inner_text()


def test_edits_and_stale_sources_are_marked(made_facts: Callable[..., Facts], opened: Open) -> None:
    facts = made_facts()
    facts["build"] |= {"edited": ["stage_1.py"], "stale": ["gpt.py changed"]}
    facts["workers"][1]["edited"] = True
    page = opened(facts).page
    warnings = page.locator(".warnings").inner_text()
    assert "stage_1.py" in warnings
    assert "gpt.py changed" in warnings
    assert page.locator("#workers tbody tr").nth(1).locator("td").first.inner_text().split() == ["1", "edited"]


def test_names_are_never_markup(made_facts: Callable[..., Facts], opened: Open) -> None:
    bad = "<img src=x onerror=alert(1)>"
    facts = made_facts(workers=2, blocks=2, name=bad)
    for row in facts["modules"][1:]:
        row["name"], row["path"] = bad, bad
    for row in facts["nodes"]["rows"]:
        row[0] = row[3] = row[4] = row[10] = row[11] = bad
    for edge in facts["edges"]:
        edge |= {"name": bad, "module": bad, "source": bad, "dtype": bad, "names": [bad]}
    for worker in facts["workers"]:
        worker |= {"forward_from": bad, "backward_from": bad, "owned_names": [bad], "engines": [bad], "file": bad}
    for unit in facts["units"]:
        unit["module"] = bad
    for partition in facts["partitions"]:
        partition["mode"] = bad
    facts["build"] |= {"edited": [bad], "stale": [bad], "folder": bad, "policy": bad}
    facts["grid"]["policy"] = bad
    facts["run"] |= {"problems": [bad], "folder": bad, "time_losses": [{"worker": 1, "share": 0.1, "text": bad}]}
    facts["run"]["workers"][0]["waits"] = [{"what": bad, "from": 0, "seconds": 1.0}]
    report = opened(facts)
    page = report.ready()
    unfold(page)
    for _ in range(3):
        page.evaluate("document.querySelectorAll('#tree tr[aria-expanded=false]').forEach((row) => row.click())")
    page.locator(".edge").first.focus()
    assert page.locator("img, image").count() == 0
    assert page.locator("h1").inner_text().startswith(bad)
    assert page.locator("#tip").inner_text().startswith(bad)
    assert page.locator("#balance .annotation-text", has_text="onerror").count() == 3


def test_readers_of_the_screen_are_served(small: Facts, shared: Share) -> None:
    page = shared(small)
    page.keyboard.press("Tab")
    assert page.locator(":focus").text_content() == "Skip to the contents"
    assert page.evaluate("document.activeElement.getBoundingClientRect().top") >= 0, "seen when it has the focus"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    unnamed = page.eval_on_selector_all(
        "[role=img], [role=group], [role=region], [role=treegrid], nav, .js-plotly-plot",
        "all => all.filter((e) => !e.getAttribute('aria-label')).map((e) => e.outerHTML.slice(0, 80))",
    )
    assert unnamed == []
    assert page.eval_on_selector_all("button", "all => all.filter((b) => !b.textContent && !b.ariaLabel).length") == 0
    links = page.eval_on_selector_all("nav a", "all => all.map((a) => a.getAttribute('href').slice(1))")
    assert links == page.eval_on_selector_all("main > section", "all => all.map((s) => s.id)")
