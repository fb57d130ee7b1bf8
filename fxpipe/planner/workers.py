"""The workers that a profile is planned for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fxpipe.errors import CutError
from fxpipe.planner.links import Links


@dataclass(frozen=True)
class Ratios:
    """How many bytes travel for each byte of a value, by its kind: below 1 where a codec packs it."""

    activation: float = 1.0
    gradient: float = 1.0
    saved: float = 1.0
    weights: float = 1.0


Recomputation = Literal["none", "auto", "full"]
"""Whether backwards compute forward values again to save memory: never, where it is short, or all they can."""


@dataclass(frozen=True)
class Workers:
    """The workers that a profile is planned for; by default plain `async` on equal workers without limits.

    Attributes:
        count: how many.
        speeds: relative to the device that was measured.
        memory: bytes of each; inf for no limit.
        links: between them.
        microbatches: per minibatch; updates and weight copies come once for all of them.
        in_flight: the most microbatches that each worker holds; None means N−k (1F1B).
        deferred: of these, the most that are between B and W at once, where W is apart; empty means none.
        recompute: what their backwards may compute again to save memory.
        owned_factor: bytes of memory for each byte of an owned weight, by worker: weight, gradient, optimizer state, …
        owned_ms: milliseconds at speed 1 for each byte of an owned weight, by worker, once a minibatch: what the policy
            does to it beside the optimizer's update.
        copy_factor: bytes of memory for each byte of a weight copy.
        ratios: of what travels.
    """

    count: int
    speeds: tuple[float, ...] = ()
    memory: tuple[float, ...] = ()
    links: Links = field(default_factory=Links)
    microbatches: int = 1
    in_flight: tuple[int, ...] = ()
    owned_factor: tuple[float, ...] = ()
    owned_ms: tuple[float, ...] = ()
    copy_factor: float = 1.0
    ratios: Ratios = field(default_factory=Ratios)
    deferred: tuple[int, ...] = ()
    recompute: Recomputation = "none"

    def __post_init__(self) -> None:
        if self.count < 1:
            raise CutError("there must be at least one worker")
        n = self.count
        defaults = {
            "speeds": (1.0,) * n,
            "memory": (float("inf"),) * n,
            "in_flight": tuple(n - k for k in range(n)),
            "owned_factor": (3.0,) * n,
            "owned_ms": (0.0,) * n,
            "deferred": (0,) * n,
        }
        for name, default in defaults.items():
            given = getattr(self, name) or default
            if len(given) != n:
                raise CutError(f"{len(given)} values of {name} for {n} workers")
            object.__setattr__(self, name, tuple(given))
        if not all(0 < speed < float("inf") for speed in self.speeds):
            raise CutError("every worker needs a speed above zero", hint="1 is the device that was measured")
        if not all(memory > 0 for memory in self.memory):
            raise CutError("every worker needs some memory")
        if self.microbatches < 1:
            raise CutError("a minibatch has at least one microbatch")
        self.links.check(n)
        for k, other in ((i, j) for i in range(n) for j in (i - 1, i + 1) if 0 <= j < n):
            rate, latency = self.links.bandwidth_of(k, other), self.links.latency_of(k, other)
            if not (rate > 0 and 0 <= latency < float("inf") and 0 <= self.links.copy < float("inf")):
                raise CutError(
                    f"the link from worker {k} to {other} has {rate} bytes a second and {latency} s of latency"
                )
