"""The digests that judge a change see another list of passes: a pass in another place, or one that is left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from bits import digests

from fxpipe.ir.transform import Pass
from fxpipe.lowering import lowering

CASE = "model=conv workers=3 cuts=earlier schedule=gpipe"


def swapped(passes: list[Pass]) -> list[Pass]:
    return [passes[1], passes[0], *passes[2:]]


def without_send_early(passes: list[Pass]) -> list[Pass]:
    return [step for step in passes if step.name != "send_early"]


@pytest.mark.parametrize(
    ("passes", "planted", "different"),
    [("wiring_passes", swapped, "refused"), ("emitting_passes", without_send_early, "stage_1.py")],
)
def test_a_planted_change_of_a_list_is_found(
    passes: str, planted: Callable[[list[Pass]], list[Pass]], different: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, as_shown = digests(CASE), getattr(lowering, passes)

    def changed(*args: Any, **options: Any) -> list[Pass]:
        return planted(as_shown(*args, **options))

    monkeypatch.setattr(lowering, passes, changed)
    assert digests(CASE)[different] != before.get(different)
