"""Quantities as people write them: `10Gbit`, `200GB/s`, `50us`, `80GiB`, `400T`."""

from __future__ import annotations

import math
import re

from fxpipe.errors import ProfileError

_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_TIME = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_NUMBER = r"\s*(?P<number>[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*"
_SIZE = re.compile(_NUMBER + r"(?P<prefix>Ki|Mi|Gi|Ti|[kKMGTP]?)(?P<unit>bit|B|)(?P<rate>/s|ps|)\s*")
_SECONDS = re.compile(_NUMBER + r"(?P<unit>ms|us|µs|ns|s|)\s*")


def bandwidth(text: str | float) -> float:
    """Bytes per second: `10Gbit` (1.25e9), `200GB/s`, `1.5GiB/s`, or a plain number of bytes."""
    parts = _parts(_SIZE, text, "a bandwidth", "10Gbit, 200GB/s")
    return _positive(_size(parts) / (8 if parts["unit"] == "bit" else 1), text)


def memory(text: str | float) -> float:
    """Bytes: `80GiB`, `16GB`, or a plain number."""
    parts = _parts(_SIZE, text, "a size of memory", "80GiB, 16GB")
    if parts["rate"] or parts["unit"] == "bit":
        raise ProfileError(f"{text!r} is not a size of memory", hint="write it as 80GiB or 16GB")
    return _positive(_size(parts), text)


def seconds(text: str | float) -> float:
    """Seconds: `50us`, `1.5ms`, or a plain number."""
    parts = _parts(_SECONDS, text, "a time", "50us, 1.5ms")
    return float(parts["number"]) * _TIME[parts["unit"] or "s"]


def rate(text: str | float) -> float:
    """A rate: `400T` (FLOP/s), or a plain number."""
    parts = _parts(_SIZE, text, "a rate", "400T, 4e14")
    if parts["unit"] or parts["rate"]:
        raise ProfileError(f"{text!r} is not a rate", hint="write it as 400T or 4e14")
    return _positive(_size(parts), text)


def size(count: float, *, enough: bool = False) -> str:
    """`1.5 MiB`, rounded; with `enough` rounded up, to one more digit."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    digits = (0 if unit == "B" or count >= 100 else 1) + enough
    if enough:
        count = math.ceil(count * 10**digits - 1e-6) / 10**digits
    return f"{count:.{digits}f} {unit}"


def _parts(pattern: re.Pattern[str], text: str | float, what: str, examples: str) -> re.Match[str]:
    match = pattern.fullmatch(repr(text) if isinstance(text, (int, float)) else text)
    if match is None:
        raise ProfileError(f"{text!r} is not {what}", hint=f"write it as {examples}")
    return match


def _size(parts: re.Match[str]) -> float:
    prefix = parts["prefix"]
    return float(parts["number"]) * (_BINARY[prefix] if prefix in _BINARY else _PREFIX[prefix])


def _positive(value: float, text: str | float) -> float:
    if not value > 0:
        raise ProfileError(f"{text!r} is not above zero", hint="give a number above zero")
    return value
