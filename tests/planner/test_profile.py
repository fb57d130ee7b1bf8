"""Profiles in both forms, and what is wrong with malformed ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fxpipe.errors import ProfileError
from fxpipe.planner.pipedream import read_profile
from fxpipe.planner.profile import Profile, Unit, Value, read_profile_json

GRAPH = """\
node4 -- Add -- forward_compute_time=0.5, backward_compute_time=0.25, activation_size=8.0, parameter_size=0.0
node1 -- Input -- forward_compute_time=99.0, backward_compute_time=0.0, activation_size=4.0, parameter_size=0.0
node3 -- LSTM(2, 2) -- forward_compute_time=2.0, backward_compute_time=4.0, activation_size=[6.0; 1.0; 1.0], parameter_size=32.0
node2 -- Conv2d(3, 4, kernel_size=(3, 3)) -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=8.0, parameter_size=16.0
\tnode1 -- node2
\tnode1 -- node3
\tnode2 -- node4
\tnode3 -- node4
"""  # noqa: E501

UNITS = [{"name": "a", "forward_ms": 1, "backward_ms": 2}, {"name": "b", "forward_ms": 1, "backward_ms": 2}]


def write(folder: Path, text: str, name: str = "graph.txt") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_pipedream_graphs(tmp_path: Path) -> None:
    profile = read_profile(write(tmp_path, GRAPH))
    assert [u.name for u in profile.units] == ["node1 Input", "node2 Conv2d", "node3 LSTM", "node4 Add"]
    assert profile.units[0].forward_ms == 0.0, "the data loader's time is no worker's"
    assert profile.units[2].output_bytes == profile.units[2].saved_bytes == 8.0
    assert profile.total_ms() == pytest.approx(9.75)
    assert profile.activations == (
        Value(0, 4.0, (1, 2)),
        Value(1, 8.0, (3,)),
        Value(2, 1.0, (3,)),
        Value(2, 1.0, (3,)),
        Value(2, 6.0, (3,)),
    )
    assert Value(2, 4.0, (1,)) in profile.gradients, "the gradients of a value are summed from reader to reader"
    assert Value(1, 4.0, (0,)) in profile.gradients


def test_a_graph_that_pipedream_has_partitioned(tmp_path: Path) -> None:
    lines = GRAPH.splitlines()
    of_stages = [line + (f" -- stage_id={i}" if line.startswith("node") else "") for i, line in enumerate(lines)]
    assert read_profile(write(tmp_path, "\n".join(of_stages))) == read_profile(write(tmp_path, GRAPH))


def test_an_element_of_a_list_travels_alone(tmp_path: Path) -> None:
    element = "node5 -- __getitem__(1) -- forward_compute_time=0.0, backward_compute_time=0.0, activation_size=1.0, parameter_size=0.0\n"  # noqa: E501
    profile = read_profile(write(tmp_path, GRAPH + element + "\tnode3 -- node5\n"))
    assert Value(2, 6.0, (3,)) in profile.activations
    assert Value(2, 1.0, (3, 4)) in profile.activations
    assert profile.units[4].saved_bytes == 0.0, "what takes no time keeps nothing"


def test_a_fraction_of_backward_becomes_w(tmp_path: Path) -> None:
    profile = read_profile(write(tmp_path, GRAPH)).split_backward(0.25)
    assert [(u.backward_ms, u.weight_ms) for u in profile.units] == [(0, 0), (1.5, 0.5), (3, 1), (0.25, 0)]
    assert profile.total_ms() == pytest.approx(9.75)


def test_w_that_is_known_stays(tmp_path: Path) -> None:
    units = [{"name": "a", "forward_ms": 1, "backward_ms": 2, "weight_ms": 3, "parameter_bytes": 8}]
    profile = read_profile(write(tmp_path, json.dumps({"units": units}), "p.json")).split_backward(0.5)
    assert (profile.units[0].backward_ms, profile.units[0].weight_ms) == (2, 3)


def test_json_profiles_are_chains_unless_edges_say_otherwise(tmp_path: Path) -> None:
    units = [{"name": n, "forward_ms": 1, "backward_ms": 2, "output_bytes": 8} for n in "abc"]
    profile = read_profile(write(tmp_path, json.dumps({"units": units}), "p.json"))
    assert profile.activations == (Value(0, 8.0, (1,)), Value(1, 8.0, (2,)))
    assert profile.gradients == (Value(1, 8.0, (0,)), Value(2, 8.0, (1,)))
    profile = read_profile(write(tmp_path, json.dumps({"units": units, "edges": [["c", "a"], ["a", "b"]]}), "q.json"))
    assert [u.name for u in profile.units] == ["c", "a", "b"]


def test_json_comes_back_as_it_was() -> None:
    units = tuple(
        Unit(name, 1.0 + i, 2.0, 0.5, 0.1, 8.0, 4.0, 16.0, 8.0, 2.0, 64.0, 1.0, 32.0) for i, name in enumerate("abc")
    )
    values = (Value(0, 5.0, (1, 2)), Value(0, 3.0, (2,)))
    profile = Profile(units, values, (Value(2, 5.0, (0, 1)),), {1: "running_mean"}, "cuda: NVIDIA H200", 0.03, 0.3)
    assert read_profile_json(profile.to_json(), "here", error=ProfileError) == profile


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        (GRAPH + "\tnode4\n", "graph.txt:9", "not an edge"),
        (GRAPH + "\tnode4 -- node9\n", "graph.txt:9", "no node 'node9'"),
        (GRAPH + "\tnode4 -- node2\n", "graph.txt", "form a cycle through node2, node4"),
        (GRAPH + "what is this\n", "graph.txt:9", "not a node"),
        (GRAPH.replace("=2.0, back", "=two, back"), "graph.txt:3, forward_compute_time", "'two' is not a time or size"),
        (GRAPH.replace("=2.0, back", "=-2.0, back"), "graph.txt:3, forward_compute_time", "not a time or size"),
        (GRAPH.replace(", parameter_size=32.0", ""), "graph.txt:3", "lacks parameter_size"),
        (GRAPH.replace("node4 -- Add", "node3 -- Add"), "graph.txt:3", "node3 occurs twice"),
        ("", "graph.txt", "no units"),
        ('{"units": [{"name": "a"}]}', "graph.txt, $.units[0]", "missing required field forward_ms"),
        (
            '{"units": [{"name": "a", "forward_ms": 1, "backward_ms": 1, "backwards_ms": 1}]}',
            "graph.txt, $.units[0]",
            "mean 'backward_ms'",
        ),
        (
            '{"units": [{"name": "a", "forward_ms": true, "backward_ms": 1}]}',
            "graph.txt, $.units[0].forward_ms",
            "got bool",
        ),
        ('{"units": [{"name": "a", "forward_ms": 1, "backward_ms": NaN}]}', "graph.txt", "NaN is not a number"),
        ('{"units": []}', "graph.txt, $.units", "no units"),
        ('["units"]', "graph.txt, $", "expected object, got array"),
        ('{"units":\n ', "graph.txt:2", "not JSON"),
    ],
)
def test_malformed_profiles_are_explained(tmp_path: Path, text: str, where: str, what: str) -> None:
    with pytest.raises(ProfileError) as caught:
        read_profile(write(tmp_path, text))
    assert caught.value.where == where
    assert what in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "where", "what"),
    [
        ({"edges": [["a"]]}, "p.json, $.edges[0]", "expected array of length 2"),
        ({"edges": [["a", "z"]]}, "p.json, $.edges[0]", "no unit 'z'"),
        ({"edges": [["a", "b"], ["b", "a"]]}, "p.json", "cycle"),
        ({"units": [UNITS[0], UNITS[0]]}, "p.json, $.units[1]", "two units are called 'a'"),
        ({"activations": [{"unit": "a"}]}, "p.json, $.activations[0]", "missing required field bytes"),
        ({"gradients": [{"unit": "a", "bytes": 1, "readers": ["b"]}]}, "p.json, $.gradients", "goes to a later unit"),
        ({"units": [{**UNITS[0], "backwards_ms": 1}]}, "p.json, $.units[0]", "mean 'backward_ms'"),
        ({"units": [{**UNITS[0], "parameter_bytes": -1}]}, "p.json, $.units[0].parameter_bytes", "not a time or size"),
        ({"no_forward_cut": {"q": "why"}}, "p.json, $.no_forward_cut", "no unit 'q'"),
    ],
)
def test_malformed_json_is_explained(tmp_path: Path, changes: dict[str, object], where: str, what: str) -> None:
    with pytest.raises(ProfileError) as caught:
        read_profile(write(tmp_path, json.dumps({"units": UNITS, **changes}), "p.json"))
    assert caught.value.where == where
    assert what in str(caught.value)


def test_a_missing_profile(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot be read"):
        read_profile(tmp_path / "none.txt")
