"""In Chromium: the module tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from report_facts import made_facts

pytestmark = [pytest.mark.browser, pytest.mark.slow]

Facts = dict[str, Any]
Open = Callable[..., Any]

SMALL = made_facts(workers=2, blocks=4)
LARGE = made_facts(workers=4, blocks=30, inner=4, run=False)


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
