"""An order of each worker's own, made for the times that its F, B and W take: a minibatch with a flush.

The orders that have a name fit even times. For uneven ones, `orders` lists actions as they become possible, in several
manners, and `improved` moves single actions as long as the minibatch becomes shorter.

From: Qi et al. 2024 (Zero Bubble Pipeline Parallelism, ICLR, arXiv 2401.10241), section 3.1: forwards ahead while
memory allows; whether one may keep a backward waiting; W where a worker would wait, if the gap is large enough, and
where memory is full; all W that are left at the end. As there, several settings of these choices are tried. Moving
single actions is ours: on small cases it is what is missing to the integer program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import product
from math import inf
from random import Random

from fxpipe.plan.spec import PHASES, Phase

Step = tuple[Phase, int]
"""A phase of a microbatch."""

Rows = list[list[Step]]
"""By worker, what it does of a minibatch, in order. F, B and W each come in the order of microbatches."""

REPEATED = 3
"""Minibatches after which workers that began together are as far apart as they will be."""

EQUAL = 1e-9
"""Times that differ by less, relatively, are equal."""


@dataclass(frozen=True)
class StageTimes:
    """What an order is made for. Times are seconds.

    Attributes:
        microbatches: of a minibatch.
        spent: by worker, of F, B and W of a microbatch.
        updates: by worker, after its last action.
        down, up: from the end of F on a worker to when the next worker can begin, and of B to the previous one; one
            fewer than workers.
        held: by worker, of how many microbatches it may have done F and not yet W; at least 1.
        weights: from the update of one worker to when another one, that reads its weights, can begin with a phase:
            owner, reader, the phase, seconds.
    """

    microbatches: int
    spent: tuple[tuple[float, float, float], ...]
    updates: tuple[float, ...]
    down: tuple[float, ...]
    up: tuple[float, ...]
    held: tuple[int, ...]
    weights: tuple[tuple[int, int, Phase, float], ...] = ()

    @property
    def workers(self) -> int:
        """How many."""
        return len(self.spent)

    @property
    def actions(self) -> int:
        """How many there are in a minibatch."""
        return 3 * self.workers * self.microbatches

    @cached_property
    def bound(self) -> float:
        """What no order can be faster than: the work of the worker that has most."""
        return max(self.microbatches * sum(own) + update for own, update in zip(self.spent, self.updates, strict=True))


@dataclass(frozen=True)
class ListingManner:
    """How a worker chooses between what it can do.

    Attributes:
        depth: worker k of N may be depth·(N−1−k)+1 forwards ahead of its backwards.
        delaying: of a forward, the share that may be left when the next backward could begin.
        filling: the same of a W, and of any next action.
    """

    depth: float
    delaying: float
    filling: float


MANNERS = tuple(
    ListingManner(*choice) for choice in product((1.0, 1.5, 2.0, 3.0, inf), (0.0, 0.5, 1.0), (0.0, 0.5, 1.0))
)


@dataclass(frozen=True)
class OwnOrder:
    """Rows, and how good they are.

    Attributes:
        seconds: from one minibatch to the next in the steady state, of the worker that falls behind most.
        later: the sum of when the workers have ended the last of `REPEATED` minibatches: of two orders that take
            equally long, the one with less waiting is easier to improve.
    """

    seconds: float
    later: float
    rows: Rows

    def better_than(self, other: OwnOrder) -> bool:
        """By more than rounding."""
        if abs(self.seconds - other.seconds) > EQUAL * other.seconds:
            return self.seconds < other.seconds
        return self.later < other.later * (1 - EQUAL)


def orders(times: StageTimes, manners: Sequence[ListingManner] = MANNERS) -> list[tuple[OwnOrder, ListingManner]]:
    """The orders that come of some manners, each once, the best first."""
    found: dict[tuple[tuple[Step, ...], ...], tuple[OwnOrder, ListingManner]] = {}
    for manner in manners:
        rows = listed(times, manner)
        key = tuple(map(tuple, rows))
        if key not in found:
            found[key] = run(times, rows), manner
    return sorted(found.values(), key=lambda pair: (pair[0].seconds, pair[0].later))


def listed(times: StageTimes, manner: ListingManner) -> Rows:
    """The actions of all workers as they become possible, in one manner.

    A worker that is free begins, of what it can begin, a backward; else a forward, if that is not too far ahead; else a
    W; or it waits for what is on its way. n actions take n·log(n) operations.
    """
    count, last = times.microbatches, times.workers - 1
    ahead = [int(min(count, manner.depth * (last - k) + 1)) if k < last else 1 for k in range(times.workers)]
    arrived = {  # when each action of the pipeline's order can begin; inf while that is not known
        "F": [[0.0 if k == 0 else inf] * count for k in range(times.workers)],
        "B": [[inf] * count for _ in range(times.workers)],
    }
    done = [dict.fromkeys(PHASES, 0) for _ in range(times.workers)]
    free = [0.0] * times.workers
    rows: Rows = [[] for _ in range(times.workers)]
    awake = [(0.0, k) for k in range(times.workers)]
    while awake:
        now, k = heappop(awake)
        f, b, w = done[k].values()
        if free[k] > now or w == count:
            continue
        backward = arrived["B"][k][b] if b < f else inf
        forward = arrived["F"][k][f] if f < count and f - w < times.held[k] and f - b < ahead[k] else inf
        of_f, _, of_w = times.spent[k]
        following = min(backward, forward if forward > now else inf)
        phase: Phase
        if backward <= now:
            phase = "B"
        elif forward <= now and now + of_f * (1 - manner.delaying) <= backward:
            phase = "F"
        elif w < b and now + of_w * (1 - manner.filling) <= following:
            phase = "W"
        else:
            continue  # what comes next wakes it
        number = done[k][phase]
        end = free[k] = now + times.spent[k]["FBW".index(phase)]
        done[k][phase] += 1
        rows[k].append((phase, number))
        heappush(awake, (end, k))
        if phase == "F" and k == last:
            arrived["B"][k][number] = end
        elif phase == "F" or (phase == "B" and k):
            of, way = (k + 1, times.down[k]) if phase == "F" else (k - 1, times.up[k - 1])
            arrived[phase][of][number] = end + way
            heappush(awake, (end + way, of))
    assert all(len(row) == 3 * count for row in rows), "a worker waits for what no worker does"
    return rows


def run(times: StageTimes, rows: Rows) -> OwnOrder:
    """How good rows are, by several minibatches one after the other, each worker's as soon as it can; `inf` if they
    deadlock."""
    clock, before = [0.0] * times.workers, [0.0] * times.workers
    for _ in range(REPEATED):
        before, ends = clock, _minibatch(times, rows, clock)
        if ends is None:
            return OwnOrder(inf, inf, rows)
        clock = ends
    return OwnOrder(max(end - start for start, end in zip(before, clock, strict=True)), sum(clock), rows)


def _minibatch(times: StageTimes, rows: Rows, begins: Sequence[float]) -> list[float] | None:
    """When each worker ends a minibatch, given when it has ended the one before; None if they deadlock."""
    last, count = times.workers - 1, times.microbatches
    fresh = dict.fromkeys(((k, phase) for k in range(times.workers) for phase in PHASES), 0.0)
    for owner, reader, phase, seconds in times.weights:
        fresh[reader, phase] = max(fresh[reader, phase], begins[owner] + seconds)
    forwards: list[list[float]] = [[-1.0] * count for _ in rows]
    backwards: list[list[float]] = [[-1.0] * count for _ in rows]
    clock, place = list(begins), [0] * times.workers
    awake = list(reversed(range(times.workers)))
    while awake:
        k = awake.pop()
        now, at, row = clock[k], place[k], rows[k]
        of_f, of_b, of_w = times.spent[k]
        for phase, number in row[at:]:
            ready = 0.0 if number else fresh[k, phase]
            if phase == "F":
                if k:
                    if forwards[k - 1][number] < 0:
                        break
                    ready = max(ready, forwards[k - 1][number] + times.down[k - 1])
                now = forwards[k][number] = max(now, ready) + of_f
                if k < last:
                    awake.append(k + 1)
            elif phase == "B":
                if k < last:
                    if backwards[k + 1][number] < 0:
                        break
                    ready = max(ready, backwards[k + 1][number] + times.up[k])
                now = backwards[k][number] = max(now, ready) + of_b
                if k:
                    awake.append(k - 1)
            else:
                now = max(now, ready) + of_w
            at += 1
        clock[k], place[k] = now, at
    if any(at < 3 * count for at in place):
        return None
    return [end + update for end, update in zip(clock, times.updates, strict=True)]


def improved(times: StageTimes, starts: Sequence[OwnOrder], effort: int, shakes: int = 0) -> OwnOrder:
    """The best order that moves of single actions lead to from any of some, each move an improvement.

    Args:
        effort: how many orders may be looked at, from all starts together.
        shakes: how often the best is disturbed in three places, and improved again.
    """
    search = _Moves(times, effort)
    best = starts[0]
    for start in starts:
        found = search.from_(start)
        best = found if found.better_than(best) else best
    random = Random(0)
    for _ in range(shakes):
        if search.over(best):
            break
        found = search.from_(search.shaken(best, random))
        best = found if not best.better_than(found) else best
    return best


class _Moves:
    """One search for a better order."""

    def __init__(self, times: StageTimes, effort: int) -> None:
        self.times = times
        self.left = effort

    def over(self, best: OwnOrder) -> bool:
        """Whether nothing is left to try, or to gain."""
        return self.left <= 0 or best.seconds <= self.times.bound * (1 + EQUAL)

    def from_(self, best: OwnOrder) -> OwnOrder:
        """The best that moves lead to from one order."""
        improving = best.seconds < inf
        while improving:
            improving = False
            for k, place, step in product(range(self.times.workers), range(3 * self.times.microbatches), (-1, 1)):
                for row in self._moves(best.rows[k], place, step, self.times.held[k]):
                    if self.over(best):
                        return best
                    self.left -= 1
                    found = run(self.times, [*best.rows[:k], row, *best.rows[k + 1 :]])
                    if found.better_than(best):
                        best, improving = found, True
                        break
        return best

    def shaken(self, order: OwnOrder, random: Random) -> OwnOrder:
        """The order with three pairs of neighbours exchanged."""
        rows = list(order.rows)
        for _ in range(3):
            k = random.randrange(self.times.workers)
            place = random.randrange(3 * self.times.microbatches)
            moved = next(self._moves(rows[k], place, random.choice((-1, 1)), self.times.held[k]), None)
            rows[k] = moved or rows[k]
        self.left -= 1
        return run(self.times, rows)

    def _moves(self, row: list[Step], place: int, step: int, held: int) -> Iterator[list[Step]]:
        """The lawful rows with one action further back or forth, the nearest place first."""
        action = row[place]
        others = [*row[:place], *row[place + 1 :]]
        to = place + step
        while 0 <= to < len(row) and row[to][0] != action[0] and row[to][1] != action[1]:
            moved = [*others[:to], action, *others[to:]]
            if most_held(moved) <= held:
                yield moved
            to += step


def most_held(row: Sequence[Step]) -> int:
    """Of how many microbatches a worker has done F and not yet W, at most."""
    now = most = 0
    for phase, _ in row:
        now += (phase == "F") - (phase == "W")
        most = max(most, now)
    return most
