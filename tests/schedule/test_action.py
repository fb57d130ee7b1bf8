from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.errors import ScheduleError
from fxpipe.schedule import Action, parse_row

actions = st.builds(Action, st.sampled_from("FBW"), st.integers(0, 10**6), st.integers(0, 1000))


def test_the_written_form() -> None:
    assert [str(a) for a in (Action("F", 3), Action("B", 3, 1), Action("F", 0, 12), Action("W", 2))] == [
        "F3",
        "B3.1",
        "F0.12",
        "W2",
    ]


@given(actions)
def test_parse_is_the_inverse_of_str(action: Action) -> None:
    assert Action.parse(str(action)) == action


@given(st.lists(actions))
def test_a_row_is_its_actions_with_spaces(row: list[Action]) -> None:
    assert parse_row(" ".join(map(str, row))) == row


@pytest.mark.parametrize(
    "text", ["", "F", "3", "U3", "f3", "w3", "F3.", "F3.0", "F03", "F-1", "F3 ", "F٣", "F3\n", "F3B3"]
)
def test_anything_else_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Action.parse(text)
    assert f"'{text}'" in caught.value.what
