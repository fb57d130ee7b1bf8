"""Machines: which processes share one, and the faster links within it."""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.errors import CutError
from fxpipe.planner.links import Links


@dataclass(frozen=True)
class Machines:
    """Machines of equal size. Processes are numbered, and fill one after another.

    Attributes:
        size: the processes of a machine.
        inner: links between them. What leaves a machine goes over one link that they share.
    """

    size: int
    inner: Links

    def __post_init__(self) -> None:
        if self.size < 1:
            raise CutError("a machine has at least one process")
        if isinstance(self.inner.bandwidth, tuple) or isinstance(self.inner.latency, tuple):
            raise CutError("the links within a machine have one bandwidth and one latency")

    def counts(self, first: int, count: int) -> tuple[int, ...]:
        """How many of the processes [first, first + count) each machine has, of those that have any."""
        end = first + count
        machines = range(first // self.size, (end - 1) // self.size + 1)
        return tuple(min(end, (m + 1) * self.size) - max(first, m * self.size) for m in machines)
