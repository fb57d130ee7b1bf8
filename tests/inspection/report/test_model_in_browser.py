"""In Chromium: the model's map, its tree and the edges."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from report_facts import made_facts

from fxpipe.inspection.report import formats

pytestmark = [pytest.mark.browser, pytest.mark.slow]

Facts = dict[str, Any]
Open = Callable[..., Any]
Share = Callable[[Facts], Any]

SMALL = made_facts(workers=2, blocks=4)
LARGE = made_facts(workers=4, blocks=30, inner=4, run=False)


def test_the_map_shows_workers_cuts_and_mismatches(shared: Share) -> None:
    page = shared(SMALL)
    lanes = page.eval_on_selector_all(
        ".map [data-lane]", "all => all.map((r) => [r.dataset.lane, +r.dataset.worker, +r.dataset.value])"
    )
    assert [lane[:2] for lane in lanes] == [["F", 0], ["F", 1], ["B", 0], ["B", 1]]
    for lane, worker, time in lanes:
        mine = [u for u in SMALL["units"] if u["forward" if lane == "F" else "backward"] == worker]
        times = (u["forward_ms"] if lane == "F" else u["backward_ms"] + u["weight_ms"] for u in mine)
        assert time == pytest.approx(sum(times))
    apart = sum(u["apart"] for u in SMALL["units"])
    assert 0 < apart <= sum(u["forward"] != u["backward"] for u in SMALL["units"])
    drawn = page.eval_on_selector_all(".map .mismatch", "all => all.map((m) => +m.dataset.units)")
    assert sum(drawn) == apart
    texts = page.locator(".map").text_content()
    assert f"FP cut {SMALL['workers'][1]['forward_from']}" in texts
    assert f"BP cut {SMALL['workers'][1]['backward_from']}" in texts
    page.locator(".map").hover(position={"x": 400, "y": 60})
    assert re.search(r"forward on worker 0: .* ms", page.locator("#tip").text_content())


def test_a_module_has_one_name_amid_all_that_lies_in_it(opened: Open) -> None:
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


def test_parts_of_a_lane_say_alike(opened: Open) -> None:
    page = opened(SMALL, width=320).page
    for width in (320, 420, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function(
            "() => document.querySelector('.map').viewBox.baseVal.width === document.getElementById('map').clientWidth"
        )
        said = page.eval_on_selector_all(
            ".map g:has(> [data-lane])",
            "all => all.map((g) => [...g.querySelectorAll('.lane')].map((t) => t.textContent))",
        )
        assert len(said) == 4
        assert len({re.sub(r"[\d.]+", "0", " / ".join(lines)) for lines in said}) == 1, said
        assert all(lines[-1].endswith(" ms") for lines in said)


def test_modules_fold_by_mouse(opened: Open) -> None:
    page = opened(LARGE).page
    rows = page.locator("#tree tbody tr:not([hidden])")
    assert page.locator("#tree").get_attribute("role") == "treegrid"
    assert rows.count() < 60, "only the first levels"
    row = page.locator('#tree tr[data-key="m0"] ~ tr', has_text="blocks").first
    assert row.get_attribute("aria-expanded") == "false"
    before = rows.count()
    row.click()
    assert row.get_attribute("aria-expanded") == "true"
    assert rows.count() == before + 30
    block = row.locator("xpath=following-sibling::tr[1]")
    assert block.get_attribute("aria-level") == "3"
    block.click()
    norm = block.locator("xpath=following-sibling::tr[1]")
    norm.click()
    node = norm.locator("xpath=following-sibling::tr[1]")
    index = int(node.get_attribute("data-key")[1:])
    columns = LARGE["nodes"]["columns"]
    told = dict(zip(columns, LARGE["nodes"]["rows"][index], strict=True))
    for what in ("name", "op", "type", "text"):
        assert str(told[what]) in node.text_content(), what
    row.click()
    assert rows.count() == before


def test_modules_fold_by_keyboard(opened: Open) -> None:
    page = opened(LARGE).page

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
    assert key() == page.locator("#tree tr:not([hidden])").last.get_attribute("data-key")
    press("ArrowUp", "Home")
    assert key() == "m0"
    assert page.locator('#tree tr[tabindex="0"]').count() == 1


def test_search_finds_modules_and_nodes(opened: Open) -> None:
    page = opened(LARGE).page
    page.locator("#search").fill("blocks.29.mlp")
    page.wait_for_selector(".bar [role=status]:not(:empty)")
    paths = page.eval_on_selector_all("#tree tr:not([hidden]) .path", "all => all.map((p) => p.title)")
    assert paths == ["", "blocks", "blocks.29", "blocks.29.mlp"]
    page.locator("#search").fill("softmax")
    node = page.locator("#tree tr[data-key^=n]:not([hidden])", has_text="softmax").first
    node.click()
    link = page.locator("#tree tr:not([hidden]) [data-node]").first
    target = link.get_attribute("data-node")
    link.click()
    assert page.evaluate("document.activeElement.dataset.key") == f"n{target}"
    assert page.locator("#search").input_value() == ""


def test_a_link_followed_from_a_search_leaves_the_tree_as_it_was(opened: Open) -> None:
    page = opened(SMALL).page

    def rows() -> list[str]:
        found: list[str] = page.eval_on_selector_all(
            "#tree tbody tr:not([hidden])", "all => all.map((row) => row.dataset.key)"
        )
        return found

    def search(text: str) -> None:
        page.locator("#search").fill(text)
        page.wait_for_function(
            "text => (document.querySelector('.bar [role=status]').textContent !== '') === (text !== '')", arg=text
        )

    before = rows()
    search("blocks")
    assert len(rows()) > 2 * len(before), "everything found is open"
    page.locator("#tree tr[data-key^=n]:not([hidden])", has_text="softmax").first.click()
    page.locator("#tree tr:not([hidden]) [data-node]").first.click()
    after = rows()
    node = SMALL["nodes"]["rows"][int(page.evaluate("document.activeElement.dataset.key")[1:])]
    own = [i for i, row in enumerate(SMALL["nodes"]["rows"]) if row[2] == node[2]]
    assert [key for key in after if key in before] == before
    assert {key for key in after if key not in before} == {f"n{i}" for i in own}
    search("relu")
    assert rows() != after
    search("")
    assert rows() == after


def test_hovering_an_edge_shows_its_bytes(shared: Share) -> None:
    page = shared(SMALL)
    lines = page.eval_on_selector_all(".edge", "all => all.map((e) => [JSON.parse(e.dataset.edges), +e.dataset.value])")
    assert sorted(i for members, _ in lines for i in members) == list(range(len(SMALL["edges"])))
    for place, (members, size) in enumerate(lines):
        assert size == sum(SMALL["edges"][i]["bytes"] for i in members)
        edge = SMALL["edges"][members[0]]
        page.locator(".edge").nth(place).dispatch_event("pointermove", {"clientX": 300, "clientY": 300})
        tip = page.locator("#tip").inner_text()
        assert formats.size(size) in tip
        for what in (edge["name"], edge["kind"], f"worker {edge['src']}", f"worker {edge['dst']}"):
            assert what in tip
        if edge["shape"]:
            assert f"{edge['dtype']}[{', '.join(map(str, edge['shape']))}]" in tip
    page.locator("h1").scroll_into_view_if_needed()
    page.locator(".edge").first.focus()
    page.wait_for_function("() => !document.getElementById('tip').hidden")  # also while it scrolls there
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


def test_many_edges_are_bundled(opened: Open) -> None:
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
