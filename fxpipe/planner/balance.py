"""Cuts that minimise the slowest worker's time, with shared or separate cuts for forward and backward.

Model: worker k takes (ΣF of its forward units + ΣB_k of its backward units) / speed_k per microbatch, and communication
is free. A unit's backward may take a different time on each worker, as its policy's work on weights differs. Both
results are optimal in this model: bisection finds the bottleneck as exactly as it matters, and whether a bottleneck is
possible depends only on how far the first k workers can reach.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fxpipe.errors import CutError
from fxpipe.planner.sums_over_runs import Floats, Maximum, Places, prefix

_TOLERANCE = 1e-10  # relative; far below what a clock can measure

Backwards = Sequence[Sequence[float]]
"""For each worker, the time of every unit's backward; equal workers may share one sequence."""


@dataclass(frozen=True)
class BalancedCuts:
    """Cuts, which begin with 0 and end with the number of units, and the slowest worker's time."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    bottleneck: float


def worker_loads(
    forward: Sequence[float], backward: Backwards, balance: BalancedCuts, speeds: Sequence[float]
) -> list[float]:
    """The time of every worker with these cuts."""
    f, sums = prefix(forward), _prefixes(backward)
    return [
        float(f[balance.forward[k + 1]] - f[balance.forward[k]] + b[balance.backward[k + 1]] - b[balance.backward[k]])
        / speed
        for k, (b, speed) in enumerate(zip(sums, speeds, strict=True))
    ]


def same_cuts(forward: Sequence[float], backward: Backwards, speeds: Sequence[float]) -> BalancedCuts:
    """The best contiguous cuts that forward and backward share, as in PipeDream."""
    _check(len(forward), speeds)
    f = prefix(forward)
    totals = [f + b for b in _prefixes(backward)]

    def cuts(limit: float) -> tuple[int, ...] | None:
        places = [0]
        for total, speed in zip(totals, speeds, strict=True):
            reached = total[places[-1]] + limit * speed * (1 + _TOLERANCE)
            places.append(int(np.searchsorted(total, reached, side="right")) - 1)
        return tuple(places) if places[-1] == len(f) - 1 else None

    alone = min(float(total[-1]) / speed for total, speed in zip(totals, speeds, strict=True))
    limit = _bisect(lambda t: cuts(t) is not None, _shared_out(forward, backward, speeds), alone)
    found = cuts(limit)
    assert found is not None
    return _measured(forward, backward, BalancedCuts(found, found, 0.0), speeds)


def bidirectional_cuts(forward: Sequence[float], backward: Backwards, speeds: Sequence[float]) -> BalancedCuts:
    """The best contiguous cuts, independent for forward and backward (Bi-Partition).

    For a bottleneck T, let b_k(f) be the furthest backward cut that the first k workers can reach with their forward
    cut at f. Further is never worse for the later workers, so b_k is all that matters of the first k:

        b_k+1(f') = the furthest b with PB[b] ≤ max over f ≤ f', PF[f'] − PF[f] ≤ T of (PB[b_k(f)] + PF[f]) + T − PF[f']

    PF and PB are prefix sums of F, and of B on worker k + 1. The maximum over a sliding window takes O(U log U) per
    worker. T is feasible if b_N(U) = U.

    Time: O(N·U·log U) for each of about thirty bisection steps; 10,000 units and 64 workers take a few seconds.
    """
    _check(len(forward), speeds)
    f, b = prefix(forward), _prefixes(backward)
    shared = same_cuts(forward, backward, speeds).bottleneck
    low = _shared_out(forward, backward, speeds)
    limit = _bisect(lambda t: _reach(f, b, speeds, t)[-1][-1] == len(f) - 1, low, shared)
    reach = _reach(f, b, speeds, limit)
    cuts = [(len(f) - 1, len(f) - 1)]
    for k in range(len(speeds) - 1, -1, -1):
        at, back = cuts[-1]
        before = _came_from(f, b[k], reach[k], at, back, limit * speeds[k] * (1 + 2 * _TOLERANCE))
        cuts.append((before, min(int(reach[k][before]), back)))
    cuts.reverse()
    balanced = BalancedCuts(tuple(c[0] for c in cuts), tuple(c[1] for c in cuts), 0.0)
    return _measured(forward, backward, balanced, speeds)


def _prefixes(backward: Backwards) -> list[Floats]:
    sums = {id(each): prefix(each) for each in backward}
    return [sums[id(each)] for each in backward]


def _shared_out(forward: Sequence[float], backward: Backwards, speeds: Sequence[float]) -> float:
    """A bottleneck that no cuts can beat: every unit where it takes least time, and all workers always busy."""
    least = np.min([*{id(each): each for each in backward}.values()], axis=0)
    return float(sum(forward) + least.sum()) / sum(speeds)


def _check(units: int, speeds: Sequence[float]) -> None:
    if not units:
        raise CutError("there are no units to cut")
    if not speeds or min(speeds) <= 0:
        raise CutError("every worker needs a speed above zero", hint="1 is the device that was measured")


def _bisect(feasible: Callable[[float], bool], low: float, high: float) -> float:
    """The smallest feasible bottleneck; `high` is feasible, nothing below `low` is."""
    while high - low > _TOLERANCE * high:
        middle = (low + high) / 2
        if feasible(middle):
            high = middle
        else:
            low = middle
    return high


def _reach(f: Floats, backwards: Sequence[Floats], speeds: Sequence[float], limit: float) -> list[Places]:
    """For 0 to N workers, the furthest backward cut that they reach for each forward cut; −1 if impossible."""
    places = np.arange(len(f))
    reach = np.full(len(f), -1)
    reach[0] = 0
    reaches = [reach]
    for b, speed in zip(backwards, speeds, strict=True):
        time = limit * speed * (1 + _TOLERANCE)
        value = np.where(reach >= 0, b[np.maximum(reach, 0)] + f, -np.inf)
        first = np.minimum(np.searchsorted(f, f - time, side="left"), places)
        best = Maximum(value).over((first, places + 1))
        furthest = np.searchsorted(b, best + time - f, side="right") - 1
        reach = np.where(np.isfinite(best), np.minimum(furthest, len(b) - 1), -1)
        reaches.append(reach)
    return reaches


def _came_from(f: Floats, b: Floats, reach: Places, at: int, back: int, time: float) -> int:
    """A forward cut from which the next worker reaches `at` in forward and `back` in backward within `time`."""
    candidates = np.arange(at + 1)
    start = reach[: at + 1]
    load = f[at] - f[candidates] + np.maximum(b[back] - b[np.maximum(start, 0)], 0.0)
    load = np.where(start >= 0, load, np.inf)
    best = int(np.argmin(load))
    assert load[best] <= time * (1 + _TOLERANCE)
    return best


def _measured(
    forward: Sequence[float], backward: Backwards, cuts: BalancedCuts, speeds: Sequence[float]
) -> BalancedCuts:
    return replace(cuts, bottleneck=max(worker_loads(forward, backward, cuts, speeds)))
