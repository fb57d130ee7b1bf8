"""How often a run is saved: every `500` steps, `30s`, `10min`, `2h`, or when `asked`. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fxpipe.errors import FxpipeError

_UNITS = {"s": 1, "min": 60, "h": 3600}
_TIME = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS)})")
ASKED = "asked"


@dataclass(frozen=True)
class Interval:
    """Every N steps, or every N seconds; the other is None. With neither, only when asked."""

    steps: int | None = None
    seconds: float | None = None

    @staticmethod
    def of(every: str | int) -> Interval:
        """Read a user's interval; in Python it may be a number of steps.

        Raises:
            FxpipeError: it is not an interval.
        """
        text = str(every)
        if text.isdecimal() and int(text) > 0:
            return Interval(steps=int(text))
        if text == ASKED:
            return Interval()
        match = _TIME.fullmatch(text.strip())
        if match and float(match[1]) > 0:
            return Interval(seconds=float(match[1]) * _UNITS[match[2]])
        raise FxpipeError(
            f"{every!r} is not an interval", hint="give steps: 500; a time: 30s, 10min, 2h; or epoch, or asked"
        )

    def due(self, step: int) -> bool:
        """Whether a step is due by number of steps; intervals in time are checked elsewhere."""
        return self.steps is not None and step > 0 and step % self.steps == 0
