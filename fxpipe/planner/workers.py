"""The workers that a profile is planned for, and the machines that they are on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

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
"""Whether backwards compute forward values again: never, where memory is short, or as much as possible."""


@dataclass(frozen=True)
class Machines:
    """Machines of equal size, which the processes fill in the order of their numbers.

    Attributes:
        size: the processes of a machine.
        inner: the links between them. Messages that leave a machine go over one link that they share.
    """

    size: int
    inner: Links

    def __post_init__(self) -> None:
        if self.size < 1:
            raise CutError(f"a machine must have at least one process, not {self.size}")
        if isinstance(self.inner.bandwidth, tuple) or isinstance(self.inner.latency, tuple):
            raise CutError("links within a machine must have one bandwidth and one latency, not a matrix")

    def counts(self, first: int, count: int) -> tuple[int, ...]:
        """How many of the processes [first, first + count) each machine has, of those that have any."""
        end = first + count
        machines = range(first // self.size, (end - 1) // self.size + 1)
        return tuple(min(end, (m + 1) * self.size) - max(first, m * self.size) for m in machines)


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What all workers share, however many there are.

    Attributes:
        links: between workers; with `machines`, between these.
        microbatches: per minibatch; updates and weight copies come once for all of them.
        ratios: how many bytes travel for each byte, where codecs pack values.
        recompute: what backwards may compute again to save memory.
        dp: how many copies of the pipeline train together, each on its own microbatches; gradients are added up over
            the copies of a worker.
        machines: the machines of the processes, numbered from worker 0's first on.
        evenly: whether replicas count as sharing microbatches evenly, even if their number does not divide them.
    """

    links: Links = field(default_factory=Links)
    microbatches: int = 1
    ratios: Ratios = field(default_factory=Ratios)
    recompute: Recomputation = "none"
    dp: int = 1
    machines: Machines | None = None
    evenly: bool = False

    @property
    def shared(self) -> dict[str, Any]:
        """These, by name."""
        return {each.name: getattr(self, each.name) for each in fields(Conditions)}


@dataclass(frozen=True)
class Workers(Conditions):
    """The workers that a profile is planned for; by default plain `async` on equal workers without limits.

    Attributes:
        count: how many there are.
        speeds: relative to the device that was measured.
        memory: bytes of each; inf for no limit.
        in_flight: the most microbatches that each worker holds; empty means N−k (1F1B).
        deferred: the most of these that are between B and W at once, if W is separate; empty means none.
        owned_factor: bytes of memory for each byte of an owned weight, by worker: weight, gradient, optimizer state, …
        owned_ms: milliseconds at speed 1 for each byte of an owned weight, by worker, once a minibatch: what the policy
            does to it in addition to the optimizer's update.
        replicas: processes of each worker, which do its microbatches in turn; empty means one each. Speeds and memory
            are those of each process, and `in_flight` and `deferred` count what one process holds.
        in_flight_before: the most microbatches for which a process holds what the worker before it saved; empty means
            as many as that worker holds.
    """

    count: int
    speeds: tuple[float, ...] = ()
    memory: tuple[float, ...] = ()
    in_flight: tuple[int, ...] = ()
    owned_factor: tuple[float, ...] = ()
    owned_ms: tuple[float, ...] = ()
    deferred: tuple[int, ...] = ()
    replicas: tuple[int, ...] = ()
    in_flight_before: tuple[int, ...] = ()

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
            values = getattr(self, name) or default
            if len(values) != n:
                raise CutError(f"there are {len(values)} values of {name} for {n} workers")
            object.__setattr__(self, name, tuple(values))
        if not self.in_flight_before:
            object.__setattr__(self, "in_flight_before", (self.in_flight[0], *self.in_flight[:-1]))
        if self.replicas:
            self._check_replicas()
        if not all(0 < speed < float("inf") for speed in self.speeds):
            raise CutError("every worker needs a speed above zero", hint="1 is the device that was measured")
        if not all(memory > 0 for memory in self.memory):
            raise CutError("every worker needs some memory")
        if self.microbatches < 1:
            raise CutError("a minibatch must have at least one microbatch")
        self.links.check(n)

    def _check_replicas(self) -> None:
        if len(self.replicas) != self.count or min(self.replicas) < 1:
            raise CutError(
                f"there are {len(self.replicas)} numbers of replicas for {self.count} workers",
                hint="give one number above 0 for each worker",
            )
        matrices = isinstance(self.links.bandwidth, tuple) or isinstance(self.links.latency, tuple)
        if matrices and self.processes > self.count:
            raise CutError("with a matrix of links, every worker must have one replica", hint="give one bandwidth")

    @property
    def processes(self) -> int:
        """How many processes all workers have: one each, or their replicas."""
        return sum(self.replicas) if self.replicas else self.count

    def replicas_of(self, worker: int) -> int:
        """The processes of a worker."""
        return self.replicas[worker] if self.replicas else 1

    def own_microbatches(self, worker: int) -> float:
        """How many of a minibatch's microbatches the busiest of its processes does."""
        share = self.microbatches / self.replicas_of(worker)
        return share if self.evenly else math.ceil(share)

    @property
    def rates(self) -> tuple[float, ...]:
        """The speed of each worker: of all its processes together."""
        return tuple(
            speed * self.microbatches / self.own_microbatches(k) if self.replicas else speed
            for k, speed in enumerate(self.speeds)
        )
