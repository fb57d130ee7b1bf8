"""What capture notes of the state that a step and the hooks of a run share: exactly what the step reads, and where."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fxpipe.plan.user_files import WatchedSpec
from fxpipe.task.model_file import load_task
from fxpipe.tracing.capture import capture
from fxpipe.tracing.hook_state import BeforeModel, described, undone, walk_of

TOP = """
import torch
from torch import nn
from torch.nn import functional as F

NET, MASK, ALPHA, CONFIG = None, torch.ones(4), 1.0, {"a": {"b": [1.0, 2.0]}}
ARRAY = MASK.numpy()


class Settings:
    def __init__(self):
        self.beta, self.unread = 1.0, 0


SETTINGS = Settings()


class Net(nn.Module):
    gain = 1.0

    def __init__(self):
        super().__init__()
        self.head, self.drop = nn.Linear(4, 3), nn.Dropout(0.0)
        self.register_buffer("warmth", torch.ones(()))
        self.scale = torch.ones(4)
        self.logged = 0

    def forward(self, x):
        return self.head(self.drop(x * self.scale)) * self.warmth * self.gain


def model():
    global NET
    NET = Net()
    return NET


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x * MASK) * SETTINGS.beta * CONFIG["a"]["b"][0] * ALPHA, y)


def train_data():
    return [(torch.ones(2, 4), torch.zeros(2, dtype=torch.long))]
"""

Watch = Callable[[str], dict[str, WatchedSpec]]


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    """What a model file with this `on_step` has watched, by place."""

    def captured(body: str) -> dict[str, WatchedSpec]:
        path = tmp_path / "model.py"
        path.write_text(f"{TOP}\n\ndef on_step(step, loss, run):\n{textwrap.indent(body, '    ')}\n")
        task = load_task(path)
        program = capture(task.model(), task.loss, task.example(), hooks=task.hooks.of_run)
        return {row.place: row for row in program.watched}

    return captured


def test_nothing_is_watched_that_hooks_do_not_reach(watch: Watch) -> None:
    assert watch("print(step)") == {}


def test_what_the_step_does_not_read_is_not_watched(watch: Watch) -> None:
    assert watch("SETTINGS.unread += 1").keys() == {"SETTINGS", "SETTINGS.beta"}
    assert "NET.logged" not in watch("NET.logged = step")


def test_attributes_are_watched_with_their_line(watch: Watch) -> None:
    rows = watch("NET.gain = 0.5")
    assert (rows["NET.gain"].value, rows["NET.drop.p"].value, rows["NET.drop.training"].value) == ("1.0", "0.0", "True")
    assert "* self.gain" in str(rows["NET.gain"].where)
    assert rows["NET.head._parameters"].value == "{'weight': Parameter, 'bias': Parameter}"


@pytest.mark.parametrize(
    ("body", "place", "buffer"),
    [
        ("NET.warmth.mul_(0.5)", "NET.warmth", "warmth"),
        ("NET.scale = NET.scale * 0.5", "NET.scale", "scale"),
        ("MASK.mul_(0.5)", "MASK", "outside.MASK"),
        ("ARRAY[:] = 0.5", "ARRAY", "outside.ARRAY"),
    ],
)
def test_new_values_of_tensors_travel(watch: Watch, body: str, place: str, buffer: str) -> None:
    assert watch(body)[place].buffer == buffer


def test_another_array_in_the_place_of_an_alias_is_not_the_steps_tensor(watch: Watch) -> None:
    assert watch("global ARRAY\nARRAY = 2 * ARRAY")["ARRAY"].alias
    assert not watch("global MASK\nMASK = 2 * MASK")["MASK"].alias


def test_containers_are_watched_as_a_whole(watch: Watch) -> None:
    assert watch('CONFIG["a"]["b"][0] = 0.5')["CONFIG['a']['b']"].value == "[1.0, 2.0]"


def test_names_are_watched_with_the_line_that_mentions_them(watch: Watch) -> None:
    row = watch("global ALPHA\nALPHA = 0.5")["ALPHA"]
    assert row.value == "1.0"
    assert "CONFIG" in str(row.where)


@pytest.mark.parametrize(
    ("one", "other"),
    [(1.0, 2.0), ([1, 2], [1, 3]), ({"a": (1,)}, {"a": (2,)}), (list(range(999)), [*range(998), 0]), ({1, 2}, {1, 3})],
)
def test_descriptions_differ_where_values_do(one: object, other: object) -> None:
    assert described(one) == described(one) != described(other)
    assert len(described(one)) < 250


def test_hooks_are_tried_without_a_trace() -> None:
    state, weights = {"epoch": 0}, torch.ones(2)

    def hook() -> None:
        state["epoch"] += 1
        weights.mul_(0.5)

    with undone({"on_step": hook}):
        hook()
    assert (state, weights.tolist()) == ({"epoch": 0}, [1.0, 1.0])
    assert "state" in walk_of({"on_step": hook})


@pytest.mark.parametrize(
    ("hook", "line", "left"),
    [
        ("CONFIG['c']", "CONFIG['c'] = 2", True),
        ("SETTINGS.unread", "SETTINGS.unread += 1", True),
        ("NET", "", True),
        ("CONFIG['a']", "CONFIG['a'] = CONFIG['a']", False),
        ("ALPHA", "SETTINGS.unread += 1", False),
        ("SETTINGS.beta", "SETTINGS.beta = 0.5 + 0.5", False),
    ],
)
def test_what_model_leaves_for_other_hooks(tmp_path: Path, hook: str, line: str, left: bool) -> None:
    path = tmp_path / "model.py"
    made = TOP.replace("    NET = Net()\n", f"    NET = Net()\n    {line}\n")
    path.write_text(f"{made}\n\ndef on_step(step, loss, run):\n    {hook}\n")
    task = load_task(path)
    before = BeforeModel(task.hooks.of_run)
    task.model()
    assert before.changed() is left
