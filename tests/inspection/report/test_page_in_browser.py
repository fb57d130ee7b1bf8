"""In Chromium: the page as a whole is quiet and asks for nothing; what folds and zooms."""

from __future__ import annotations

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


def unfold(page: Any) -> None:
    """Open all that is folded, and wait until it is there."""
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    page.wait_for_function("() => ![...document.querySelectorAll('details')].some((d) => d.querySelector('script'))")


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_the_first_picture_is_on_the_first_screen(width: int, height: int, opened: Open) -> None:
    page = opened(SMALL, width=width).page
    lanes = [page.locator(".map .lane").nth(k).bounding_box() for k in (0, 1)]
    assert max(lane["y"] + lane["height"] for lane in lanes) <= height


@pytest.mark.parametrize("width", [1280, 900, 390])
@pytest.mark.parametrize("run", [True, False])
def test_figures_fill_their_grid(width: int, run: bool, opened: Open) -> None:
    facts = made_facts(workers=2, blocks=4, run=run)
    if run:
        facts["run"] |= {"tokens_per_second": 1e4, "mfu": 0.4}
    page = opened(facts, width=width).page
    whole = page.locator(".figures").bounding_box()
    rows: dict[int, list[Any]] = {}
    for figure in page.locator(".figures > div").all():
        box = figure.bounding_box()
        rows.setdefault(round(box["y"]), []).append(box)
    assert sum(map(len, rows.values())) == (9 if run else 6)
    for row in rows.values():
        assert row[0]["x"] == pytest.approx(whole["x"], abs=2)
        assert row[-1]["x"] + row[-1]["width"] == pytest.approx(whole["x"] + whole["width"], abs=2)


def test_a_phone_sees_that_there_is_more_to_navigate(opened: Open) -> None:
    """By a shadow at the edge: it is darker there than in the middle."""
    page = opened(SMALL, width=390).page
    whole, seen = page.locator("nav ul").evaluate("e => [e.scrollWidth, e.clientWidth]")
    assert whole > seen
    middle, edge = page.evaluate(
        """async (bytes) => {
          const image = await createImageBitmap(new Blob([new Uint8Array(bytes)]));
          const canvas = new OffscreenCanvas(image.width, image.height).getContext("2d");
          canvas.drawImage(image, 0, 0);
          const row = canvas.getImageData(0, 4, image.width, 1).data;
          return [image.width / 2, image.width - 2].map((x) => row[4 * x]);
        }""",
        list(page.locator("nav").screenshot()),
    )
    assert edge < middle - 8


def test_all_is_there_once_it_is_opened(shared: Share) -> None:
    page = shared(SMALL)
    assert page.evaluate("JSON.parse(document.getElementById('facts').textContent)") == json.loads(json.dumps(SMALL))
    unfold(page)
    assert page.locator("[aria-label=Nodes] tbody tr").count() == len(SMALL["nodes"]["rows"])
    assert page.locator(".chart").count() == 3 + 1 + 3


def test_modules_fold_by_mouse_and_keyboard(opened: Open) -> None:
    page = opened(made_facts(workers=4, blocks=30, inner=4, run=False)).page
    shown = page.locator("#tree .cells:visible")
    before = shown.count()
    assert before < 60, "only the first levels"
    blocks = page.locator("#tree summary[title='blocks']")
    blocks.click()
    assert shown.count() == before + 30
    page.locator("#tree summary[title='blocks.0']").focus()
    page.keyboard.press("Enter")
    assert shown.count() == before + 33
    page.locator("#tree summary[title='blocks.0.norm']").click()
    page.locator("[aria-label=Nodes]:visible tbody tr").first.wait_for()
    assert page.locator("[aria-label=Nodes]:visible tbody tr").count() == 4
    blocks.click()
    assert shown.count() == before
    left = [shown.nth(k).locator("span").last.bounding_box()["x"] for k in (0, 3)]
    assert left[0] == pytest.approx(left[1], abs=1), "one column"


def test_the_timeline_zooms(opened: Open) -> None:
    page = opened(SMALL).page

    def seen() -> tuple[float, float]:
        """Where what is seen begins and ends, as parts of all of the time."""
        left, width, whole = page.locator(".view").evaluate("s => [s.scrollLeft, s.clientWidth, s.scrollWidth]")
        return left / whole, (left + width) / whole

    def press(name: str) -> tuple[float, float]:
        page.get_by_role("button", name=name, exact=True).click()
        return seen()

    first = seen()
    assert first[0] == 0
    assert press("Show all of the time") == (0, 1)
    assert press("Zoom in") == pytest.approx((0.25, 0.75), abs=0.01)
    assert press("Zoom out") == (0, 1)
    assert press("Show the first minibatches") == pytest.approx(first, abs=0.01)
    left = [page.locator(f"#spans .row:nth-of-type({row}) .k-F").first.bounding_box()["x"] for row in (1, 3)]
    assert left[0] == pytest.approx(left[1], abs=1), "one axis"


def test_light_and_dark_follow_the_system(shared: Share) -> None:
    page = shared(SMALL)

    def looks() -> list[str]:
        found: list[str] = page.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,"
            "getComputedStyle(document.querySelector('#balance .up span')).color,"
            "getComputedStyle(document.querySelector('#balance .across')).borderTopColor,"
            "getComputedStyle(document.querySelector('#balance .plane')).backgroundColor]"
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
    page = opened(facts, width=360).page
    unfold(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 360


@pytest.mark.slow
def test_paper_holds_everything(opened: Open, tmp_path: Path) -> None:
    page = opened(SMALL, scheme="dark").page
    page.pdf(path=tmp_path / "report.pdf", prefer_css_page_size=True)
    assert len(re.findall(rb"/Type\s*/Page\b", (tmp_path / "report.pdf").read_bytes())) > 2
    page.set_viewport_size({"width": 680, "height": 962})
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("document.documentElement.scrollWidth") == 680, "nothing is cut off"
    assert page.locator("nav").is_hidden()
    assert page.locator("#tree .cells:visible").count() > 5


@pytest.mark.slow
def test_it_opens_in_two_seconds(opened: Open) -> None:
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
        assert page.locator(".map .part").count() == 8
        report.close()
    assert statistics.median(taken) < 2000, taken


@pytest.mark.slow
def test_ten_thousand_nodes_and_64_workers(opened: Open) -> None:
    facts = made_facts(workers=64, blocks=110, inner=32, run=False)
    assert len(facts["nodes"]["rows"]) > 10_000
    page = opened(facts).page
    assert page.locator("#tree .cells:visible").count() < 60
    assert page.evaluate("document.documentElement.scrollWidth") == 1280


def test_names_are_never_markup(opened: Open) -> None:
    """What is unfolded, too; what Python makes of them is tested as text."""
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
    page = opened(facts).page
    unfold(page)
    assert page.locator("img, image").count() == 0
    assert page.locator("h1").inner_text().startswith(bad)
    assert bad in page.locator("[aria-label=Nodes]").first.text_content()


def test_the_keyboard_skips_to_the_contents(shared: Share) -> None:
    page = shared(SMALL)
    page.keyboard.press("Tab")
    assert page.locator(":focus").text_content() == "Skip to the contents"
    assert page.evaluate("document.activeElement.getBoundingClientRect().top") >= 0, "seen when it has the focus"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    unnamed = page.eval_on_selector_all(
        "[role=img], [role=group]",
        "all => all.filter((e) => !e.getAttribute('aria-label')).map((e) => e.outerHTML.slice(0, 80))",
    )
    assert unnamed == []
