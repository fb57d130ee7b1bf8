"""Branches of a model: units in a row that read nothing of those before them, so that workers can run both at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from fxpipe.planner.balance import same_cuts
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.profile import Profile
from fxpipe.planner.sums_over_runs import Floats, prefix
from fxpipe.schedule.graph import Graph, graph_of

SIGNIFICANT = 0.5
"""The least work of a branch, as a share of what one worker has on average, for which a cut at its border counts."""


def graph_of_cuts(profile: Profile, cuts: Cuts) -> Graph:
    """The graph of the workers of a partition: who reads what others make. () for the chain."""
    forward, backward, weights = (
        np.searchsorted(np.array(bounds), np.arange(cuts.forward[-1]), side="right") - 1
        for bounds in (cuts.forward, cuts.backward, cuts.weights)
    )
    reads, fed, sums = profile.reads
    makes = np.flatnonzero([unit.weight_ms > 0 for unit in profile.units])
    orders = np.concatenate([forward[reads], backward[sums], np.stack([weights[makes], backward[makes]], axis=1)])
    edges = {(int(a), int(b)) for a, b in np.unique(orders, axis=0) if a < b}
    return graph_of(edges, {int(k) for k in np.unique(forward[fed])}, cuts.workers)


def borders(profile: Profile, workers: int) -> tuple[int, ...]:
    """The positions between two branches that are worth workers of their own.

    The unit before such a position is not read by the units from there on, as far as the later branch goes; and the
    first of these reads none of the earlier branch. Both do at least `SIGNIFICANT` of a worker's average work.
    """
    count = len(profile.units)
    if not 1 < workers <= count:
        return ()
    work = _work(profile)
    least = SIGNIFICANT * work[-1] / workers
    sources: list[list[int]] = [[] for _ in range(count)]
    for source, reader in profile.reads[0].tolist():
        sources[reader].append(source)
    needs: list[int] = []  # bit i: unit i, directly or not
    for reader in range(count):
        all_sources = 0
        for source in sources[reader]:
            all_sources |= needs[source] | (1 << source)
        needs.append(all_sources)
    places = []
    for place in range(1, count):
        before = needs[place]
        if before >> (place - 1) & 1 or place in profile.uncut:
            continue
        first = before.bit_length()  # of the earlier branch: after all that the later one needs
        end = next((i for i in range(place, count) if needs[i] >> (place - 1) & 1), count)
        if min(work[place] - work[first], work[end] - work[place]) >= least:
            places.append(place)
    return tuple(places)


def cut_at(profile: Profile, places: Sequence[int], cuts: Cuts) -> Iterator[Cuts]:
    """Cuts at borders between branches: given ones that are moved there, and workers shared out among the branches."""
    work, workers = _work(profile), cuts.workers
    moved = list(zip(cuts.forward, cuts.backward, cuts.weights, strict=True))
    for place in places:
        near = min(range(1, workers), key=lambda k: abs(work[moved[k][0]] - work[place]))
        moved[near] = (place, place, place)
    if all(a <= b for one, other in pairwise(moved) for a, b in zip(one, other, strict=True)):
        forward, backward, weights = zip(*moved, strict=True)
        yield Cuts(forward, backward, weights)
    parts = list(pairwise((0, *places, len(profile.units))))
    if len(parts) > workers:
        return
    counts = [1] * len(parts)
    for _ in range(workers - len(parts)):
        fullest = max(range(len(parts)), key=lambda i: (work[parts[i][1]] - work[parts[i][0]]) / counts[i])
        counts[fullest] += 1
    at = [0]
    for (first, end), number in zip(parts, counts, strict=True):
        units = profile.units[first:end]
        backwards = [unit.backward_ms + unit.weight_ms for unit in units]
        balanced = same_cuts([unit.forward_ms for unit in units], [backwards] * number, [1.0] * number)
        at += [first + place for place in balanced.forward[1:]]
    if not profile.uncut.keys() & {*at}:
        yield Cuts(tuple(at), tuple(at))


def _work(profile: Profile) -> Floats:
    """Milliseconds of the units before each position."""
    return prefix([unit.forward_ms + unit.backward_ms + unit.weight_ms for unit in profile.units])
