"""The cost model of PipeDream's released optimizer, for a chain of units, and the best configuration in it.

A stage of units [i, j) with m replicas takes (compute + 4 (m − 1)/m · weight bytes/bandwidth)/m for each minibatch; the
messages before a stage take 2 · activation bytes/(bandwidth · m), which the program ignores unless it is asked
(`optimizer_graph_hierarchical.py`, github.com/msr-fiddle/pipedream). This is one level: all processes are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import inf

import numpy as np
from numpy.typing import NDArray

from fxpipe.planner.profile import Profile
from fxpipe.planner.sums_over_runs import Crossing, prefix

Found = tuple[float, tuple[tuple[int, int], ...]]
"""Seconds of a minibatch, and each stage's end and replicas."""


@dataclass(frozen=True)
class Chain:
    """Compute of [i, j) in seconds, bytes of weights up to each position, and bytes of activations across it."""

    compute: NDArray[np.float64]
    weights: NDArray[np.float64]
    crossing: NDArray[np.float64]

    @staticmethod
    def of(profile: Profile) -> Chain:
        """That of a profile's units, in its order."""
        work = prefix([1e-3 * (u.forward_ms + u.backward_ms + u.weight_ms) for u in profile.units])
        compute = np.maximum(work[None, :] - work[:, None], 0.0)
        values = Crossing(len(profile.units), [(v.bytes, v.producer, v.readers) for v in profile.activations])
        return Chain(compute, prefix([u.parameter_bytes for u in profile.units]), values.total())


def best(
    chain: Chain,
    processes: int,
    bandwidth: float,
    *,
    replicas: Sequence[int] = (),
    activations: bool = False,
) -> Found:
    """The configuration with the least bottleneck for exactly so many processes, or the best cuts for given replicas.

    Args:
        activations: whether messages between stages count.
    """
    count = len(chain.weights) - 1

    def stage(i: int, j: int, m: int) -> float:
        sums = 4 * (m - 1) / m * (chain.weights[j] - chain.weights[i]) / bandwidth
        found = (chain.compute[i, j] + sums) / m
        if activations and i:
            found = max(found, 2 * chain.crossing[i] / (bandwidth * m))
        return float(found)

    @cache
    def prefixes(j: int, left: int) -> Found:
        """The best of units [0, j) on `left` processes, or on the first `left` stages of the given replicas."""
        allowed = (replicas[left - 1],) if replicas else range(1, left + 1)
        found: Found = (inf, ())
        for m in allowed:
            rest = left - 1 if replicas else left - m
            if rest == 0:
                found = min(found, (stage(0, j, m), ((j, m),)))
                continue
            for i in range(1, j):
                last = stage(i, j, m)
                if last < found[0]:
                    before, stages = prefixes(i, rest)
                    found = min(found, (max(before, last), (*stages, (j, m))))
        return found

    return prefixes(count, len(replicas) or processes)
