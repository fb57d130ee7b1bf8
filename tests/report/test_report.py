"""The report in Chromium: it is quiet, asks for nothing, shows the numbers it was given, and can be used by all."""

from __future__ import annotations

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

pytestmark = pytest.mark.browser

Facts = dict[str, Any]
Open = Callable[..., Any]
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
def large() -> Facts:
    """A build of more than 5,000 nodes."""
    facts = built(55, 4)
    assert len(facts["nodes"]["rows"]) > 5000
    return facts


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


def test_every_number_is_a_fact(small: Facts, opened: Open) -> None:
    page = opened(small).ready()
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    page.wait_for_timeout(100)  # their tables are made after the event
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


def test_charts_draw_the_facts(small: Facts, opened: Open) -> None:
    page = opened(small).ready()
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


def test_the_map_shows_workers_cuts_and_mismatches(small: Facts, opened: Open) -> None:
    page = opened(small).ready()
    lanes = page.eval_on_selector_all(
        ".map [data-lane]", "all => all.map((r) => [r.dataset.lane, +r.dataset.worker, +r.dataset.value])"
    )
    assert [lane[:2] for lane in lanes] == [["F", 0], ["F", 1], ["B", 0], ["B", 1]]
    for lane, worker, time in lanes:
        mine = [u for u in small["units"] if u["forward" if lane == "F" else "backward"] == worker]
        times = (u["forward_ms"] if lane == "F" else u["backward_ms"] + u["weight_ms"] for u in mine)
        assert time == pytest.approx(sum(times))
    apart = sum(u["forward"] != u["backward"] for u in small["units"])
    assert apart > 0
    assert page.eval_on_selector_all(".map .mismatch", "all => all.map((m) => +m.dataset.units)") == [apart]
    texts = page.locator(".map").text_content()
    assert f"FP cut {small['workers'][1]['forward_from']}" in texts
    assert f"BP cut {small['workers'][1]['backward_from']}" in texts
    page.locator(".map").hover(position={"x": 400, "y": 60})
    assert re.search(r"forward on worker 0: .* ms", page.locator("#tip").text_content())


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
    page.locator("#search").fill("blocks.54.qkv")
    page.wait_for_selector(".bar [role=status]:not(:empty)")
    paths = page.eval_on_selector_all("#tree .path", "all => all.map((p) => p.title)")
    assert paths == ["", "blocks", "blocks.54", "blocks.54.qkv"]
    page.locator("#search").fill("softmax")
    node = page.locator("#tree tr[data-key^=n]", has_text="softmax").first
    node.click()
    link = page.locator("#tree [data-node]").first
    target = link.get_attribute("data-node")
    link.click()
    assert page.evaluate("document.activeElement.dataset.key") == f"n{target}"
    assert page.locator("#search").input_value() == ""


def test_hovering_an_edge_shows_its_bytes(small: Facts, opened: Open) -> None:
    page = opened(small).ready()
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
    page.wait_for_timeout(300)  # it scrolls there
    assert page.locator("#tip").is_visible()
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
    page = opened(facts).ready()
    lines = page.eval_on_selector_all(".edge", "all => all.map((e) => [JSON.parse(e.dataset.edges), +e.dataset.value])")
    assert len(lines) < len(facts["edges"])
    assert sorted(i for members, _ in lines for i in members) == list(range(len(facts["edges"])))
    for members, size in lines:
        ends = {tuple(facts["edges"][i][k] for k in ("kind", "src", "dst")) for i in members}
        assert len(ends) == 1
        assert size == sum(facts["edges"][i]["bytes"] for i in members)


def test_both_timelines_share_their_axis(small: Facts, opened: Open) -> None:
    page = opened(small).ready()
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
    chart.evaluate("c => c.scrollIntoView({block: 'center', behavior: 'instant'})")
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


def test_light_and_dark_follow_the_system(small: Facts, opened: Open) -> None:
    page = opened(small).ready()

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
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    page.wait_for_timeout(100)
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
        page = opened(large).page
        painted = page.evaluate(
            "new Promise((done) => new PerformanceObserver((list) => list.getEntries().forEach((e) => "
            "e.name === 'first-contentful-paint' && done(e.startTime))).observe({type: 'paint', buffered: true}))"
        )
        taken.append(max(painted, page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")))
        assert page.locator(".map [data-lane]").count() == 8
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
    page = opened(facts).ready()
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
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    for _ in range(3):
        page.evaluate("document.querySelectorAll('#tree tr[aria-expanded=false]').forEach((row) => row.click())")
    page.locator(".edge").first.focus()
    assert page.locator("img, image").count() == 0
    assert page.locator("h1").inner_text().startswith(bad)
    assert page.locator("#tip").inner_text().startswith(bad)
    assert page.locator("#balance .annotation-text", has_text="onerror").count() == 3


def test_readers_of_the_screen_are_served(small: Facts, opened: Open) -> None:
    page = opened(small).ready()
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
