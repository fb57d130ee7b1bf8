"""Options are checked where they are given: by type, bounds and choices, for all callers alike."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from fxpipe.errors import FxpipeError
from fxpipe.lowering.options import CompileOptions
from fxpipe.options import changed, check, inner, option
from fxpipe.runtime.options import RunOptions


def twice(text: str) -> int:
    return 2 * int(text)


@dataclass(frozen=True)
class Some:
    steps: int | None = option(None, minimum=1, help="How many.")
    norm: float = option(1.0, above=0, below=9, help="At most this.")
    mode: str = option("a", choices=("a", "b"), help="Which.")
    cut: Literal["x", "y"] = "x"
    dry: bool = option(False, help="Only say it.")
    out: str | None = option(None, path="any", help="Where to.")
    at: tuple[float, ...] = ()
    pairs: tuple[int, ...] = option((), kind=twice, on_command_line=None, help="Some.")
    hook: Callable[..., Any] | None = None
    own: str = inner("")

    def __post_init__(self) -> None:
        check(self)


def test_values_become_what_is_declared() -> None:
    given = Some(np.int64(3), np.float32(0.5), "b", "y", np.bool_(True), Path("out"), np.array([1, 0.5]), (), print)
    assert given == Some(3, 0.5, "b", "y", True, "out", (1.0, 0.5), (), print)
    assert [type(given.steps), type(given.norm), type(given.dry), type(given.out)] == [int, float, bool, str]
    assert given.at == (1.0, 0.5)
    assert Some(norm=2).norm == 2


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("steps", 0, "a whole number of at least 1 or None"),
        ("steps", 2.0, "a whole number of at least 1 or None"),
        ("steps", True, "a whole number of at least 1 or None"),
        ("steps", "3", "a whole number of at least 1 or None"),
        ("norm", float("nan"), "a number above 0 and below 9"),
        ("norm", None, "a number above 0 and below 9"),
        ("norm", 9, "a number above 0 and below 9"),
        ("mode", "c", "one of a, b"),
        ("cut", "z", "one of x, y"),
        ("dry", 1, "True or False"),
        ("dry", "no", "True or False"),
        ("out", 5, "a text or None"),
        ("at", "12", "a list of numbers"),
        ("at", [1, "2"], "a list of numbers"),
        ("at", np.float64(1), "a list of numbers"),
        ("hook", "print", "a function or None"),
    ],
)
def test_others_are_refused(name: str, value: Any, wanted: str) -> None:
    with pytest.raises(FxpipeError) as caught:
        changed(Some(), {name: value})
    assert caught.value.what == f"{name}={value!r} is not {wanted}"


def test_all_are_named_at_once() -> None:
    with pytest.raises(FxpipeError, match=r"steps=-1 is not .*; mode='z' is not one of a, b; dry=2 is not"):
        Some(steps=-1, mode="z", dry=2)  # type: ignore[arg-type]


def test_what_fxpipe_sets_is_no_keyword() -> None:
    assert Some(own="mine").own == "mine"
    with pytest.raises(FxpipeError, match="there is no option 'own'"):
        changed(Some(), {"own": "mine"})


@pytest.mark.parametrize("kind", [CompileOptions, RunOptions])
@pytest.mark.parametrize("value", [object(), [object()], {"a": 1}, b"x", float("nan"), -(10**30), ""])
def test_every_option_answers_to_every_value(kind: type[Any], value: Any) -> None:
    """With an error of fxpipe's or with the value, never with one of Python's."""
    known = {"build": "build"} if kind is RunOptions else {}
    for name in kind.__dataclass_fields__:
        with suppress(FxpipeError):
            kind(**{**known, name: value})
