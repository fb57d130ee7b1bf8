"""What a step reaches is found within bounds, told apart by name, and put back as it was."""

from __future__ import annotations

import collections
import types
from typing import Any

import pytest
import torch
from torch import nn

from fxpipe.tracing import holders, reach
from fxpipe.tracing.model_state import PythonState, preserved


class Thing:
    shared = 1

    def __init__(self) -> None:
        self.value = 1
        self.members = [1, 2]


class Slotted:
    __slots__ = ("__hidden", "value")

    def __init__(self) -> None:
        self.value, self.__hidden = 1, 1

    @property
    def hidden(self) -> int:
        return self.__hidden

    def hide(self, value: int) -> None:
        self.__hidden = value


ORDERED = collections.OrderedDict(a=1, b=2)
THING, SLOTTED, SET = Thing(), Slotted(), {1, 2}
GLOBAL = 1


def touch() -> None:
    """Change everything, in every way: replaced, added, removed, put in another order."""
    global GLOBAL, ADDED
    GLOBAL, ADDED = 2, 1  # type: ignore[name-defined]
    ORDERED.move_to_end("a")
    THING.value, THING.members = 2, []
    THING.extra = 1  # type: ignore[attr-defined]
    Thing.shared = 2
    Thing.added = 1  # type: ignore[attr-defined]
    del SLOTTED.value
    SLOTTED.hide(2)
    SET.clear()


def test_everything_is_put_back() -> None:
    members = THING.members
    with preserved(nn.Linear(1, 1), touch):
        touch()
        assert (GLOBAL, list(ORDERED), hasattr(SLOTTED, "value"), SLOTTED.hidden) == (2, ["b", "a"], False, 2)
    assert (GLOBAL, list(ORDERED), THING.value, SLOTTED.value, SLOTTED.hidden) == (1, ["a", "b"], 1, 1, 1)
    assert THING.members is members
    assert members == [1, 2]
    assert {1, 2} == SET
    assert Thing.shared == 1
    assert not hasattr(Thing, "added")
    assert not hasattr(THING, "extra")
    assert "ADDED" not in globals()


def test_changes_are_named() -> None:
    model = nn.Linear(1, 1)
    state = PythonState(model, [touch])
    before = state.snapshot()
    with state.preserved():
        touch()
        found = {str(change) for change in state.changes(before)}
    assert {"GLOBAL (1 → 2)", "THING.value (1 → 2)", "Thing.shared (1 → 2)", "SLOTTED.value (1 → nothing)"} <= found
    assert {"THING.members (2 → 0 elements)", "SET (2 → 0 elements)", "ADDED (nothing → 1)"} <= found
    assert not PythonState(model, [touch]).changes(PythonState(model, [touch]).snapshot())


def names(root: Any) -> set[str]:
    return {holder.name for holder in reach.Walk(nn.Linear(1, 1), [root]).holders}


def test_what_is_large_or_not_the_users_is_passed_by() -> None:
    vocabulary = list(range(holders.LARGE + 1))
    small, model = [1], nn.Linear(1, 1)
    loop: list[Any] = []
    loop.append(loop)

    def step() -> Any:
        return vocabulary, small, loop, torch.optim.SGD, torch.nn.functional.linear, types, model

    found = names(step)
    assert {"small", "loop", "model"} <= found
    assert "vocabulary" in found, "its variable may be assigned to"
    assert not [
        holder for holder in reach.Walk(nn.Linear(1, 1), [step]).holders if holder.read() == dict(enumerate(vocabulary))
    ]
    others = [h for h in reach.Walk(nn.Linear(1, 1), [step]).holders if h.name.startswith(("torch", "types", "SGD"))]
    assert others, "a step may set something on them"
    assert not any(holder.read() for holder in others), "their functions and classes are no state"


def test_the_walk_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [Thing() for _ in range(100)]
    few = [1]

    def step() -> Any:
        return few, many

    everything = len(reach.Walk(nn.Linear(1, 1), [step]).holders)
    monkeypatch.setattr(reach, "MOST", 20)
    found = reach.Walk(nn.Linear(1, 1), [step]).holders
    assert len(found) < everything - 100
    assert "few" in {holder.name for holder in found}, "what is near comes first"
