"""Partitions: the best cuts of a profile for given workers, by mode, with the cost of each worker.

If only times count, `balance` finds the best shared and the best independent cuts exactly, at any size. In all other
cases, every plan within the bound of a first one is searched (`search`), which is exact too. If there are too many,
windows around the best plan so far are searched until none contains a better one, and the partition says how far from
the optimum it can be at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from fxpipe.errors import CutError
from fxpipe.planner.balance import bidirectional_cuts, same_cuts
from fxpipe.planner.candidate_workers import Candidates
from fxpipe.planner.candidates import MODES, PINNED, Positions, all_layers, in_turn, positions, window
from fxpipe.planner.cost_model import CostModel, Costs
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.profile import Profile
from fxpipe.planner.quantity import size
from fxpipe.planner.search import EPSILON, Path, bottleneck, fullest, least_bottleneck, workers_of
from fxpipe.planner.sums_over_runs import Places
from fxpipe.planner.workers import Workers

BUDGET = 100_000_000  # pairs of cuts that the exact search may look at
MEMORY_BUDGET = 10_000_000  # likewise, if nothing seems to fit into memory
_FINE = range(-4, 5)
_FAR = (-55, -34, -21, -13, -8, -5, -3, -2, -1, 0, 1, 2, 3, 5, 8, 13, 21, 34, 55)
_WIDE = (-377, -233, -144, -89, -34, -8, -1, 0, 1, 8, 34, 89, 144, 233, 377)
_OFFSETS = {
    "same": (tuple(range(-40, 41)), tuple(8 * o for o in _FAR)),
    "bidirectional": (tuple(_FINE), _FAR, _WIDE),
    "three-way": ((-2, -1, 0, 1, 2), (-21, -8, -3, -1, 0, 1, 3, 8, 21), (-89, -34, -13, -1, 0, 1, 13, 34, 89)),
}
ROUNDS = 40


@dataclass(frozen=True)
class Load:
    """What one worker costs per microbatch: seconds, and bytes of memory.

    Attributes:
        forward, backward, weight: F, B and W.
        update: a microbatch's share of the work on weights once a minibatch: the optimizer's step, and the policy's
            prediction and error feedback.
        recompute: forward that is computed again, for mismatched units or to save memory.
        exposed: what communication adds to these; see `cost_model`.
        total: their sum, which is the worker's cost.
        values: the part of `memory` that is kept for its own backward, or computed again there to save memory.
    """

    forward: float
    backward: float
    weight: float
    update: float
    recompute: float
    exposed: float
    total: float
    memory: float
    values: float = 0.0


@dataclass(frozen=True)
class Partition:
    """Where a profile is cut, and what that costs.

    Attributes:
        mode: 'same', 'bidirectional' or 'three-way', or 'pinned' if the cuts were given.
        forward, backward, weights: positions, each with 0 at the start and the number of units at the end.
        recompute: (worker, first unit, end): mismatched units whose forward this worker's backward computes again.
        bottleneck: the slowest worker's cost, in seconds per microbatch.
        ideal: all work divided by the workers' speeds, in seconds.
        lower_bound: no plan of this mode can be faster; equals the bottleneck if the search was exact.
        replicas: processes of each worker; empty means one each. Loads are then shares: what one process does, per
            microbatch of the whole minibatch.
        moved: bytes that workers send each other for a minibatch, without sums over replicas.
        simulated: seconds of a minibatch, if a search of schedules has simulated it.
        again: r of each boundary (`cost_model`), which `recompute` says only of units next to it.
    """

    mode: str
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    weights: tuple[int, ...]
    recompute: tuple[tuple[int, int, int], ...]
    bottleneck: float
    ideal: float
    lower_bound: float
    loads: tuple[Load, ...]
    replicas: tuple[int, ...] = ()
    moved: float = 0.0
    simulated: float | None = None
    again: tuple[int, ...] = field(default=(), compare=False)

    @property
    def cuts(self) -> Cuts:
        """Where it is cut, and what is computed again."""
        return Cuts(self.forward, self.backward, self.weights, self.recompute)

    @property
    def efficiency(self) -> float:
        """Ideal over bottleneck."""
        return self.ideal / self.bottleneck if self.bottleneck else 1.0

    @property
    def exact(self) -> bool:
        """Whether no plan of this mode can be better."""
        return self.lower_bound >= self.bottleneck * (1 - 1e-6)


def partitions(
    profile: Profile,
    workers: Workers,
    modes: Sequence[str] = MODES,
    say: Callable[[str], None] = lambda text: None,
    budget: int = BUDGET,
    rounds: int = ROUNDS,
) -> dict[str, Partition]:
    """The partitions of several modes; each search starts from the results of the narrower ones.

    Args:
        modes: of 'same' (forward, backward and W cut at the same places), 'bidirectional' (W with B) and 'three-way'.
        say: is called with what is being done, for a progress display.
        budget: how many pairs of cuts a proof may look at; if it needs more, the result is bounded, not proved.
        rounds: the most rounds of improvement while a plan is not proved to be the best.

    Raises:
        TooLittleMemory: nothing fits in the widest mode. A mode in which nothing fits is left out if a wider one fits.
    """
    costs = CostModel(profile, workers)
    search = _PartitionSearch(costs, say, budget, rounds)
    best: dict[str, Partition] = {}
    wanted = [mode for mode in MODES if mode in modes]
    for mode in MODES[: MODES.index(wanted[-1]) + 1]:
        try:
            path, bound = search.best(mode)
        except TooLittleMemory:
            if mode == wanted[-1]:
                raise
            continue
        if mode in wanted:
            best[mode] = of_rows(costs, path.cuts, mode, bound)
    return best


def of_cuts(
    profile: Profile, workers: Workers, cuts: Cuts, *, mode: str = PINNED, costs: CostModel | None = None
) -> Partition:
    """What given cuts cost, as a partition. Without a search, only the ideal bounds it.

    Args:
        costs: the model of the profile and the workers, if it exists already.
    """
    return next(of_all_cuts(costs or CostModel(profile, workers), [cuts], mode))


def repriced(profile: Profile, workers: Workers, partition: Partition) -> Partition:
    """What a partition costs for other workers."""
    rows = np.array([partition.forward, partition.backward, partition.weights, partition.again], dtype=np.int64).T
    return of_rows(CostModel(profile, workers), rows, partition.mode)


def of_all_cuts(costs: CostModel, cuts: Sequence[Cuts], mode: str) -> Iterator[Partition]:
    """What each of these cuts costs, as by `of_cuts`; faster than one after the other."""
    if not cuts:
        return
    priced = _PricedPlans(costs, [boundaries(one) for one in cuts])
    for number in range(len(cuts)):
        yield priced.described(number, mode)


def boundaries(cuts: Cuts) -> Places:
    """Cuts as rows (f, b, w, r)."""
    rows = np.array([cuts.forward, cuts.backward, cuts.weights, [0] * len(cuts.forward)], dtype=np.int64).T
    for worker, first, _ in cuts.recompute:
        rows[worker if first < rows[worker, 0] else worker + 1, 3] = 1
    return rows


def of_rows(costs: CostModel, cuts: Places, mode: str, bound: float = 0.0) -> Partition:
    """What boundaries (f, b, w, r), one row each, cost for the workers of the cost model.

    Args:
        bound: what no plan of the mode can beat, in milliseconds; 0: only the ideal is known.
    """
    return _PricedPlans(costs, [cuts]).described(0, mode, bound)


def fits(profile: Profile, workers: Workers) -> bool:
    """Whether shared cuts fit into every worker's memory; this says nothing about time or wider modes."""
    costs = CostModel(profile, workers)
    where = positions(costs, "same")
    return fullest(costs, roomy_shared_cuts(costs, where.shared))[0] <= 1 + EPSILON


class TooLittleMemory(CutError):
    """No plan fits; `share` is the smallest multiple of its memory that the fullest worker would need."""

    def __init__(self, what: str, share: float = 1.0, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what, where=where, hint=hint)
        self.share = share


class _PartitionSearch:
    """Finds the best plan of one mode after another."""

    def __init__(self, costs: CostModel, say: Callable[[str], None], budget: int, rounds: int) -> None:
        self.costs = costs
        self.say = say
        self.budget = budget
        self.rounds = rounds
        self.known: list[Places] = []
        self.known_empty: list[Places] = []  # plans that need little memory, whether or not they fit
        profile, speeds = costs.profile, costs.workers.rates
        forward = [u.forward_ms for u in profile.units]
        backwards = _rest(profile, costs.workers)
        self.same = same_cuts(forward, backwards, speeds)
        say("independent cuts for times alone")
        self.free = bidirectional_cuts(forward, backwards, speeds)
        self.ideal = _ideal_ms(costs)

    def best(self, mode: str) -> tuple[Path, float]:
        """The best plan of a mode, and a bound that no plan of it can beat."""
        costs, where = self.costs, positions(self.costs, mode)
        bound = {"same": self.same.bottleneck, "bidirectional": self.free.bottleneck}.get(mode, self.ideal)
        best = self.fitting(mode, where)
        proved = best.bottleneck <= bound * (1 + EPSILON)
        if not proved:
            best = self._improved(mode, where, best)
        self.say(f"{mode}: proving {best.bottleneck:.3f} ms")
        layers = all_layers(costs, where, mode, best.bottleneck, self.budget // (20 if proved else 1))
        if layers is not None:  # even if it is proved, there may be one with less traffic
            best = least_bottleneck(costs, layers, best.bottleneck) or best
            bound = best.bottleneck
        for cuts in self.known:  # cuts of a narrower mode are simpler, if the wider one gains nothing
            narrow = Path(cuts, bottleneck(costs, cuts))
            if narrow.bottleneck <= best.bottleneck * (1 + EPSILON):
                best = narrow
                break
        self.known.append(best.cuts)
        return best, min(bound, best.bottleneck)

    def _starts(self, mode: str, where: Positions) -> list[Places]:
        """The first plans: those that are best if only times count."""
        if mode == "same":
            at = _snapped(where.shared, self.same.forward)
            return [np.stack([at, at, at, 0 * at], axis=1)]
        starts = []
        for plan in (self.same, self.free):
            at = _snapped(where.backward, plan.backward)
            rows = [_snapped(where.forward, plan.forward), at, at, 0 * at]
            if mode == "three-way":
                rows[2] = np.concatenate([[0], self.costs.owning.following[at[1:]]])
            starts.append(np.stack(rows, axis=1))
        return starts

    def fitting(self, mode: str, where: Positions) -> Path:
        """The best of the first plans; if none fits into memory, one that needs the least.

        Raises:
            TooLittleMemory: even that one does not fit.
        """
        costs = self.costs
        paths = [Path(cuts, bottleneck(costs, cuts)) for cuts in [*self._starts(mode, where), *self.known]]
        best = min(paths, key=lambda path: path.bottleneck)
        if np.isfinite(best.bottleneck):
            return best
        self.say(f"{mode}: looking for cuts that fit into memory")
        shared = roomy_shared_cuts(costs, where.shared)
        candidates = [*(path.cuts for path in paths), shared, *self.known_empty]
        share, cuts = min(((fullest(costs, c)[0], c) for c in candidates), key=lambda pair: pair[0])
        proved = mode == "same" and not costs.repeats
        if share > 1 + EPSILON and not proved:
            layers = all_layers(costs, where, mode, np.inf, MEMORY_BUDGET)
            proved = layers is not None
            layers = layers or window(costs, where, mode, cuts, _OFFSETS[mode][0])
            emptiest = least_bottleneck(costs, layers, share, "memory")
            cuts = cuts if emptiest is None else emptiest.cuts
        self.known_empty.append(cuts)
        share, worker = fullest(costs, cuts)
        if share > 1 + EPSILON:
            memory = costs.workers.memory[worker]
            room = f"{size(share * memory, enough=True)} on worker {worker}, which has {size(memory)}"
            workers = f"{costs.workers.count} workers"
            if proved:
                what = f"no {mode} plan for {workers} fits into memory: the least that would be enough is {room}"
            else:
                what = (
                    f"no {mode} plan for {workers} was found that fits into memory: the least that was found is {room}"
                )
            raise TooLittleMemory(what, share)
        return Path(cuts, bottleneck(costs, cuts))

    def _improved(self, mode: str, where: Positions, best: Path) -> Path:
        """Search windows of cuts around the best plan, fine and wide ones in turn, until none improves it."""
        better = [best]
        for turn, offsets in in_turn(_OFFSETS[mode], self.rounds, lambda: better[-1].bottleneck):
            best = better[-1]
            self.say(f"{mode}: {best.bottleneck:.3f} ms after {turn} rounds")
            layers = window(self.costs, where, mode, best.cuts, offsets)
            better.append(least_bottleneck(self.costs, layers, best.bottleneck, calm=False) or best)
        return better[-1]


def roomy_shared_cuts(costs: CostModel, allowed: Places) -> Places:
    """Shared cuts that fit into memory; if there are none, those whose fullest worker is least full.

    More units never need less memory. So, for a given share of the memory, only the furthest reach of the first workers
    matters. That does not hold for what enters a worker that computes values again: there, these cuts are only good.
    """

    def reach(share: float) -> Places | None:
        rows = [np.zeros(4, dtype=np.int64)]
        for k in range(costs.workers.count):
            at = allowed[allowed >= rows[-1][0]]
            ends = np.stack([at, at, at, 0 * at], axis=1)
            begins = np.repeat(rows[-1][None], len(ends), axis=0)
            costs.remember(begins, ends)
            fits = costs.memory(k, costs.between(begins, ends)) <= share * costs.workers.memory[k] * (1 + EPSILON)
            rows.append(ends[np.flatnonzero(fits)[-1]])  # no units need no memory: there is always one
        return np.array(rows) if rows[-1][0] == costs.count else None

    low = high = 1.0
    while (roomy := reach(high)) is None:
        low, high = high, 2 * high
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        closer = reach(middle)
        if closer is None:
            low = middle
        else:
            high, roomy = middle, closer
    return roomy


def _rest(profile: Profile, workers: Workers) -> list[list[float]]:
    """By worker, every unit's B, W, update and policy, in milliseconds at speed 1."""
    by_rate = {
        rate: [
            u.backward_ms + u.weight_ms + (u.update_ms + rate * u.parameter_bytes) / workers.microbatches
            for u in profile.units
        ]
        for rate in set(workers.owned_ms)
    }
    return [by_rate[rate] for rate in workers.owned_ms]


def _snapped(allowed: Places, cuts: tuple[int, ...]) -> Places:
    """The nearest allowed position to each cut."""
    at = np.clip(np.searchsorted(allowed, cuts), 1, len(allowed) - 1)
    lower, upper = allowed[at - 1], allowed[at]
    return np.where(np.asarray(cuts) - lower < upper - np.asarray(cuts), lower, upper)


class _PricedPlans:
    """Plans with their prices, which the cost model computes for all of them at once.

    Args:
        plans: boundaries (f, b, w, r), one row each, of equally many workers.
    """

    def __init__(self, costs: CostModel, plans: Sequence[Places]) -> None:
        self._costs = costs
        self._plans = np.stack(plans)
        self._priced: list[tuple[Candidates, Costs]] = []
        self._moved = np.zeros(len(plans))
        for k, worker in workers_of(costs, self._plans):
            self._priced.append((worker, costs.price(k, worker, with_memory=True)))
            self._moved += costs.arriving(k, worker)

    def described(self, number: int, mode: str, bound: float = 0.0) -> Partition:
        """One of them, in seconds; the bound, like profiles, in milliseconds."""
        costs, cuts = self._costs, self._plans[number]
        units, workers = costs.profile.units, costs.workers
        loads, recompute = [], []
        for k, (worker, price) in enumerate(self._priced):
            again = costs.repeated(worker, number)
            recompute += [(k, *run) for run in again]
            speed, rate = workers.speeds[k], workers.rates[k]
            forward, backward, weight = (units[cuts[k, i] : cuts[k + 1, i]] for i in range(3))
            parts = {
                "forward": sum(u.forward_ms for u in forward) / rate,
                "backward": sum(u.backward_ms for u in backward) / rate,
                "weight": sum(u.weight_ms for u in weight) / rate,
                "update": sum(u.update_ms + workers.owned_ms[k] * u.parameter_bytes for u in weight)
                / (speed * workers.microbatches),
                "recompute": sum(u.forward_ms for run in again for u in units[slice(*run)]) / rate
                + float(price.again[number]),
            }
            total = float(price.cost[number])
            loads.append(
                Load(
                    **{name: ms / 1e3 for name, ms in parts.items()},
                    exposed=max(total - sum(parts.values()), 0.0) / 1e3,
                    total=total / 1e3,
                    memory=float(price.memory[number]),
                    values=float(price.values[number]),
                )
            )
        at = [tuple(int(position) for position in cuts[:, chain]) for chain in range(4)]
        slowest, ideal = max(load.total for load in loads), _ideal_ms(costs) / 1e3
        lower_bound = float(bound) / 1e3 if bound else min(ideal, slowest)
        priced = slowest, ideal, lower_bound, tuple(loads), workers.replicas, float(self._moved[number])
        return Partition(mode, at[0], at[1], at[2], tuple(recompute), *priced, again=at[3])


def _ideal_ms(costs: CostModel) -> float:
    """All work divided by the speeds of all processes."""
    workers = costs.workers
    speeds = sum(speed * workers.replicas_of(k) for k, speed in enumerate(workers.speeds))
    return costs.profile.total_ms(workers.microbatches) / speeds
