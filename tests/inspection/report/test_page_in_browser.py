"""In Chromium: the page as a whole is quiet and asks for nothing; its charts and its timeline."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_facts import made_facts

pytestmark = [pytest.mark.browser, pytest.mark.slow]

Facts = dict[str, Any]
Open = Callable[..., Any]
Share = Callable[[Facts], Any]

SMALL = made_facts(workers=2, blocks=4)


def to_the_middle(chart: Any) -> None:
    """Scroll to a chart and wait for the event of it, which hides the tooltip."""
    chart.evaluate(
        "c => new Promise((done) => { c.scrollIntoView({block: 'center', behavior: 'instant'});"
        " requestAnimationFrame(() => requestAnimationFrame(() => done())); })"
    )


def test_all_is_there_once_it_is_opened(shared: Share) -> None:
    page = shared(SMALL)
    assert page.evaluate("JSON.parse(document.getElementById('facts').textContent)") == json.loads(json.dumps(SMALL))
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    page.wait_for_function("() => ![...document.querySelectorAll('details')].some((d) => d.querySelector('script'))")
    assert page.locator("[aria-label=Edges] tbody tr").count() == len(SMALL["edges"])
    assert page.locator(".js-plotly-plot").count() == 3 + 1 + 1 + 4
    drawn = page.locator(".timeline").evaluate("c => c.data.map((t) => ({meta: t.meta, x: t.x, on: t.yaxis ?? 'y'}))")
    for axis, spans in (("y", SMALL["timeline"]["spans"]), ("y2", SMALL["run"]["timeline"]["spans"])):
        for kind in {span[1] for span in spans}:
            found = sum(t["x"].count(None) + 1 for t in drawn if t["meta"] == kind and t["on"] == axis)
            assert found == sum(span[1] == kind for span in spans), (axis, kind)


def test_both_timelines_share_their_axis(shared: Share) -> None:
    page = shared(SMALL)
    chart = page.locator(".timeline")

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
    span = next(span for span in SMALL["run"]["timeline"]["spans"] if span[:3] == [1, "B", 3])
    to_the_middle(chart)
    x, y = chart.evaluate(
        "(c, [x, y]) => { const l = c._fullLayout, box = c.getBoundingClientRect();"
        " return [box.x + l.xaxis2._offset + l.xaxis2.l2p(x), box.y + l.yaxis2._offset + l.yaxis2.l2p(y)]; }",
        [500 * (span[4] + span[5]), span[0]],
    )
    page.mouse.move(x, y)
    tip = page.locator("#tip").inner_text()
    assert tip.startswith("B3 on worker 1, measured\nminibatch 3\n")
    assert float(tip.splitlines()[2].split()[0]) == pytest.approx(1e3 * (span[5] - span[4]), rel=0.01)
    chart.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert "on worker 1" in page.locator("#tip").inner_text()


@pytest.mark.parametrize(("panel", "says"), [("timeline", "waits"), ("run", "between actions")])
def test_an_idle_stretch_is_told_with_its_ends(panel: str, says: str, opened: Open) -> None:
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


def test_light_and_dark_follow_the_system(shared: Share) -> None:
    page = shared(SMALL)

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


@pytest.mark.parametrize("workers", [2, pytest.param(24, marks=pytest.mark.slow)])
def test_a_phone_scrolls_one_way(workers: int, opened: Open) -> None:
    facts = made_facts(workers=workers, blocks=workers, inner=2, name="a_model_file_with_a_rather_long_name_indeed.py")
    page = opened(facts, width=360).ready()
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") == 360


@pytest.mark.slow
def test_paper_holds_everything(opened: Open, tmp_path: Path) -> None:
    page = opened(SMALL, scheme="dark").page  # at once, before the charts below are drawn
    page.pdf(path=tmp_path / "report.pdf", prefer_css_page_size=True)
    assert len(re.findall(rb"/Type\s*/Page\b", (tmp_path / "report.pdf").read_bytes())) > 2
    assert page.locator(".chart:not([data-drawn])").count() == 0
    page.set_viewport_size({"width": 680, "height": 962})
    page.emulate_media(media="print", color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("document.documentElement.scrollWidth") == 680, "nothing is cut off"
    assert page.locator("nav").is_hidden()
    assert page.locator("#tree tbody tr:not([hidden])").count() > 5


@pytest.mark.slow
def test_it_opens_in_two_seconds(opened: Open) -> None:
    """Loaded and painted: the head, the map and the tree are there. Charts further down follow when it is idle."""
    facts = made_facts(workers=4, blocks=55, inner=31, run=False)
    assert len(facts["nodes"]["rows"]) > 5000
    taken = []
    for _ in range(3):
        report = opened(facts)
        page = report.page
        painted = page.evaluate(
            "new Promise((done) => new PerformanceObserver((list) => list.getEntries().forEach((e) => "
            "e.name === 'first-contentful-paint' && done(e.startTime))).observe({type: 'paint', buffered: true}))"
        )
        taken.append(max(painted, page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")))
        assert page.locator(".map [data-lane]").count() == 8
        report.close()  # its charts would be drawn while the next one opens
    assert statistics.median(taken) < 2000, taken


@pytest.mark.slow
def test_ten_thousand_nodes_and_64_workers(opened: Open) -> None:
    facts = made_facts(workers=64, blocks=110, inner=32, run=False)
    assert len(facts["nodes"]["rows"]) > 10_000
    page = opened(facts).page
    assert page.locator("#tree tbody tr:not([hidden])").count() < 60
    assert page.evaluate("document.documentElement.scrollWidth") == 1280


def test_names_are_never_markup(opened: Open) -> None:
    """What the scripts make of names; what Python makes of them is tested as text."""
    bad = "<img src=x onerror=alert(1)>"
    facts = made_facts(workers=2, blocks=2, name=bad)
    for row in facts["modules"][1:]:
        row["name"], row["path"] = bad, bad
    for row in facts["nodes"]["rows"]:
        row[0] = row[3] = row[11] = bad
    for edge in facts["edges"]:
        edge |= {"name": bad, "module": bad, "names": [bad]}
    for unit in facts["units"]:
        unit["module"] = bad
    page = opened(facts).ready()
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    page.locator("#search").fill("img")
    page.wait_for_selector(".bar [role=status]:not(:empty)")
    page.locator(".edge").first.focus()
    assert page.locator("img, image").count() == 0
    assert page.locator("h1").inner_text().startswith(bad)
    assert page.locator("#tip").inner_text().startswith(bad)


def test_the_keyboard_skips_to_the_contents(shared: Share) -> None:
    page = shared(SMALL)
    page.keyboard.press("Tab")
    assert page.locator(":focus").text_content() == "Skip to the contents"
    assert page.evaluate("document.activeElement.getBoundingClientRect().top") >= 0, "seen when it has the focus"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    unnamed = page.eval_on_selector_all(
        "[role=img], [role=group], .js-plotly-plot",
        "all => all.filter((e) => !e.getAttribute('aria-label')).map((e) => e.outerHTML.slice(0, 80))",
    )
    assert unnamed == []
