"""Where values come from and go to: on a program small enough to be traced by hand, and on real ones."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from cached import lowered
from covering import a_few_quick
from small_facts import COLUMNS, module, row
from small_models import CASES

from fxpipe.errors import BuildError
from fxpipe.inspection.facts import facts
from fxpipe.inspection.subject import subject_of
from fxpipe.inspection.value_text import describe
from fxpipe.inspection.values import LEVELS, MOST, trace


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [r["name"] for r in rows]


def test_a_value_is_followed_through_the_wires(small: dict[str, Any]) -> None:
    found = trace(small, "y")
    assert [(s["level"], s["name"]) for s in found["inputs"]] == [
        (1, "h"), (2, "a_weight"), (2, "x"), (1, "b_weight"),
    ]  # fmt: skip
    via = found["inputs"][0]["via"]
    assert (via["edge"], via["kind"], via["src"], via["src_phase"], via["dst"], via["dst_phase"]) == (
        "h", "activation", 0, "F", 1, "F",
    )  # fmt: skip
    assert [s["via"] for s in found["inputs"][1:]] == [None] * 3
    assert names(found["readers"]) == ["loss"]
    assert found["kept"] == []


def test_readers_on_another_worker_and_what_is_kept_for_backward(small: dict[str, Any]) -> None:
    found = trace(small, "h")
    assert names(found["readers"]) == ["y", "d_b"]
    assert all(r["via"]["edge"] == "h" for r in found["readers"])
    assert found["kept"] == [{"worker": 1, "sent": False, "readers": ["d_b"]}]
    assert trace(small, "x")["kept"] == [{"worker": 0, "sent": False, "readers": ["d_a"]}]


def test_an_edge_of_several_ways_goes_by_its_value(small: dict[str, Any]) -> None:
    (step, *_) = trace(small, "d_a")["inputs"]
    assert step["name"] == "d_y"
    assert step["via"]["edge"] == "d_y:0"
    assert trace(small, "d_y:0") == trace(small, "d_y")


def test_sends_and_receives_themselves(small: dict[str, Any]) -> None:
    assert names(trace(small, "h_recv_1")["inputs"])[0] == "h"
    assert names(trace(small, "h_recv_1")["readers"]) == ["y", "d_b"]
    assert names(trace(small, "h_send_1")["readers"]) == ["y", "d_b"]
    assert names(trace(small, "h_send_1")["inputs"])[0] == "h"


@pytest.mark.parametrize("name", ["b.weight", "c.weight", "b_weight"])
def test_a_parameter_by_any_of_its_names(small: dict[str, Any], name: str) -> None:
    found = trace(small, name)
    assert (found["kind"], found["names"], found["owner"]) == ("parameter", ["b.weight", "c.weight"], 1)
    assert found["copies"] == [0]
    assert names(found["readers"]) == ["y", "d_y"]
    assert found["gradient"]["name"] == "d_b"
    assert names(found["edges"]) == ["weights of worker 1"]


def test_names_may_hold_commas(small: dict[str, Any]) -> None:
    small["nodes"]["names"]["b_weight"] = ["b, c.weight", "d"]
    for worker in small["workers"]:
        for held in ("owned_names", "copy_names"):
            worker[held] = [name.replace("b.", "b, c.") for name in worker[held]]
    found = trace(small, "b, c.weight")
    assert (found["kind"], found["names"], found["owner"], found["copies"]) == (
        "parameter", ["b, c.weight", "d"], 1, [0],
    )  # fmt: skip
    with pytest.raises(BuildError):
        trace(small, "c.weight")


def test_a_frozen_parameter_has_no_gradient(small: dict[str, Any]) -> None:
    del small["nodes"]["gradients"]["b_weight"]
    assert trace(small, "b.weight")["gradient"] is None


def test_a_module_and_the_loss(small: dict[str, Any]) -> None:
    found = trace(small, "b")
    assert names(found["nodes"]) == ["h_recv_1", "y", "d_y", "d_b", "d_y_send_0"]
    assert names(trace(small, "(loss)")["nodes"]) == ["loss"]


def test_an_unknown_name_lists_near_ones(small: dict[str, Any]) -> None:
    with pytest.raises(BuildError, match=r"no node, parameter, module or edge is called 'a\.weigth', did you mean"):
        trace(small, "a.weigth")
    with pytest.raises(BuildError, match=r"called ''"):
        trace(small, "")


def test_a_long_list_is_cut_and_counted(small: dict[str, Any]) -> None:
    small["nodes"]["rows"] += [row(f"r{i}", "F", 1, "aten.neg", 0, 3) for i in range(60)]
    assert len(trace(small, "h")["readers"]) == 62
    found = trace(small, "a")
    assert (len(found["nodes"]), found["of"]) == (MOST, 64)


def test_a_chain_is_followed_a_few_steps_and_every_step_once() -> None:
    rows = [row("x", None, 0, "input", 0, text="x")]
    rows += [row(f"v{i}", "F", 0, "aten.mul", 0, i, max(i - 1, 0)) for i in range(2000)]
    made = {
        "build": {"folder": None},
        "modules": [module("", None)],
        "nodes": {"columns": [*COLUMNS, "inputs"], "rows": rows, "names": {}},
        "workers": [],
        "edges": [],
    }
    found = trace(made, "v1999")["inputs"]
    assert {s["level"] for s in found} == set(range(1, LEVELS + 1))
    assert len(found) < 2 ** (LEVELS + 1)
    opened = [(a["name"], a["level"]) for a, b in itertools.pairwise(found) if b["level"] == a["level"] + 1]
    assert len(dict(opened)) == len(opened)
    nearest = {name: min(s["level"] for s in found if s["name"] == name) for name, _ in opened}
    assert nearest == dict(opened)


@pytest.mark.parametrize("case", a_few_quick(sorted(CASES), "gpt", "dict"))
def test_every_name_of_a_real_build_has_an_answer(case: str) -> None:
    told = facts(subject_of(lowered(case, workers=3)))
    rows = told["nodes"]["rows"]
    edges = {e["name"] for e in told["edges"]}
    for found in rows[:: max(1, len(rows) // 60)]:
        assert describe(told, found[0])
    for name in [
        *(name for name in edges if not name.startswith("weights of")),
        *(m["path"] for m in told["modules"] if m["path"]),
    ]:
        assert describe(told, name)
    for worker in told["workers"]:
        for name in worker["owned_names"]:
            assert trace(told, name)["owner"] == worker["worker"]
