"""What differs between two builds, by facts written by hand, and between builds of real models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from cached import lowered

from fxpipe.inspection.difference import difference
from fxpipe.inspection.facts import facts
from fxpipe.inspection.subject import subject_of

MODULES = ("tok", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "blocks.2.up", "blocks.2.down", "")


def worker(rank: int, *owned: str, **more: Any) -> dict[str, Any]:
    told = {
        "worker": rank, "forward_ms": 10.0, "backward_ms": 20.0, "update_ms": 1.0, "owned": len(owned),
        "owned_bytes": 8, "copies": 0, "copy_bytes": 0, "bytes_in": 4, "bytes_out": 4, "saved_bytes": 2,
        "in_flight": 2, "memory_bytes": 64, "engines": ["eager", "eager"], "owned_names": list(owned),
        "copy_names": [], "speed": 1.0,
    }  # fmt: skip
    return {**told, **more}


def edge(name: str, src: int = 0, dst: int = 1, size: int = 4) -> dict[str, Any]:
    place = {"src": src, "src_phase": "F", "dst": dst, "dst_phase": "F", "codec": "", "plain_bytes": size}
    return {"name": name, "kind": "activation", "shape": [size], "dtype": "int8", "bytes": size, **place, "names": []}


def units(forward: int, backward: int, weights: int | None = None) -> list[dict[str, Any]]:
    """Units, cut for two workers before these."""
    cuts = {"forward": forward, "backward": backward, "weights": backward if weights is None else weights}
    times = {"forward_ms": 1.0, "backward_ms": 2.0, "weight_ms": 1.0}
    return [
        {"module": path, **{phase: int(i >= at) for phase, at in cuts.items()}, **times}
        for i, path in enumerate(MODULES)
    ]


@pytest.fixture
def made() -> dict[str, Any]:
    """A build of two workers, both cut before blocks.1.up."""
    build = {
        "folder": "build", "model": "gpt.py", "digest": "d", "workers": 2, "replicas": [], "outer": None,
        "microbatches": 1, "schedule": "async",
        "policy": "spectrain", "autocast": None, "params": None, "codec": "none",
        "device": "cpu", "torch": "2.13.0", "samples": 8, "loss_worker": 1,
        "cuts": "same", "costs": "computed", "edited": [], "stale": [], "settings": {}, "arguments": [],
        "speeds": [], "links": {"bandwidth": "3e9", "latency": "5e-05", "copy": 0.0}, "optimizer_bytes": 1.0,
    }  # fmt: skip
    return {
        "fxpipe": "0.1.0",
        "build": build,
        "nodes": {"columns": [], "rows": [[]] * 9},
        "units": units(3, 3),
        "workers": [worker(0, "tok.weight", "blocks.0.up.weight"), worker(1, "blocks.1.up.weight")],
        "edges": [edge("h"), edge("mask:1", size=2)],
        "forecast": {"samples_per_second": 100.0, "bubble": 0.1, "milliseconds": 80.0},
    }


@pytest.fixture
def other(made: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(made)


def test_the_same_twice(made: dict[str, Any], other: dict[str, Any]) -> None:
    found = difference(made, other)
    assert found["identical"]
    assert found["settings"] == found["moved"] == found["owners"] == []
    assert [w["changed"] for w in found["workers"]] == [[], []]
    assert found["balance"] == [1.0, 1.0]


def test_times_are_noise_below_two_percent_and_never_a_difference(made: dict[str, Any], other: dict[str, Any]) -> None:
    other["workers"][0]["forward_ms"] = 10.19
    other["workers"][1]["backward_ms"] = 30.0
    found = difference(made, other)
    assert found["identical"]
    assert [w["changed"] for w in found["workers"]] == [[], ["backward_ms"]]
    assert found["balance"] == [1.0, pytest.approx((31.19 + 41) / 2 / 41)]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("schedule", "1f1b"),
        ("autocast", "bf16"),
        ("params", "bf16"),
        ("codec", "int8"),
        ("microbatches", 4),
        ("cuts", "pinned"),
        ("speeds", [1.0, 2.0]),
        ("links", {"bandwidth": "inf", "latency": "0.0", "copy": 0.0}),
        ("optimizer_bytes", 2.0),
    ],
)
def test_settings(made: dict[str, Any], other: dict[str, Any], key: str, value: Any) -> None:
    other["build"][key] = value
    found = difference(made, other)
    assert found["settings"] == [{"name": key, "first": made["build"][key], "second": value}]
    assert not found["identical"]


def test_an_update_is_a_minibatchs(made: dict[str, Any], other: dict[str, Any]) -> None:
    """10 + 20 a microbatch, four of them, and the update once: 121 on both; then 80 + 1 on the second."""
    other["build"]["microbatches"] = made["build"]["microbatches"] = 4
    other["workers"][1]["backward_ms"] = 10.0
    assert difference(made, other)["balance"] == [1.0, pytest.approx((121 + 81) / 2 / 121)]


def test_where_a_build_lies_is_no_difference(made: dict[str, Any], other: dict[str, Any]) -> None:
    other["build"] |= {"folder": "elsewhere", "digest": "e"}
    assert difference(made, other)["identical"]


def test_modules_that_moved(made: dict[str, Any], other: dict[str, Any]) -> None:
    other["units"] = units(5, 2)
    found = difference(made, other)
    assert found["moved"] == [
        {"phase": "forward", "from": 1, "to": 0, "modules": ["blocks.1.up", "blocks.1.down"], "units": 2, "ms": 2.0},
        {"phase": "backward", "from": 0, "to": 1, "modules": ["blocks.0.down"], "units": 1, "ms": 2.0},
    ]
    assert not found["identical"]


def test_weight_gradients_count_where_they_are_cut_apart(made: dict[str, Any], other: dict[str, Any]) -> None:
    other["units"] = units(3, 3, 5)
    (row,) = difference(made, other)["moved"]
    assert row == {
        "phase": "weights",
        "from": 1,
        "to": 0,
        "modules": ["blocks.1.up", "blocks.1.down"],
        "units": 2,
        "ms": 2.0,
    }


def test_units_of_two_models_are_compared_by_their_modules(made: dict[str, Any], other: dict[str, Any]) -> None:
    other["units"] = [u for u in units(4, 3) if u["module"] != "tok"]
    found = difference(made, other)
    assert [(row["phase"], row["modules"]) for row in found["moved"]] == [("forward", ["blocks.1.up"])]
    assert found["units"] == [8, 7]


def test_workers_that_came(made: dict[str, Any], other: dict[str, Any]) -> None:
    other["workers"].append(worker(2))
    row = difference(made, other)["workers"][2]
    assert row["first"] is None
    assert row["second"]["forward_ms"] == 10.0
    assert "forward_ms" in row["changed"]


def test_edges_that_came_went_and_changed(made: dict[str, Any], other: dict[str, Any]) -> None:
    other["edges"] = [edge("mask", size=6), edge("h2"), edge("h2:2", dst=2)]
    near, far = difference(made, other)["edges"]
    assert (near["went"], near["came"], near["changed"]) == (["h"], ["h2"], ["mask"])
    assert (near["before"], near["after"]) == (4 + 2, 6 + 4)
    assert (far["src"], far["dst"], far["came"], far["after"]) == (0, 2, ["h2"], 4)


@pytest.mark.parametrize(("key", "value"), [("shape", [2, 2]), ("dtype", "uint8")])
def test_edges_of_as_many_bytes_but_another_type(
    made: dict[str, Any], other: dict[str, Any], key: str, value: Any
) -> None:
    other["edges"][0][key] = value
    found = difference(made, other)
    assert [row["changed"] for row in found["edges"]] == [["h"]]
    assert not found["identical"]


def test_parameters(made: dict[str, Any], other: dict[str, Any]) -> None:
    other["workers"][0]["owned_names"] = ["tok.weight", "blocks.1.up.weight", "blocks.2.up.weight"]
    other["workers"][1]["owned_names"] = []
    found = difference(made, other)
    assert found["parameters"] == {"first": ["blocks.0.up.weight"], "second": ["blocks.2.up.weight"], "changed": []}
    assert found["owners"] == [{"from": 1, "to": 0, "names": ["blocks.1.up.weight"]}]


def test_files(made: dict[str, Any], other: dict[str, Any]) -> None:
    one = {"sources": {"gpt.py": "1", "data.py": "1"}, "code": {"stage_0.py": "1"}, "weights": {"w": "1"}}
    two = {"sources": {"gpt.py": "2", "net.py": "1"}, "code": {"stage_0.py": "1"}, "weights": {"w": "2"}}
    other["build"]["edited"] = ["stage_1.py"]
    found = difference(made, other, one, two)
    assert found["sources"] == {"first": ["data.py"], "second": ["net.py"], "changed": ["gpt.py"]}
    assert found["code"] == {"first": [], "second": [], "changed": []}
    assert found["weights"] is True
    assert found["edited"] == [[], ["stage_1.py"]]
    assert not found["identical"]
    assert difference(made, made, one, one)["identical"]
    assert difference(made, made)["weights"] is None


def test_builds_of_one_model() -> None:
    builds = [lowered("gpt", forward_at=(at,), backward_at=("blocks.1",)) for at in ("blocks.2", "blocks.3")]
    one, two = (facts(subject_of(build)) for build in builds)
    assert difference(one, one)["identical"]
    found = difference(one, two)
    assert not found["identical"]
    (row,) = found["moved"]
    assert (row["phase"], row["from"], row["to"]) == ("forward", 1, 0)
    assert {".".join(path.split(".")[:2]) for path in row["modules"]} == {"blocks.2"}
    assert row["ms"] > 0
    assert found["owners"] == []
    before, now = ({(e.name, e.kind, e.src, e.dst) for e in build.plan.edges} for build in builds)
    rows = [row for row in found["edges"] if row["kind"] != "weights"]
    came = {(name, row["kind"], row["src"], row["dst"]) for row in rows for name in row["came"]}
    assert came == {(name.partition(":")[0], *more) for name, *more in now - before} != set()
