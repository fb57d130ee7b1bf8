"""An action of a worker, and its written form: `F3`, `B3.1`, `W3.1`."""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.plan.spec import Phase

LOOKAHEAD = 4
"""How many actions ahead receives are posted: two of each phase in the steady state of 1F1B."""


@dataclass(frozen=True, slots=True)
class Action:
    """The forward, the backward or the weight gradients of one microbatch.

    `F3` is the forward of minibatch 3's first microbatch, `B3.1` the backward of its second. `W3.1` makes the weight
    gradients of that, in schedules that separate them from the backward.
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


Event = tuple[int, Action]
"""An action of a worker."""
