"""How often a run is to be saved: `500` steps, `30s`, `10min`, `2h`, or when it is `asked`. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fxpipe.errors import FxpipeError

_UNITS = {"s": 1, "min": 60, "h": 3600}
_TIME = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS)})")
ASKED = "asked"


@dataclass(frozen=True)
class Interval:
    """Every so many steps, or every so many seconds; the other is None. With neither, only when somebody asks."""

    steps: int | None = None
    seconds: float | None = None

    @staticmethod
    def of(given: str | int) -> Interval:
        """Read what a user gives; in Python, a number of steps may be one.

        Raises:
            FxpipeError: it is neither.
        """
        text = str(given)
        if text.isdecimal() and int(text) > 0:
            return Interval(steps=int(text))
        if text == ASKED:
            return Interval()
        match = _TIME.fullmatch(text.strip())
        if match and float(match[1]) > 0:
            return Interval(seconds=float(match[1]) * _UNITS[match[2]])
        raise FxpipeError(
            f"{given!r} is no interval", hint="so many steps: 500; a time: 30s, 10min, 2h; or epoch, or asked"
        )

    def due(self, step: int) -> bool:
        """Whether the steps say so; a time never does."""
        return self.steps is not None and step > 0 and step % self.steps == 0
