"""Numbers as people read them. What is not known is a dash."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

NONE = "–"


def _known(form: Callable[[Any], str]) -> Callable[[Any], str]:
    def formatted(value: Any) -> str:
        return NONE if value is None or value != value else form(value)  # NaN differs from itself

    return formatted


def digits(value: float) -> str:
    """Three significant digits, or all before the point: 0.0123, 1.23, 12.3, 1,234."""
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 1e15 or size < 1e-5:
        return f"{value:.2e}"
    return f"{value:,.0f}" if size >= 99.95 else f"{value:#.3g}"


def plural(n: int, one: str, many: str | None = None) -> str:
    """A number and what it counts: 1 edge, 1,234 edges."""
    return f"{n:,} {one if n == 1 else many or f'{one}s'}"


@_known
def size(value: float) -> str:
    """Bytes: 12 B, 3.4 MiB, 120 GiB."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    unit = 0
    while value >= 1024 and unit < 4:
        value, unit = value / 1024, unit + 1
    return f"{value:.{0 if unit == 0 or value >= 100 else 1}f} {units[unit]}"


@_known
def listed(values: Iterable[Any]) -> str:
    """Values, each once, in their order."""
    return ", ".join(dict.fromkeys(map(str, values))) or NONE


@_known
def span(ends: tuple[int, int]) -> str:
    """A range of units; the last one shown belongs to it."""
    return f"{ends[0]} to {ends[1] - 1}" if ends[0] < ends[1] else "none"


@_known
def dims(shape: list[int]) -> str:
    """A tensor's shape."""
    return f"[{', '.join(map(str, shape))}]"


text = _known(lambda value: value if isinstance(value, str) else str(value))
number = _known(digits)
count = _known(lambda value: f"{value:,}")
ms = _known(lambda value: f"{digits(value)} ms")
share = _known(lambda value: f"{100 * value:.1f}%")
clock = _known(lambda value: f"{value:.3f}")
moment = _known(lambda value: f"{value:.6f}")
yes = _known(lambda value: "yes" if value else "no")
