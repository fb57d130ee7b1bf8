"""The cuts: which worker runs which units in forward, in backward and for weight gradients."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from fxpipe.errors import CutError
from fxpipe.plan.plan import Plan
from fxpipe.plan.spec import Phase


@dataclass(frozen=True)
class Cuts:
    """The cuts: stage k runs F of units [forward[k], forward[k+1]), and likewise B by `backward` and W by `weights`.

    W are the backward nodes that only make weight gradients; an empty `weights` means the same as `backward`. Each
    starts with 0, never falls, and ends with the number of units; a stage with [n, n) does nothing of that kind.

    Attributes:
        recompute: (worker, first, end): that worker's backward computes forward units [first, end) again from what
            enters them, instead of receiving what they saved. Units whose forward it runs itself do not count.

    Raises:
        CutError: the cuts break these rules, or W of a unit is on a later worker than its B. A worker's W runs inside
            its B action, and B actions run from the last worker to the first: W would come before the gradient that it
            reads.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    weights: tuple[int, ...] = ()
    recompute: tuple[tuple[int, int, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.weights:
            object.__setattr__(self, "weights", self.backward)
        count = self.forward[-1] if self.forward else 0
        needed = max(len(self.forward), 2)
        for name, cuts in (("forward", self.forward), ("backward", self.backward), ("weights", self.weights)):
            if len(cuts) != needed:
                raise CutError(f"{name} cuts {cuts} must have {needed} positions, one more than there are workers")
            if cuts[0] != 0 or cuts[-1] != count or list(cuts) != sorted(cuts):
                raise CutError(f"{name} cuts {cuts} must start with 0, never fall, and end with {count} units")
        for k, (backward, weights) in enumerate(zip(self.backward, self.weights, strict=True)):
            if weights < backward:
                raise CutError(
                    f"weight gradients of unit {weights} are on worker {k}, after their backward on worker {k - 1}",
                    hint="put a cut of weight gradients at the backward's cut or at a later unit",
                )
        for worker, first, end in self.recompute:
            if not (0 <= worker < self.workers and 0 <= first <= end <= count):
                raise CutError(
                    f"worker {worker} cannot compute units {first} to {end - 1} again: there are {self.workers} "
                    f"workers and {count} units"
                )

    @classmethod
    def of(cls, plan: Plan) -> Cuts:
        """The cuts of a plan, which does not say what is recomputed."""
        kinds = zip(*((s.forward_units, s.backward_units, s.weight_units) for s in plan.stages), strict=True)
        forward, backward, weights = ((*(first for first, _ in kind), kind[-1][1]) for kind in kinds)
        return cls(forward, backward, weights)

    @property
    def workers(self) -> int:
        return len(self.forward) - 1

    def worker(self, phase: Phase, unit: int, weight: bool = False) -> int:
        """The worker of a unit's forward or backward; with `weight`, of its separate weight gradients."""
        bounds = self.forward if phase == "F" else self.weights if weight else self.backward
        return bisect_right(bounds, unit) - 1

    def recomputes(self, worker: int, unit: int) -> bool:
        """Whether that worker's backward computes the unit's forward again."""
        return any(w == worker and first <= unit < end for w, first, end in self.recompute)
