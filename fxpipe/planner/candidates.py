"""The cuts that a search considers: all that a best plan may have, or windows around a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fxpipe.planner.cost_model import CostModel
from fxpipe.planner.search import EPSILON
from fxpipe.planner.sums_over_runs import Crossing, Places

MODES = ("same", "bidirectional", "three-way")

PINNED = "pinned"
"""The mode of cuts that were given."""

WORTH = 2e-4
"""An improvement by a smaller share is not worth another round."""


@dataclass(frozen=True)
class Positions:
    """The positions where each chain may be cut, in rising order; 0 and the end are always among them."""

    forward: Places
    backward: Places
    weight: Places

    @property
    def shared(self) -> Places:
        """The positions where all chains may be cut at once."""
        return np.intersect1d(self.forward, self.backward)


def positions(costs: CostModel, mode: str) -> Positions:
    """All positions except forbidden and dominated ones.

    A free unit (it computes, saves and owns nothing) can go to either side of a cut. The position on one side of it
    dominates the position on the other side if every worker that begins or ends there would receive no more. The
    dominated position is dropped; the best plan is still among the rest.
    """
    count = costs.count
    every = np.arange(count + 1)
    free = np.array([u.free for u in costs.profile.units])
    forward = np.setdiff1d(every, np.array(sorted(costs.profile.uncut), dtype=np.int64))
    backward = every
    if mode != "same":  # a shared position serves both chains, so that both would have to drop it
        forward = np.setdiff1d(forward, _dominated(costs.activations, free, set(forward.tolist())))
        flipped = _dominated(costs.gradients, free[::-1], set(range(count + 1)))
        backward = np.setdiff1d(every, count - flipped)
    weight = backward if mode != "three-way" else _weight_positions(costs)
    return Positions(*(np.union1d(p, [0, count]) for p in (forward, backward, weight)))


def _dominated(chain: Crossing, free: np.ndarray, allowed: set[int]) -> Places:
    """Positions of a chain that the position on the other side of a free unit dominates."""
    dropped: set[int] = set()
    for unit in np.flatnonzero(free):
        p, q = int(unit), int(unit) + 1
        if not {p, q} <= allowed - dropped or p == 0 or q == chain.units:
            continue
        at_p, at_q = chain.open_at(p), chain.open_at(q)
        read = at_p[chain.ends(at_p) == unit]  # what the unit itself reads of earlier units
        columns = np.unique(np.concatenate([chain.ends(at_p), chain.ends(at_q)])) + 1
        rows = chain.table(np.array([p, q]), np.append(columns[columns > q], q + 1))
        if (rows[1] <= rows[0]).all() and (chain.starts(read) >= p - 1).all():
            dropped.add(p)  # after the unit no more crosses, and a worker that ends there receives no more
        elif (rows[0] <= rows[1]).all():
            dropped.add(q)
    return np.array(sorted(dropped), dtype=np.int64)


def _weight_positions(costs: CostModel) -> Places:
    """The positions of W cuts: before every unit that has W; positions between two such units are equivalent."""
    return np.unique(costs.owning.following)


def all_layers(costs: CostModel, where: Positions, mode: str, bound: float, budget: int) -> list[Places] | None:
    """For every boundary, all cuts that a plan within `bound` can have; None if they make more than `budget` pairs.

    The workers before a cut need enough time for the work before it, and those after it for the work after it.
    """
    layers = [np.zeros((1, 4), dtype=np.int64)]
    speeds = np.array(costs.workers.rates)
    total = float(costs.load(np.full((1, 4), costs.count))[0])
    for k in range(1, costs.workers.count):
        most = bound * speeds[:k].sum() * (1 + EPSILON)
        least = total - bound * speeds[k:].sum() * (1 + EPSILON)
        layer = within(costs, where, mode, least, most, budget // max(len(layers[-1]), 1))
        if layer is None:
            return None
        layer = with_choices(costs, layer)
        budget -= len(layer) * len(layers[-1])
        layers.append(layer)
    layers.append(np.array([[costs.count, costs.count, costs.count, 0]]))
    return layers


def within(costs: CostModel, where: Positions, mode: str, least: float, most: float, limit: int) -> Places | None:
    """All cuts with a load between `least` and `most`; None if there are more than `limit`."""
    slack = EPSILON * max(abs(most), 1e-12)
    least, most = least - slack, most + slack
    if mode == "same":
        p = where.shared
        every = np.stack([p, p, p], axis=1)
        load = costs.load(every)
        shared = every[(load >= least) & (load <= most)]
        return shared if len(shared) <= limit else None
    if mode == "bidirectional":
        backward = costs.backward[where.backward] + costs.weight[where.backward]
        pairs = _grid(costs.forward[where.forward], backward, least, most, limit)
        if pairs is None:
            return None
        i, j = pairs
        return np.stack([where.forward[i], where.backward[j], where.backward[j]], axis=1)
    parts, count = [], 0
    for w in where.weight:
        spent = costs.weight[w]
        inner = where.backward[where.backward <= w]
        pairs = _grid(costs.forward[where.forward], costs.backward[inner], least - spent, most - spent, limit - count)
        if pairs is None:
            return None
        i, j = pairs
        parts.append(np.stack([where.forward[i], inner[j], np.full(len(i), w)], axis=1))
        count += len(i)
    return np.concatenate(parts)


def _grid(one: np.ndarray, other: np.ndarray, least: float, most: float, limit: int) -> tuple[Places, Places] | None:
    """Indices of all pairs of two rising sequences whose sum is between `least` and `most`."""
    first = np.searchsorted(other, least - one, side="left")
    last = np.searchsorted(other, most - one, side="right")
    counts = np.maximum(last - first, 0)
    total = int(counts.sum())
    if total > limit:
        return None
    i = np.repeat(np.arange(len(one)), counts)
    j = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    return i, j


def in_turn(
    patterns: Sequence[Sequence[int]], rounds: int, best: Callable[[], float]
) -> Iterator[tuple[int, Sequence[int]]]:
    """Offsets of windows to search, one after the other, until none of them has made the best value better.

    Yields:
        the number of rounds before, and the offsets.
    """
    fruitless = 0
    for turn in range(rounds):
        before = best()
        yield turn, patterns[turn % len(patterns)]
        fruitless = 0 if best() < before * (1 - WORTH) else fruitless + 1
        if fruitless >= len(patterns):
            return


def window(costs: CostModel, where: Positions, mode: str, cuts: Places, offsets: Sequence[int]) -> list[Places]:
    """For every boundary, the cuts whose positions are `offsets` allowed positions away from those of a plan."""
    layers = [cuts[:1]]
    for cut in cuts[1:-1]:
        if mode == "same":
            p = _around(where.shared, int(cut[0]), offsets)
            grid = np.stack([p, p, p], axis=1)
        else:
            f, b = (
                _around(p, int(at), offsets) for p, at in zip((where.forward, where.backward), cut[:2], strict=True)
            )
            if mode == "bidirectional":
                pairs = np.stack(np.meshgrid(f, b, indexing="ij"), axis=-1).reshape(-1, 2)
                grid = np.concatenate([pairs, pairs[:, 1:]], axis=1)
            else:
                w = _around(where.weight, int(cut[2]), offsets)
                grid = np.stack(np.meshgrid(f, b, w, indexing="ij"), axis=-1).reshape(-1, 3)
                grid = grid[grid[:, 2] >= grid[:, 1]]
        layers.append(np.unique(np.concatenate([with_choices(costs, grid), cut[None]]), axis=0))
    layers.append(cuts[-1:])
    return layers


def with_choices(costs: CostModel, cuts: Places) -> Places:
    """Rows (f, b, w) as boundaries, with both choices of recomputation where there is something to choose."""
    sent = np.concatenate([cuts, np.zeros((len(cuts), 1), dtype=np.int64)], axis=1)
    if costs.workers.links.free and not np.isfinite(costs.workers.memory).any():
        return sent
    apart = sent[(sent[:, 0] != sent[:, 1]) | (sent[:, 0] != sent[:, 2])]
    apart[:, 3] = 1
    return np.concatenate([sent, apart])


def _around(allowed: Places, position: int, offsets: Sequence[int]) -> Places:
    at = int(np.searchsorted(allowed, position))
    places = np.clip(at + np.asarray(offsets), 0, len(allowed) - 1)
    return allowed[np.unique(places)]
