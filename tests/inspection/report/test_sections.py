"""What the page says in words: its head, its sections, and what is missing."""

from __future__ import annotations

from typing import Any

import pytest
from report_facts import made_facts

from fxpipe.inspection.timeline import explained

BAD = "</script><img src=x onerror=alert(1)>\"'&"


@pytest.fixture(scope="module")
def page(written: Any) -> Any:
    return written(made_facts(workers=2, blocks=4))


def together(facts: dict[str, Any]) -> dict[str, Any]:
    """The same, no unit apart."""
    for unit in facts["units"]:
        unit |= {"backward": unit["forward"], "weights": unit["forward"], "apart": False}
    return facts


def test_the_head_has_the_numbers_that_matter(page: Any) -> None:
    assert page.text(".//h1") == "gpt.py on 2 workers"
    head = page.text("#top")
    for words in (
        "schedule async policy spectrain cuts bidirectional microbatches 1 samples a minibatch 32 device cpu",
        "samples a second 385 forecast 412", "measured over forecast 93.4%", "memory of the fullest worker 44.8 MiB",
    ):  # fmt: skip
        assert words in head, words
    assert "autocast" not in head
    assert "side by side" not in head
    assert "seed 0" in page.text("#run")


def test_the_options_of_a_run_are_shown_where_it_has_them(written: Any) -> None:
    facts = made_facts(workers=2, blocks=1)
    shown = written(facts | {"run": facts["run"] | {"clip_norm": 0.5, "ema": None}}).text("#run")
    assert "clip norm 0.5" in shown
    assert "ema" not in shown


def test_workers_that_run_branches_side_by_side_are_named(written: Any) -> None:
    facts = made_facts(workers=3, blocks=1)
    facts["build"]["graph"] = [[], [], [0, 1]]
    assert "side by side workers 0 → 2, 1 → 2" in written(facts).text("#top")


def test_cuts_of_their_own_are_told_where_units_are_apart(page: Any, written: Any) -> None:
    facts = made_facts(workers=2, blocks=4)
    apart = sum(unit["apart"] for unit in facts["units"])
    said = "Forward and backward have their own cuts."
    assert apart > 1
    assert f"{apart} units of {len(facts['units'])} run forward on one worker and backward on another." in page.text(
        "#top"
    )
    assert said in page.text("#model")
    alike = written(together(facts))
    assert "Every unit runs forward and backward on the same worker." in alike.text("#top")
    assert said not in alike.text("#model")


def test_another_schedule_and_policy_are_named(page: Any, written: Any) -> None:
    facts, pair = made_facts(workers=2, blocks=1), {"schedule": "gpipe", "policy": "latest"}
    other = written(facts | {"forecast": facts["forecast"] | pair, "grid": facts["grid"] | pair})
    planned = written(facts | {"run": None, "forecast": facts["forecast"] | pair, "grid": facts["grid"] | pair})
    for label in ("samples a second", "milliseconds a minibatch", "bubble"):
        assert f"{label}, forecast under gpipe · latest" in planned.text("#top"), label
    assert "forecast under gpipe · latest 412" in other.text("#top")
    for section in ("balance", "timeline", "memory"):
        assert "under gpipe · latest" in other.text(f"#{section}"), section
    assert "under" not in page.text("#top")


def test_the_timeline_says_how_far_it_goes(page: Any) -> None:
    told = page.text("#timeline")
    assert "Simulated: 12 minibatches, 72 spans, until " in told
    assert "Measured: 20 minibatches, " in told
    assert "Of 40 minibatches only the first 20 are shown." in told
    assert told.count("its lanes are blank from there on") == 1
    assert "time between actions" in told


def test_the_grid_is_explained_by_a_cell_of_its_own(page: Any) -> None:
    grid = made_facts(workers=2, blocks=1)["grid"]
    rows = [
        ["".join(cell.itertext()) for cell in row] for row in page.root.iterfind(".//table[@class='grid']/tbody/tr")
    ]
    assert rows[0][1:] == [cell if cell[0] in "FB" else "·" for cell in grid["rows"][0]]
    said = "F2@1+1: the forward of minibatch 2 sees its worker's weights after 1 update, predicted 1 further."
    assert said in explained(grid["rows"])
    assert f"Under schedule async and policy spectrain. {said}" in page.text("#schedule")
    shown = [cell for cell in page.root.iter("td") if "example" in cell.attrib.get("class", "").split()]
    assert {("".join(cell.itertext()), cell.attrib["title"]) for cell in shown} == {("F2@1+1", said)}


def test_edits_and_stale_sources_are_marked(written: Any) -> None:
    facts = made_facts(workers=2, blocks=1)
    facts["build"] |= {"edited": ["stage_1.py"], "stale": ["gpt.py changed"]}
    facts["workers"][1]["edited"] = True
    page = written(facts)
    assert "Edited: stage_1.py was changed after compiling." in page.text("#top")
    assert "Stale: since this was compiled, gpt.py changed." in page.text("#top")
    assert [row[0] for row in page.table("Workers")] == ["0", "1*"]


def test_what_is_missing_is_said(written: Any) -> None:
    """Of a policy that only the model file knows, nothing is forecast."""
    facts = made_facts(run=False)
    unknown = {"partitions": [], "timeline": None, "forecast": None, "edges": [], "grid": facts["grid"] | {"rows": []}}
    page = written(facts | unknown)
    for section, said in {
        "top": "There is no forecast", "balance": "Cuts were not compared", "timeline": "no simulated timeline",
        "memory": "no memory over time", "run": "No run was given", "edges": "Nothing crosses workers.",
        "schedule": "There is no grid of actions.",
    }.items():  # fmt: skip
        assert said in page.text(f"#{section}"), section


def test_a_run_that_did_not_end(written: Any) -> None:
    facts = made_facts(workers=2, blocks=1)
    problem = "run.json is missing: the run did not end"
    metrics = facts["run"]["metrics"]
    facts["run"] = {"folder": "run", "metrics": metrics, "problems": [problem], "timeline": None}
    page = written(facts)
    assert f"Run: {problem}" in page.text("#top")
    assert "run.json is missing or says nothing" in page.text("#run")
    assert "Staleness was not logged" in page.text("#run")
    assert "left no trace" in page.text("#timeline")


def named_badly() -> dict[str, Any]:
    """Facts whose every name tries to be markup."""
    facts = made_facts(workers=2, blocks=2, name=BAD)
    for row in facts["modules"][1:]:
        row["name"], row["path"] = BAD, BAD
    for row in facts["nodes"]["rows"]:
        row[0] = row[3] = row[4] = row[10] = row[11] = BAD
    for edge in facts["edges"]:
        edge |= {"name": BAD, "module": BAD, "source": BAD, "dtype": BAD, "names": [BAD], "kind": BAD}
    for worker in facts["workers"]:
        worker |= {"forward_from": BAD, "backward_from": BAD, "owned_names": [BAD], "engines": [BAD], "file": BAD}
    for unit in facts["units"]:
        unit["module"] = BAD
    for partition in facts["partitions"]:
        partition["mode"] = BAD
    facts["build"] |= {"edited": [BAD], "stale": [BAD], "folder": BAD, "policy": BAD, "digest": BAD, "torch": BAD}
    facts["grid"]["policy"] = BAD
    facts["run"] |= {
        "problems": [BAD], "folder": BAD, "transport": BAD, "evaluation": {BAD: 1.0},
        "time_losses": [{"worker": 1, "share": 0.1, "text": BAD}],
    }  # fmt: skip
    facts["run"]["workers"][0] |= {"waits": [{"what": BAD, "from": 0, "seconds": 1.0}], "engines": [BAD]}
    return facts


def test_names_are_never_markup(page: Any, written: Any) -> None:
    bad = written(named_badly())
    assert {element.tag for element in bad.root.iter()} <= {element.tag for element in page.root.iter()} | {"ul", "li"}
    assert not any(name.startswith("on") for element in bad.root.iter() for name in element.attrib)
    assert bad.html.count("<script") == bad.html.count("</script")
    assert "<img" not in bad.html
    for section in ("top", "model", "edges", "balance", "timeline", "run", "schedule", "workers", "foot"):
        assert BAD[:8] in bad.text(f"#{section}") or section == "timeline", section
    assert bad.text(".//h1") == f"{BAD} on 2 workers"


def test_readers_of_the_screen_are_served(page: Any) -> None:
    links = [link.attrib["href"][1:] for link in page.root.iterfind(".//nav//a")]
    assert links == [section.attrib["id"] for section in page.root.iterfind(".//main/section")]
    for element in page.root.iter():
        if element.attrib.get("role") in ("img", "group", "region", "treegrid") or element.tag == "nav":
            assert element.attrib.get("aria-label"), element.attrib
        if element.tag == "button":
            assert "".join(element.itertext()) or element.attrib.get("aria-label")
