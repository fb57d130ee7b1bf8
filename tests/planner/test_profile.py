"""Profiles in both forms, and what is wrong with malformed ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fxpipe.errors import ProfileError
from fxpipe.planner.profile import read_profile

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


def write(folder: Path, text: str, name: str = "graph.txt") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_pipedream_graphs(tmp_path: Path) -> None:
    profile = read_profile(write(tmp_path, GRAPH))
    assert [u.name for u in profile.units] == ["Input", "Conv2d(3, 4, kernel_size=(3, 3))", "LSTM(2, 2)", "Add"]
    assert profile.edges == ((0, 1), (0, 2), (1, 3), (2, 3))
    assert profile.units[0].forward_ms == 0.0, "the data loader's time is no worker's"
    assert profile.units[2].output_bytes == 8.0
    assert profile.total_ms == pytest.approx(9.75)


def test_json_profiles_are_chains_unless_edges_say_otherwise(tmp_path: Path) -> None:
    units = [{"name": n, "forward_ms": 1, "backward_ms": 2} for n in "abc"]
    profile = read_profile(write(tmp_path, json.dumps({"units": units}), "p.json"))
    assert profile.edges == ((0, 1), (1, 2))
    profile = read_profile(write(tmp_path, json.dumps({"units": units, "edges": [["c", "a"], ["a", "b"]]}), "q.json"))
    assert [u.name for u in profile.units] == ["c", "a", "b"]


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        (GRAPH + "\tnode4\n", "graph.txt:9", "not an edge"),
        (GRAPH + "\tnode4 -- node9\n", "graph.txt", "node4 -- node9 leads to no unit"),
        (GRAPH + "\tnode4 -- node2\n", "graph.txt", "go round in a circle through node2, node4"),
        (GRAPH + "what is this\n", "graph.txt:9", "not a node"),
        (GRAPH.replace("=2.0, back", "=two, back"), "graph.txt:3", "malformed costs"),
        (GRAPH.replace("=2.0, back", "=-2.0, back"), "graph.txt:3", "malformed costs"),
        ("", "graph.txt", "no units"),
        ('{"units": [{"name": "a"}]}', "graph.txt, unit 0", "malformed unit"),
        ('{"units": ', "graph.txt", "not JSON"),
    ],
)
def test_malformed_profiles_are_explained(tmp_path: Path, text: str, where: str, what: str) -> None:
    with pytest.raises(ProfileError) as caught:
        read_profile(write(tmp_path, text))
    assert caught.value.where == where
    assert what in str(caught.value)


def test_a_missing_profile(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot be read"):
        read_profile(tmp_path / "none.txt")
