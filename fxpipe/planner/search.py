"""Finds the smallest bottleneck over layers of cuts; exact for the given cuts.

Layer k holds the boundaries (f, b, w, r) that may be between worker k−1 and worker k. A plan is a path through the
layers; its bottleneck is the slowest worker on it. One sweep over the layers finds the smallest bottleneck (a shortest
path whose length is its largest edge); among all plans that reach it, a second sweep takes the one with the least
traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fxpipe.planner.candidate_workers import Candidates
from fxpipe.planner.cost_model import CostModel
from fxpipe.planner.sums_over_runs import Floats, Places

EPSILON = 1e-9
"""Relative; two plans that differ by less are equally good. Far below what a clock can measure."""

_CHUNK = 4_000_000  # pairs of cuts looked at at once

Aim = Literal["time", "memory"]
Join = Callable[[Floats, Floats, Floats], Floats]


@dataclass(frozen=True)
class Path:
    """A plan: a row (f, b, w, r) of `cuts` for each of the N + 1 boundaries, and its slowest worker's cost.

    Attributes:
        bottleneck: in milliseconds.
        replicas: of each worker; empty means one each.
    """

    cuts: Places
    bottleneck: float
    replicas: tuple[int, ...] = ()


def least_bottleneck(
    costs: CostModel, layers: Sequence[Places], bound: float, aim: Aim = "time", calm: bool = True
) -> Path | None:
    """The plan through `layers` with the least bottleneck, and among those the one with the least traffic.

    Args:
        layers: for each of the N + 1 boundaries the allowed rows (f, b, w, r), shape (n, 4).
        bound: only plans whose bottleneck is at most this count; a tighter bound makes the search faster.
        aim: 'memory' finds the plan whose fullest worker is least full, in units of its memory, whatever its time.
        calm: whether traffic matters.

    Returns:
        None if no plan reaches the bound.
    """
    best = _sweep(costs, layers, bound * (1 + EPSILON), aim, _slowest)
    if best is None or aim == "memory" or not calm:
        return best
    quiet = _sweep(costs, layers, best.bottleneck * (1 + EPSILON), aim, _total)
    assert quiet is not None
    return Path(quiet.cuts, bottleneck(costs, quiet.cuts))


def bottleneck(costs: CostModel, cuts: Places) -> float:
    """The slowest worker's cost of a plan; inf if it does not fit into memory."""
    return max(float(costs.price(*worker).cost[0]) for worker in workers_of(costs, cuts[None]))


def fullest(costs: CostModel, cuts: Places) -> tuple[float, int]:
    """The fullest worker of a plan: how full it is, in units of its memory, and its number."""
    memory = costs.workers.memory
    full = ((float(costs.memory(k, worker)[0]) / memory[k], k) for k, worker in workers_of(costs, cuts[None]))
    return max(full, key=lambda pair: pair[0])


def workers_of(costs: CostModel, plans: Places) -> Iterator[tuple[int, Candidates]]:
    """The workers of plans, each plan's k-th as a candidate for k, with their numbers.

    Args:
        plans: boundaries (f, b, w, r) of each plan, shape (plans, workers + 1, 4).
    """
    for k in range(plans.shape[1] - 1):
        begin, end = plans[:, k], plans[:, k + 1]
        costs.remember(begin, end)
        yield k, costs.between(begin, end)


def _slowest(so_far: Floats, cost: Floats, traffic: Floats) -> Floats:
    return np.maximum(so_far, cost)


def _total(so_far: Floats, cost: Floats, traffic: Floats) -> Floats:
    return so_far + traffic


def _sweep(costs: CostModel, layers: Sequence[Places], bound: float, aim: Aim, join: Join) -> Path | None:
    """The path with the smallest value, without workers over the bound. `join` adds a worker to a value."""
    value = np.zeros(len(layers[0]))
    came_from: list[
        tuple[NDArray[np.int64], NDArray[np.int64]]
    ] = []  # per layer: the cuts that are reached, and from which
    reached = layers[0]
    for k in range(len(layers) - 1):
        begins, ends = reached, layers[k + 1]
        least = np.full(len(ends), np.inf)
        origin = np.full(len(ends), -1)
        rows = max(1, _CHUNK // max(len(begins), 1))
        for start in range(0, len(ends), rows):
            some = ends[start : start + rows]
            j, i = _possible(costs, k, begins, some, bound, aim)
            if not len(i):
                continue
            costs.remember(begins, some)
            workers = costs.between(begins[i], some[j])
            if aim == "time" and not costs.workers.links.free:
                hopeful = np.flatnonzero(costs.floor(k, workers) <= bound)
                i, j, workers = i[hopeful], j[hopeful], workers.take(hopeful)
            cost, traffic = _priced(costs, k, workers, aim)
            good = cost <= bound
            i, j, cost, traffic = i[good], j[good], cost[good], traffic[good]
            if not len(i):
                continue
            total = join(value[i], cost, traffic)
            order = np.lexsort((total, j))
            first = order[np.concatenate([[True], np.diff(j[order]) > 0])]
            least[start + j[first]] = total[first]
            origin[start + j[first]] = i[first]
        alive = np.flatnonzero(origin >= 0)
        if not len(alive):
            return None
        came_from.append((alive, origin[alive]))
        reached, value = ends[alive], least[alive]
    at = int(np.argmin(value))
    best = float(value[at])
    path = []
    for k in range(len(layers) - 1, 0, -1):
        chosen, origins = came_from[k - 1]
        path.append(layers[k][chosen[at]])
        at = int(origins[at])
    path.append(layers[0][at])
    return Path(np.array(path[::-1]), best)


def _possible(
    costs: CostModel, worker: int, begins: Places, ends: Places, bound: float, aim: Aim
) -> tuple[Places, Places]:
    """Pairs (row of ends, row of begins): no end is before its begin, and computation alone is within the bound."""
    good = np.ones((len(ends), len(begins)), dtype=bool)
    for chain in range(3):
        good &= ends[:, chain, None] >= begins[None, :, chain]
    if aim == "time":
        good &= costs.load(ends)[:, None] - costs.load(begins)[None, :] <= bound * costs.workers.rates[worker]
    j, i = np.nonzero(good)
    return j, i


def _priced(costs: CostModel, worker: int, of: Candidates, aim: Aim) -> tuple[Floats, Floats]:
    """Cost and traffic of workers. Traffic is milliseconds on the wires, and next to nothing for a mismatched unit."""
    if aim == "memory":
        memory = costs.memory(worker, of) / costs.workers.memory[worker]
        return memory, memory
    prices = costs.price(worker, of)
    apart = np.abs(of.ends[:, 0] - of.ends[:, 1]) + np.abs(of.ends[:, 0] - of.ends[:, 2])
    return prices.cost, prices.wire + prices.waits + 1e-9 * apart
