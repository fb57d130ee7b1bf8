"""The module tree: modules, their nodes, and what is open at first."""

from __future__ import annotations

from typing import Any

import pytest
from report_facts import made_facts

from fxpipe.inspection.report.tree import tree

FACTS = made_facts(workers=2, blocks=4)


@pytest.fixture(scope="module")
def page(written: Any) -> Any:
    return written(FACTS)


def lines(page: Any) -> list[Any]:
    """The lines of the tree but its titles."""
    tree = page.root.find(".//div[@id='tree']")
    return [line for line in tree.iter() if line.attrib.get("class") == "cells"][1:]


def told(line: Any) -> list[str]:
    return [" ".join("".join(cell.itertext()).split()) for cell in line]


def test_every_module_has_a_line(page: Any) -> None:
    for module, line in zip(FACTS["modules"], lines(page), strict=True):
        name, forward, backward, apart, *_, parameters, _, owners, nodes = told(line)
        assert name == (module["name"] or "gpt.py")
        for workers, said, sign in ((module["forward"], forward, "→"), (module["backward"], backward, "←")):
            assert said == sign.join(str(worker) for worker, *_ in workers)
        assert (parameters, nodes) == (str(module["parameters"] or "–"), str(module["nodes"]))
        assert owners == ("–".join(map(str, module["owners"])) or "–")
        assert apart == ("≠" if module["apart"] else "")


def test_a_node_says_what_it_is_and_where_it_comes_from(page: Any) -> None:
    columns = FACTS["nodes"]["columns"]
    nodes = [dict(zip(columns, row, strict=True)) for row in FACTS["nodes"]["rows"]]
    rows = {row[0]: row for row in page.table("Nodes")}
    assert list(rows) == [node["name"] for node in nodes]
    op, kind, on, _, _, unit, reads, readers, line = rows[nodes[7]["name"]][1:]
    assert (op, kind, on) == (nodes[7]["op"], nodes[7]["type"], f"{nodes[7]['phase']}{nodes[7]['worker']}")
    assert (reads, readers, unit) == (nodes[6]["name"], nodes[8]["name"], str(nodes[7]["unit"]))
    assert line == f"{nodes[7]['source']}: {nodes[7]['text']}"
    assert rows[nodes[0]["name"]][-3] == "none"


def test_so_many_levels_are_open_as_fit(page: Any, written: Any) -> None:
    def opened(page: Any) -> int:
        return len([box for box in page.root.iterfind(".//div[@id='tree']//details") if "open" in box.attrib])

    assert opened(page) == 2 + 4, "all that has modules in it"
    assert opened(written(made_facts(workers=2, blocks=55, run=False))) == 1


def test_there_may_be_thousands_of_levels() -> None:
    facts = made_facts(workers=2, blocks=1, run=False)
    last = facts["modules"][-1]
    for _ in range(3000):
        facts["modules"].append(last | {"parent": len(facts["modules"]) - 1, "name": "deeper", "path": "deeper"})
    text = tree(facts)
    assert text.count("deeper</span>") == 3000
    assert text.count("<details") == text.count("</details>") >= 2999


def test_nodes_next_to_modules_have_a_line_that_holds_them(written: Any) -> None:
    facts = made_facts(workers=2, blocks=1, run=False)
    facts["nodes"]["rows"][0][2] = 0
    summaries = [told(box) or [box.text] for box in written(facts).root.iterfind(".//div[@id='tree']//summary")]
    assert ["1 node of its own"] in summaries
