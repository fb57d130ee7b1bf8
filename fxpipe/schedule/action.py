"""An action of a worker, and its written form: `F3`, `B3.1`, `W3.1`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import cast

from fxpipe.errors import ScheduleError
from fxpipe.plan.spec import Phase

LOOKAHEAD = 4
"""How many actions ahead receives are posted: two of each phase in the steady state of 1F1B."""

_NUMBER = "0|[1-9][0-9]*"
_WRITTEN = re.compile(rf"(?P<phase>[FBW])(?P<minibatch>{_NUMBER})(?:\.(?P<microbatch>[1-9][0-9]*))?")


@dataclass(frozen=True, slots=True)
class Action:
    """The forward, the backward or the weight gradients of one microbatch.

    `F3` is the forward of minibatch 3's first microbatch, `B3.1` the backward of its second. `W3.1` makes the weight
    gradients of that, in schedules that separate them from the backward. Every action has one written form; `parse` is
    the inverse of `str`.
    """

    phase: Phase
    minibatch: int
    microbatch: int = 0

    def __str__(self) -> str:
        text = f"{self.phase}{self.minibatch}"
        return f"{text}.{self.microbatch}" if self.microbatch else text

    def of(self, minibatch: int) -> Action:
        """The same action of another minibatch."""
        return Action(self.phase, minibatch, self.microbatch)

    @staticmethod
    def parse(text: str) -> Action:
        """Read `str(action)`.

        Raises:
            ScheduleError: the text is not an action.
        """
        written = _WRITTEN.fullmatch(text)
        if written is None:
            raise ScheduleError(
                f"'{text}' is not an action",
                hint="an action is F, B or W, the minibatch, and .microbatch unless it is 0: F3, B3.1, W3.1",
            )
        return Action(cast(Phase, written["phase"]), int(written["minibatch"]), int(written["microbatch"] or 0))


Event = tuple[int, Action]
"""An action of a worker."""


def parse_row(text: str) -> list[Action]:
    """Read one worker's actions, separated by spaces: `F0 F1 B0`.

    Raises:
        ScheduleError: one of them is not an action.
    """
    return [Action.parse(word) for word in text.split()]
