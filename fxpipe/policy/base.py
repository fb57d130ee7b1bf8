"""A policy: which weights each forward and each backward sees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from fxpipe.errors import PolicyError
from fxpipe.plan import Phase
from fxpipe.schedule.base import Schedule


@dataclass(frozen=True)
class Policy(ABC):
    """Which weights each forward and each backward sees.

    The schedule says which version of an owner's weights a pass can have (`schedule.Versions`); the policy
    says what is made of it. The same question is asked for a worker's own weights and for replicas.

    Attributes:
        name: what the command line calls it.
        backward_keeps_forward: a backward reads the very tensors that its forward read.
        needs_prediction: some pass sees predicted weights.
    """

    name: ClassVar[str]
    backward_keeps_forward: ClassVar[bool] = False
    needs_prediction: ClassVar[bool] = False

    @abstractmethod
    def ahead(self, *, phase: Phase, minibatch: int, version: int, owner: int, workers: int) -> int:
        """How many updates past `version` to predict `owner`'s weights for that pass of `minibatch`; ≥ 0."""

    def check(self, schedule: Schedule) -> None:
        """Refuse a schedule with which this policy makes no sense.

        Raises:
            PolicyError: with the reason.
        """
        if schedule.synchronous:
            raise PolicyError(
                f"policy '{self.name}' makes no sense with schedule '{schedule.name}': "
                "it updates after a flush, so no pass ever sees stale weights",
                hint="policy latest, or schedule async",
            )
