"""Repairs of updates by name: `+NAME` after any policy without a flush. Only `kind` imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxpipe.policy.optimizers.update_repair import UpdateRepair


@dataclass(frozen=True)
class Repair:
    """What corrects the updates of late gradients, whatever weights are read.

    Attributes:
        name: the policies' option.
        what: its name in messages.
        place: its `UpdateRepair`: the module in `fxpipe.policy.optimizers` and the class.
        passes: bytes that it reads and writes in an update, per byte of weights; an estimate.
        each, once: copies of a late parameter that it keeps, for each update that is missed, and in addition.
        on_time: it also changes the updates of gradients that are on time.
        shares: it needs only the parameters that a replica updates, so it works with `--shard optimizer`.
    """

    name: str
    what: str
    place: str
    passes: float
    each: int = 0
    once: int = 0
    on_time: bool = False
    shares: bool = False

    def copies(self, late: int) -> int:
        """The copies of a parameter whose gradients are `late` updates late."""
        return self.each * late + self.once if late else 0

    def works(self, late: int) -> bool:
        """Whether it changes updates of gradients that are `late` updates late."""
        return self.on_time or late > 0

    @property
    def kind(self) -> type[UpdateRepair]:
        """The class that repairs an optimizer's updates."""
        module, name = self.place.split(".")
        kind: type[UpdateRepair] = getattr(import_module(f"fxpipe.policy.optimizers.{module}"), name)
        return kind


REPAIRS: dict[str, Repair] = {
    repair.name: repair
    for repair in (
        Repair("ef", "error feedback", "error_feedback.ErrorFeedback", passes=11.0, each=1, once=1),
        Repair("brake", "adaptive braking", "braking.Braking", passes=8.0, on_time=True, shares=True),
    )
}
