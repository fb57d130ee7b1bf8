from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from written_schedule import action_of

from fxpipe.schedule import Action

actions = st.builds(Action, st.sampled_from("FBW"), st.integers(0, 10**6), st.integers(0, 1000))


def test_the_written_form() -> None:
    assert [str(a) for a in (Action("F", 3), Action("B", 3, 1), Action("F", 0, 12), Action("W", 2))] == [
        "F3",
        "B3.1",
        "F0.12",
        "W2",
    ]


@given(actions)
def test_it_says_all_of_an_action(action: Action) -> None:
    assert action_of(str(action)) == action
