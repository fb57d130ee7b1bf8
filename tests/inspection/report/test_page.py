"""The page as text: the facts inside it are those it was given, whatever characters they hold."""

from __future__ import annotations

import json
import os
import re
import resource
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from report_facts import made_facts
from torch import nn

import fxpipe
from fxpipe.errors import BuildError
from fxpipe.inspection.facts import facts as facts_of
from fxpipe.inspection.report.page import embedded, page, write_report
from fxpipe.inspection.subject import subject_of
from fxpipe.observe.run_folder import SPANS

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


def keys(value: Any, path: str = "") -> set[str]:
    """The keys of a dict and of all inside it, of lists those of their first row: `units[].module`."""
    if isinstance(value, list):
        return keys(value[0], f"{path}[]") if value else set()
    if not isinstance(value, dict) or path in (".nodes.gradients", ".nodes.names"):  # names
        return set()
    return {f"{path}.{key}" for key in value}.union(*(keys(inner, f"{path}.{key}") for key, inner in value.items()))


def test_made_facts_have_the_keys_of_real_ones() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    program = fxpipe.capture(model, lambda m, b: m(b).square().mean(), torch.randn(2, 4))
    real = facts_of(subject_of(fxpipe.lower(program, workers=2, cost="analytic")))
    made = made_facts(workers=2, run=False)
    assert len(keys(real)) > 100
    assert keys(made) == keys(real)
    assert made["nodes"]["columns"] == real["nodes"]["columns"]
    assert {len(row) for row in made["nodes"]["rows"]} == {len(real["nodes"]["columns"])}


@pytest.mark.parametrize("text", AWKWARD)
def test_any_characters_come_through(
    text: str,
) -> None:
    facts = made_facts(workers=2, blocks=1, name=text)
    facts["modules"][1]["path"] = text
    assert inside(page(facts)) == facts


def test_the_facts_are_what_json_prints() -> None:
    facts = made_facts(workers=2, blocks=1)
    assert embedded(facts) == json.dumps(facts), "nothing in them is in need of an escape"
    assert embedded({"a": "<b>"}) == '{"a": "\\u003cb>"}'


def test_what_json_lacks_becomes_null() -> None:
    facts = {"loss": [1.0, float("nan"), float("inf")], "more": {"x": (float("-inf"), 2)}}
    assert json.loads(embedded(facts)) == {"loss": [1.0, None, None], "more": {"x": [None, 2]}}


def test_the_script_is_in_the_page() -> None:
    html = page(made_facts(workers=2, blocks=1))
    assert "{{" not in html.split("<script")[0]
    assert html.count("<script") == html.count("</script")
    assert len(re.findall(r"<script>", html)) == 1


def test_a_page_with_a_long_run_is_smaller_than_two_megabytes() -> None:
    """Of as many measured spans as are ever shown, over a thousand nodes, and a thousand steps."""
    facts = made_facts(workers=4, blocks=12, inner=30, steps=1000)
    starts = [1.2345e-3 * k for k in range(SPANS)]
    spans = [[k % 4, "F" if k % 3 else "wait", k // 40, k % 4, t, t + 9.87e-4] for k, t in enumerate(starts)]
    facts["run"]["timeline"] = {"seconds": 2 * starts[-1], "minibatches": SPANS // 40, "of": 1000, "spans": spans}
    assert len(facts["nodes"]["rows"]) > 1000
    assert len(page(facts).encode()) < 2_000_000


def test_the_wheel_has_every_part_of_the_page() -> None:
    root = Path(__file__).parents[3]
    packed = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    parts = {
        file.name
        for file in (root / "fxpipe" / "inspection" / "report").iterdir()
        if file.is_file() and file.suffix != ".py"
    }
    assert {
        name for name in parts if not any(fnmatch(f"inspection/report/{name}", p) for p in packed["fxpipe"])
    } == set()


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    write_report(made_facts(workers=2, blocks=1), tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in html
    own = re.sub(r"<script.*?</script>|<style>.*?</style>", "", html, flags=re.DOTALL)
    assert re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', own) == []


@pytest.mark.parametrize("place", ["/dev/full", "/proc/x.html", "{}", "{}/none/report.html", "{}/file/report.html"])
def test_a_page_that_cannot_be_written(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    path = Path(place.format(tmp_path))
    with pytest.raises(BuildError, match=re.escape(f"{path} cannot be written: ")) as caught:
        write_report(made_facts(workers=2, blocks=1), path)
    assert caught.value.hint == "give another path to --html"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "kept"


def test_a_page_without_room_leaves_the_old_one(tmp_path: Path) -> None:
    facts, path = made_facts(workers=2, blocks=1), tmp_path / "report.html"
    path.write_text("the old page")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # Python ignores SIGXFSZ: writing is an OSError
    try:
        with pytest.raises(BuildError, match=r"report\.html cannot be written: File too large"):
            write_report(facts, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"report.html": "the old page"}


def test_a_page_takes_the_place_of_an_old_one(tmp_path: Path) -> None:
    facts, path, link = made_facts(workers=2, blocks=1), tmp_path / "report.html", tmp_path / "link.html"
    path.write_text("the old page")
    link.symlink_to(path)
    write_report(facts, link)
    assert link.is_symlink()
    assert inside(path.read_text(encoding="utf-8")) == facts
    assert sorted(os.listdir(tmp_path)) == ["link.html", "report.html"]
