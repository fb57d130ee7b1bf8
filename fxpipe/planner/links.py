"""Links: what a message from one worker to another costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fxpipe.errors import ProfileError


@dataclass(frozen=True)
class Links:
    """The links between all pairs of workers. Each direction of a link carries one message at a time.

    Attributes:
        bandwidth: bytes per second; one number for all links, or a matrix with a row for each sender and a column for
            each receiver. `inf` costs nothing.
        latency: seconds from the end of a message at the sender to its arrival; a number or such a matrix.
        copy: seconds per byte for which a message keeps the processor at each end busy (a GPU's copy engines: 0; gloo
            on CPUs: about 0.3 ns).

    Raises:
        ProfileError: a bandwidth is not above 0, or a time is negative or infinite; names every such link.
    """

    bandwidth: float | tuple[tuple[float, ...], ...] = float("inf")
    latency: float | tuple[tuple[float, ...], ...] = 0.0
    copy: float = 0.0

    def __post_init__(self) -> None:
        problems = [f"a bandwidth of {v} bytes a second{of}" for of, v in _each(self.bandwidth) if not v > 0]
        problems += [f"a latency of {v} s{of}" for of, v in _each(self.latency) if not 0 <= v < float("inf")]
        problems += [] if 0 <= self.copy < float("inf") else [f"{self.copy} s a byte to copy"]
        if problems:
            raise ProfileError(f"links cannot have {'; '.join(problems)}")

    @property
    def free(self) -> bool:
        """Whether messages cost nothing at all."""
        return self == Links()

    def bandwidth_of(self, source: int, target: int) -> float:
        """Bytes per second from one worker to another."""
        return _entry(self.bandwidth, source, target)

    def latency_of(self, source: int, target: int) -> float:
        """Seconds from one worker to another."""
        return _entry(self.latency, source, target)

    def seconds(self, source: int, target: int, size: float) -> float:
        """How long a message of `size` bytes occupies its direction of the link, without the latency."""
        return size / self.bandwidth_of(source, target)

    def slower(self, share: float) -> Links:
        """The same links with this share of their bandwidth."""
        rows = self.bandwidth if isinstance(self.bandwidth, tuple) else ((self.bandwidth,),)
        less = tuple(tuple(share * rate for rate in row) for row in rows)
        return replace(self, bandwidth=less if isinstance(self.bandwidth, tuple) else less[0][0])

    def slowest(self, count: int) -> tuple[float, float]:
        """The least bandwidth and the greatest latency between any two of `count` workers; of one, to itself."""
        pairs = [(a, b) for a in range(count) for b in range(count) if a != b] or [(0, 0)]
        return min(self.bandwidth_of(*pair) for pair in pairs), max(self.latency_of(*pair) for pair in pairs)

    def on(self, placement: Sequence[int]) -> Links:
        """The links between workers, if `self` has those between their ranks; within a rank, messages are free.

        Args:
            placement: the rank of each worker.
        """
        if list(placement) == list(range(len(placement))):
            return self

        def between(of: Callable[[int, int], float], within: float) -> tuple[tuple[float, ...], ...]:
            return tuple(tuple(within if a == b else of(a, b) for b in placement) for a in placement)

        return Links(between(self.bandwidth_of, float("inf")), between(self.latency_of, 0.0), self.copy)

    def to_row(self) -> dict[str, Any]:
        """For JSON, which has no infinity: numbers as text, except `copy`."""
        return {"bandwidth": _written(self.bandwidth), "latency": _written(self.latency), "copy": self.copy}

    def check(self, workers: int) -> None:
        """Raise ProfileError unless every matrix has a row and a column for each worker."""
        for name, value in (("bandwidth", self.bandwidth), ("latency", self.latency)):
            if isinstance(value, tuple) and (len(value) != workers or any(len(row) != workers for row in value)):
                shape = f"{len(value)}×{'/'.join(sorted({str(len(row)) for row in value}))}"
                raise ProfileError(
                    f"the {name} matrix of the links is {shape}, for {workers} workers it must be {workers}×{workers}"
                )


def matrix(rows: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """Rows as the tuples that `Links` takes."""
    return tuple(tuple(float(v) for v in row) for row in rows)


def _each(value: float | tuple[tuple[float, ...], ...]) -> Iterator[tuple[str, float]]:
    """Every number, after its link in words; without the diagonal, since no worker sends to itself."""
    if not isinstance(value, tuple):
        yield "", value
        return
    for i, row in enumerate(value):
        yield from ((f" from worker {i} to {j}", v) for j, v in enumerate(row) if i != j)


def _entry(value: float | tuple[tuple[float, ...], ...], source: int, target: int) -> float:
    return value[source][target] if isinstance(value, tuple) else value


def _written(value: float | tuple[tuple[float, ...], ...]) -> Any:
    return [list(map(str, row)) for row in value] if isinstance(value, tuple) else str(value)


GLOO_LOOPBACK = Links(bandwidth=3e9, latency=50e-6, copy=0.33e-9)
"""The default for processes of one machine over gloo: 0.35 ms for 1 MiB."""

NCCL_NODE = Links(bandwidth=20e9, latency=10e-6)
"""The default for CUDA devices of one machine: the rate of PCIe; NVLink is faster."""
