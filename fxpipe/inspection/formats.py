"""Numbers as text, for the terminal and the page. What is unknown is a dash."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fxpipe.planner import quantity
from fxpipe.planner.links import Links

NONE = "–"


def known(form: Callable[[Any], str]) -> Callable[[Any], str]:
    """The same form, with a dash for None and NaN."""

    def formatted(value: Any) -> str:
        return NONE if value is None or value != value else form(value)  # NaN differs from itself

    return formatted


def digits(value: float) -> str:
    """Three significant digits, and all digits before the point: 0.0123, 1.23, 12.3, 1,234."""
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 1e15 or size < 1e-5:
        return f"{value:.2e}"
    return f"{value:,.0f}" if size >= 99.95 else f"{value:#.3g}"


def plural(n: int, one: str, many: str | None = None) -> str:
    """A number and what it counts: 1 edge, 1,234 edges."""
    return f"{n:,} {one if n == 1 else many or f'{one}s'}"


@known
def listed(values: Iterable[Any]) -> str:
    """The values in their order, each once, with commas."""
    return ", ".join(dict.fromkeys(map(str, values))) or NONE


text = known(lambda value: value if isinstance(value, str) else str(value))
number = known(digits)
count = known(lambda value: f"{value:,}")
size = known(quantity.size)
ms = known(lambda value: f"{digits(value)} ms")
share = known(lambda value: f"{100 * value:.1f}%")
clock = known(lambda value: f"{value:.3f}")
moment = known(lambda value: f"{value:.6f}")
yes = known(lambda value: "yes" if value else "no")


class TimeUnit:
    """Writes times in one unit, which the longest of them decides: µs, ms or s."""

    def __init__(self, milliseconds: Iterable[float | None]) -> None:
        most = max((ms for ms in milliseconds if ms is not None), default=0.0)
        self.unit, self._factor = ("µs", 1e3) if most < 1 else ("s", 1e-3) if most >= 1e5 else ("ms", 1.0)
        scaled = most * self._factor
        self._digits = 0 if scaled >= 1000 else 1 if scaled >= 100 else 2

    def __call__(self, ms: float | None) -> str:
        """The number without its unit; the longest time decides how many decimals all have. None is a dash."""
        return NONE if ms is None else f"{ms * self._factor:.{self._digits}f}"


def described_links(links: Links) -> str:
    """Links in a few words."""
    if links.free:
        return "no communication"
    if isinstance(links.bandwidth, tuple) or isinstance(links.latency, tuple):
        return "links by matrix"
    return f"links {links.bandwidth / 1e9:.4g} GB/s, {links.latency * 1e6:.4g} µs"
