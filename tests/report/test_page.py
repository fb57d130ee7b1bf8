"""The page as text: the facts inside it are those it was given, whatever characters they hold."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from fxpipe.report.page import SCRIPTS, embedded, page, write_report

AWKWARD = [
    "</script>",
    "<!--<script>",
    "\u2028\u2029",
    "]]>",
    "{{facts}}",
    "\\u003c",
    "é 字 🙂",
    "\"'&amp;",
    "\x00\x7f",
]


def inside(html: str) -> Any:
    """The facts that a browser finds in a page."""
    found = re.search(r'<script type="application/json" id="facts">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


@pytest.mark.parametrize("text", AWKWARD)
def test_any_characters_come_through(text: str, made_facts: Callable[..., Any]) -> None:
    facts = made_facts(workers=2, blocks=1, name=text)
    facts["modules"][1]["path"] = text
    assert inside(page(facts)) == facts


def test_the_facts_are_what_json_prints(made_facts: Callable[..., Any]) -> None:
    facts = made_facts(workers=2, blocks=1)
    assert embedded(facts) == json.dumps(facts), "nothing in them is in need of an escape"
    assert embedded({"a": "<b>"}) == '{"a": "\\u003cb>"}'


def test_what_json_lacks_becomes_null() -> None:
    facts = {"loss": [1.0, float("nan"), float("inf")], "more": {"x": (float("-inf"), 2)}}
    assert json.loads(embedded(facts)) == {"loss": [1.0, None, None], "more": {"x": [None, 2]}}


def test_every_script_is_in_the_page(made_facts: Callable[..., Any]) -> None:
    folder = Path(__file__).parents[2] / "fxpipe" / "report"
    assert sorted(SCRIPTS) == sorted(file.name for file in folder.glob("*.js"))
    html = page(made_facts(workers=2, blocks=1))
    assert "{{" not in html.split("<script")[0]
    assert html.count("<script") == html.count("</script") == 3


def test_the_wheel_has_every_part_of_the_page() -> None:
    root = Path(__file__).parents[2]
    packed = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    parts = {file.name for file in (root / "fxpipe" / "report").iterdir() if file.is_file() and file.suffix != ".py"}
    assert {name for name in parts if not any(fnmatch(name, p) for p in packed["fxpipe.report"])} == set()


def test_the_page_loads_nothing(made_facts: Callable[..., Any], tmp_path: Path) -> None:
    write_report(made_facts(workers=2, blocks=1), tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in html
    own = re.sub(r"<script.*?</script>|<style>.*?</style>", "", html, flags=re.DOTALL)
    assert re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', own) == []
