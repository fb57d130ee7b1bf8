"""The rows of the module tree: modules, their nodes, and what is open at first."""

from __future__ import annotations

from typing import Any

import pytest
from report_facts import made_facts

FACTS = made_facts(workers=2, blocks=4)


@pytest.fixture(scope="module")
def page(written: Any) -> Any:
    return written(FACTS)


def rows(page: Any) -> dict[str, Any]:
    """The tree's rows by their keys."""
    return {row.attrib["data-key"]: row for row in page.root.iterfind(".//table[@id='tree']/tbody/tr")}


def told(row: Any) -> list[str]:
    return [" ".join("".join(cell.itertext()).split()) for cell in row]


def test_every_module_and_node_has_a_row(page: Any) -> None:
    found = rows(page)
    assert [key for key in found if key[0] == "m"] == [f"m{i}" for i in range(len(FACTS["modules"]))]
    nodes = range(len(FACTS["nodes"]["rows"]))
    assert sorted(key for key in found if key[0] == "n") == sorted(f"n{i}" for i in nodes)
    for index, module in enumerate(FACTS["modules"]):
        row = found[f"m{index}"]
        assert int(row.attrib["aria-level"]) == module["depth"] + 1
        name, forward, _, _, _, parameters, _, count = told(row)
        assert name == (module["name"] if index else "gpt.py")
        assert forward == "".join(str(worker) for worker, *_ in module["forward"])
        assert (int(parameters), int(count)) == (module["parameters"], module["nodes"])


def test_a_node_says_what_it_is_and_where_it_comes_from(page: Any) -> None:
    columns, found = FACTS["nodes"]["columns"], rows(page)
    node = dict(zip(columns, FACTS["nodes"]["rows"][7], strict=True))
    first, forward, backward, *_ = told(found["n7"])
    for what in ("name", "op", "type", "source", "text"):
        assert str(node[what]) in first, what
    assert (forward, backward) == (("0", "") if node["phase"] == "F" else ("", "0"))
    names = [row[0] for row in FACTS["nodes"]["rows"]]
    assert told(found["d7"]) == [f"reads {names[6]} is read by {names[8]} unit {node['unit']}"]
    assert [b.attrib["data-node"] for b in found["d7"].iter("button")] == ["6", "8"]
    assert "reads nothing" in told(found["d0"])[0]


def test_so_many_levels_are_open_as_fit(page: Any, written: Any) -> None:
    shown = [key for key, row in rows(page).items() if "hidden" not in row.attrib]
    assert shown == [f"m{i}" for i in range(len(FACTS["modules"]))]
    large = rows(written(made_facts(workers=2, blocks=55, run=False)))
    assert [key for key, row in large.items() if "hidden" not in row.attrib] == ["m0", "m1", "m2", "m223", "m224"]
    assert large["m2"].attrib["aria-expanded"] == "false"


def test_nodes_next_to_modules_have_a_row_that_holds_them(written: Any) -> None:
    facts = made_facts(workers=2, blocks=1, run=False)
    facts["nodes"]["rows"][0][2] = 0
    found = rows(written(facts))
    assert told(found["o0"])[0] == "nodes of its own"
    assert told(found["o0"])[-1] == "1"
    keys = list(found)
    assert keys[keys.index("o0") + 1] == "n0"


def test_no_mark_but_where_units_are_apart(written: Any) -> None:
    """A module may have its nodes on several workers, and a unit its places, without any unit being apart."""
    facts = made_facts(workers=2, blocks=2, run=False)
    assert any(unit["apart"] for unit in facts["units"])
    for row in facts["modules"] + facts["units"]:
        row["apart"] = 0
    facts["modules"][3]["apart"] = 1
    assert [key for key, row in rows(written(facts)).items() if "≠" in "".join(row.itertext())] == ["m3"]
