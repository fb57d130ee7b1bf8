"""Hyperparameters that a model file reads and a command line sets: `lr = fxpipe.setting("lr", 0.1)`, `--set lr=0.05`.

Without fxpipe's command line, as in `python model.py`, a setting has its default.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypeVar

from fxpipe.errors import TaskError

Value = bool | int | float | str
T = TypeVar("T", bool, int, float, str)

_given: dict[str, str] = {}
_read: dict[str, tuple[Value, Value]] = {}  # the value, and the default that it was read with
_SWITCH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def setting(name: str, default: T) -> T:
    """The value of a hyperparameter: the one of `--set NAME=VALUE`, converted to the default's type.

    At the top of a model file or in a hook. A value that a captured hook reads is fixed when the model is compiled.

    Args:
        default: True or False, a number, or a string.

    Raises:
        TaskError: the given value is not of this type, or the name was read with another default.
    """
    if not isinstance(default, (bool, int, float, str)):
        raise TaskError(
            f"setting {name!r} has the default {default!r}, which is not a number, string, True or False",
            hint="read several settings, or a string that your file splits",
        )
    if name in _read and _read[name][1:] != (default,):
        raise TaskError(
            f"setting {name!r} is read with two defaults, {_read[name][1]!r} and {default!r}",
            hint="read it once, at the top of the file, or give it one default",
        )
    value: T = read_as(name, _given[name], default) if name in _given else default  # type: ignore[assignment]
    _read[name] = (value, default)
    return value


def read_as(name: str, text: str, default: Value) -> Value:
    """A text as a value of the default's type.

    Raises:
        TaskError: it is not one.
    """
    kind = type(default)
    try:
        number = _SWITCH[text.lower()] if kind is bool else kind(text)
        if isinstance(number, float) and math.isnan(number):
            raise ValueError
    except (KeyError, ValueError):
        kind_text = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise TaskError(f"--set {name}={text}: this is not {kind_text}, as its default {default!r} is") from None
    return number


def use(settings: Mapping[str, str]) -> None:
    """From now on, these settings are given; what was read before is forgotten."""
    _given.clear()
    _given.update(settings)
    _read.clear()


def read() -> dict[str, Value]:
    """The settings that were read, with their values."""
    return {name: value for name, (value, _) in _read.items()}


def pair(text: str) -> str:
    """The parser of `--set`: a name, an equals sign and a value.

    Raises:
        TaskError: it has no name, or no equals sign.
    """
    name, equals, _ = text.partition("=")
    if not equals or not name.strip():
        raise TaskError(f"--set {text}: this is not NAME=VALUE", hint="such as --set lr=0.1")
    return text


def pairs(texts: Iterable[str]) -> dict[str, str]:
    """What several `--set` give, by name; the last value of a name counts."""
    return {name.strip(): value for name, _, value in (text.partition("=") for text in texts)}


def texts(settings: Mapping[str, str]) -> tuple[str, ...]:
    """The inverse of `pairs`."""
    return tuple(f"{name}={value}" for name, value in settings.items())
