"""The cost model: what one worker costs per microbatch, in time and memory, for the units that it runs.

A boundary between two workers is (f, b, w, r): where F, B and W are cut, and whether units with F on one side and B or
W on the other are computed again (r = 1) or their saved values are sent (r = 0). Between the boundaries (f, b, w, r)
and (f', b', w', r'), a worker runs F of units [f, f'), B of [b, b') and W of [w, w'); w ≥ b, because W runs inside B's
action and B's actions run from the last worker to the first. Its cost per microbatch, in the steady state of
one-forward-one-backward, in milliseconds:

    busy = (F + B + W + recomputation + (update + policy)/microbatches)/speed + copy · bytes
    waits = activations + gradients that it receives + what computation does not hide of other messages
    wire = all that arrives over the busier of its two links
    cost = max(busy + waits, wire)

- **Activations and gradients** are part of the round trip. If none travel, a token does, so latency always counts.
  1F1B keeps worker k exactly N−1−k forwards ahead. So around any range i … j of workers there is a cycle of events for
  j−i+1 microbatches, which takes Σ busy plus the messages in both directions over the inner boundaries of the range. A
  period that covers each worker's busy time and what it receives covers every cycle. If a worker in the range has
  slack, the schedule may be faster; the simulator says by how much.
- **Other messages** travel in parallel to the round trip, and only what computation does not hide counts. The
  receiver's forward hides saved values from an earlier worker, the sender's backward those to an earlier worker. The
  owner's next forward hides weights to a later worker, the reader's backward those from a later worker. Nothing hides
  gradients from a B elsewhere to W, because W needs them to begin. Weight copies travel once per minibatch.
- **Mismatch.** For a run of units with F on one side and B or W on the other, B's worker receives the saved values; or
  it receives the activations that cross the start of the run and the random values of the run, and computes the forward
  again. The run begins and ends with units that save something.
- **policy** is the policy's work on owned weights, for each byte of them. It differs between workers: the first ones
  predict, the last need not.
- **Codecs** make messages smaller: the bytes of each kind are multiplied by its ratio. Memory holds the whole values.
- **copy** (processor seconds per byte) is paid at both ends.
- A message is priced on the link to the neighbour in its direction, even if it travels further. Only if mismatched
  runs reach past a neighbour, the schedule can take a little longer than the slowest worker's cost.

**Replicas of a worker** (`Workers.replicas`) do its microbatches in turn: each of r does own = M/r of a minibatch's M,
rounded up. Costs of every microbatch count by that share, the update in full. Replicas exchange their gradients once a
minibatch, during the backward of the last microbatch, and only what that backward does not hide counts. Messages
between many processes and few occupy the wires of the few. Weights that a worker with replicas reads leave their owner
once for each of them, as if the owner had one process. `link_times` has the times of all this, on one machine and
between machines. Costs are per microbatch of the whole minibatch, so that workers with different numbers of replicas
compare. If whole pipelines train together (`Workers.dp`), the exchange counts likewise, and all else is as for one.

Memory, in bytes: owned weights × `owned_factor` (weight, gradient, optimizer state, what the policy keeps) + weight
copies and frozen weights + what is saved, received or sent for backward, for each microbatch in flight + the largest
temporaries. Values from an earlier worker are in flight for as many microbatches as that worker has.

**Recomputation** (`Workers.recompute`). A worker whose memory is short keeps less for its own backward, at one of the
profile's levels (`Unit.levels`). For each microbatch in flight, it holds what that level still saves of the units whose
F and B it has, and what enters them; for each between B and W, the recomputed values that W reads; and, once, the
recomputed values that exist together. Of the levels that fit into memory, it uses the cheapest.

A codec of weights (`Plan.weights_codec`) does not count: weight copies are priced at full size. The additional copy
that owner and reader keep for it is only in the table of a build's workers.

Everything here is arithmetic on arrays of cut positions: any number of candidate workers at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fxpipe.errors import CutError
from fxpipe.planner.crossing import Crossing
from fxpipe.planner.link_times import LinkTimes, all_reduce, exposed_exchange, fans, link_from
from fxpipe.planner.profile import Profile, SavingLevel
from fxpipe.planner.sums_over_runs import Floats, Maximum, Places, Span, Trim, back, both, front, hull, prefix, total
from fxpipe.planner.workers import Workers


@dataclass(frozen=True)
class Costs:
    """Arrays with one element per candidate worker. Times in milliseconds, memory in bytes.

    Attributes:
        cost: max(busy + waits, wire); inf if the memory is too small.
        waits, wire: its parts; the rest is computing and copying.
        memory: 0 if `price` did not count it.
        again: how long backward computes the worker's own forward again, to save memory.
        values: the part of `memory` that is kept for its own backward, or computed again there.
    """

    cost: Floats
    waits: Floats
    wire: Floats
    memory: Floats
    again: Floats
    values: Floats


_Table = tuple[Places, Places, Floats]  # begins, ends, bytes


class CostModel:
    """Prices workers of one profile; see the module's docstring for the model."""

    def __init__(self, profile: Profile, workers: Workers) -> None:
        self.profile = profile
        self.workers = workers
        units = profile.units
        count = len(units)
        if not count:
            raise CutError("there are no units to cut")
        self.count = count
        self.forward = prefix([u.forward_ms for u in units])
        self.backward = prefix([u.backward_ms for u in units])
        self.weight = prefix([u.weight_ms + u.update_ms / workers.microbatches for u in units])
        self._update = prefix([u.update_ms / workers.microbatches for u in units])
        works = [u.weight_ms > 0 for u in units]
        self._saved_b = prefix([u.saved_bytes - u.weight_saved_bytes for u in units])
        self._saved_w = prefix([u.saved_bytes if w else 0.0 for u, w in zip(units, works, strict=True)])
        self._saved_both = prefix(
            [u.saved_bytes - u.weight_saved_bytes if w else 0.0 for u, w in zip(units, works, strict=True)]
        )
        self._fixed = prefix([u.fixed_bytes for u in units])
        self._handed = prefix([u.gradient_bytes if w else 0.0 for u, w in zip(units, works, strict=True)])
        self._parameters = prefix([u.parameter_bytes for u in units])
        self._frozen = prefix([u.frozen_bytes for u in units])
        owns = [w or u.parameter_bytes > 0 or u.update_ms > 0 for w, u in zip(works, units, strict=True)]
        self.owning = Trim(owns)
        self._saving = (
            Trim([u.saved_bytes > u.weight_saved_bytes for u in units]),
            Trim([w and u.saved_bytes > 0 for w, u in zip(works, units, strict=True)]),
        )
        self._temporary = Maximum([u.temporary_bytes for u in units])
        self._levels = tuple(_LevelSums.of(level) for level in levels_of(profile))
        self._keeps_entering = any(u.levels for u in units)
        last = count - 1
        self.activations = Crossing(count, [(v.bytes, v.producer, v.readers) for v in profile.activations])
        self.gradients = Crossing(
            count, [(v.bytes, last - v.producer, [last - r for r in v.readers]) for v in profile.gradients]
        )
        self._entering = self.activations.total()  # bytes that a run from here on reads of earlier units
        self._leaving = self.gradients.total()[::-1]  # bytes of gradients that cross a position
        self._lookup: tuple[_Table, _Table] | None = None

    def with_workers(self, workers: Workers) -> CostModel:
        """The model for other workers with equally many microbatches; it shares what was remembered."""
        assert workers.microbatches == self.workers.microbatches
        other = copy(self)
        other.workers = workers
        return other

    def load(self, states: Places) -> Floats:
        """Work before boundaries, rows (f, b, w, …), in milliseconds at speed 1; without the policy's."""
        return self.forward[states[..., 0]] + self.backward[states[..., 1]] + self.weight[states[..., 2]]

    def floor(self, worker: int, begins: Places, ends: Places) -> Floats:
        """A lower bound of `price` that is faster to compute: computation, activations and gradients."""
        busy, activation, gradient = self._round_trip(worker, begins, ends)
        before, behind = self._links(worker)
        waits = before.occupied(activation) + behind.occupied(gradient) + before.latency + behind.latency
        return busy + waits * self._share(worker)

    def price(self, worker: int, begins: Places, ends: Places, with_memory: bool = False) -> Costs:
        """The cost of `worker` between the boundaries in the rows of `begins` and those in the rows of `ends`.

        Args:
            begins, ends: shape (n, 4), row by row; no position of an end is before that of its begin. `remember` must
                have been called with their cuts.
            with_memory: count memory even if it has no limit.
        """
        spans = _CandidateSpans.of(self, begins, ends)
        if self.workers.links.free:
            busy = self._busy(worker, begins, ends) + spans.repeated_ms / self.workers.rates[worker]
            waits = wire = np.zeros_like(busy)
        else:
            busy, waits, wire = self._times(worker, begins, ends, spans)
        limit, nothing = self.workers.memory[worker], np.zeros_like(busy)
        if not with_memory and not np.isfinite(limit) and self.workers.recompute != "full":
            return Costs(np.maximum(busy + waits, wire), waits, wire, nothing, nothing, nothing)
        others = self._others(worker, spans)
        best = Costs(np.full_like(busy, np.inf), waits, wire, np.full_like(busy, np.inf), nothing, nothing)
        for level in self._allowed(worker):
            values = self._values(worker, spans, level)
            again = self._again_ms(spans, level) / self.workers.rates[worker]
            memory = others + values
            cost = np.where(memory <= limit, np.maximum(busy + again + waits, wire), np.inf)
            better = (cost < best.cost) | (np.isinf(best.cost) & (memory < best.memory))
            found = Costs(cost, waits, wire, memory, again, values)
            names = ("cost", "memory", "again", "values")
            taken = {name: np.where(better, getattr(found, name), getattr(best, name)) for name in names}
            best = replace(best, **taken)
            if np.isfinite(best.cost).all():
                break  # what fits with less computed again is faster
        return best

    def memory(self, worker: int, begins: Places, ends: Places) -> Floats:
        """The least bytes that the worker needs; rows as in `price`."""
        spans = _CandidateSpans.of(self, begins, ends)
        others = self._others(worker, spans)
        levels = self._allowed(worker)
        return others + np.minimum.reduce([self._values(worker, spans, level) for level in levels])

    @property
    def repeats(self) -> bool:
        """Whether workers may compute anything again to save memory."""
        return self.workers.recompute != "none"

    def _allowed(self, worker: int) -> Sequence[int]:
        """The levels of recomputation that the worker may have; 0 is none."""
        if self.workers.recompute == "full":
            return (len(self._levels),)
        limited = self.repeats and np.isfinite(self.workers.memory[worker])
        return range(len(self._levels) + 1 if limited else 1)

    def repeated(self, begin: Places, end: Places) -> list[tuple[int, int]]:
        """The runs [first, end) of units that a worker's backward computes again; `begin` and `end` have one row."""
        spans = _CandidateSpans.of(self, begin, end)
        runs = (spans.from_front, spans.from_back)
        return [(int(run.first[0]), int(run.end[0])) for run in runs if run.again[0]]

    def _busy(self, worker: int, begins: Places, ends: Places) -> Floats:
        """Milliseconds of F + B + W + update + policy."""
        owned = self._parameters[ends[:, 2]] - self._parameters[begins[:, 2]]
        policy = self.workers.owned_ms[worker] / self.workers.microbatches * owned
        work, once = self.load(ends) - self.load(begins), policy
        if (share := self._share(worker)) != 1:
            update = self._update[ends[:, 2]] - self._update[begins[:, 2]]
            work, once = share * (work - update), update + policy
        return (work + once) / self.workers.speeds[worker]

    def _share(self, worker: int) -> float:
        """The share of a minibatch's microbatches that one process of the worker does."""
        return self.workers.own_microbatches(worker) / self.workers.microbatches

    def _round_trip(self, worker: int, begins: Places, ends: Places) -> tuple[Floats, Floats, Floats]:
        """Milliseconds of `_busy`; bytes of activations and of gradients received."""
        busy, ratios = self._busy(worker, begins, ends), self.workers.ratios
        activation = ratios.activation * self._received(0, begins[:, 0], ends[:, 0])
        gradient = ratios.gradient * self._received(1, self.count - ends[:, 1], self.count - begins[:, 1])
        return busy, activation, gradient

    def _times(
        self, worker: int, begins: Places, ends: Places, spans: _CandidateSpans
    ) -> tuple[Floats, Floats, Floats]:
        busy, activation, gradient = self._round_trip(worker, begins, ends)
        speed, ratios = self.workers.speeds[worker], self.workers.ratios
        own = self.workers.own_microbatches(worker)
        share = ratios.weights / own
        before, behind = self._links(worker)
        own_forward = total(self.forward, spans.forward) / speed
        own_backward = total(self.backward, spans.backward) / speed
        in_front, in_back = share * self._weight_copies(spans, "in", 0), share * self._weight_copies(spans, "in", 1)
        if (readers := self.workers.replicas_of(worker)) > 1:  # the owner sends the weights to each of them
            in_front, in_back = in_front * readers / before.sharing, in_back * readers / behind.sharing
        out_front, out_back = share * self._weight_copies(spans, "out", 0), share * self._weight_copies(spans, "out", 1)
        handed = total(self._handed, spans.weight) - total(self._handed, both(spans.weight, spans.backward))
        handed = ratios.gradient * handed
        from_front, to_front, from_back, to_back = (
            ratios.saved * run.size for run in (spans.from_front, spans.to_front, spans.from_back, spans.to_back)
        )
        waits = before.occupied(activation) + behind.occupied(gradient + handed) + before.latency + behind.latency
        waits = waits + np.maximum(before.occupied(from_front) - own_forward, 0.0)
        waits = waits + np.maximum(before.occupied(to_front) - own_backward, 0.0)
        waits = waits + np.maximum(behind.occupied(out_back) - own_forward, 0.0)
        waits = waits + np.maximum(behind.occupied(in_back) - own_backward, 0.0)
        from_before = activation + in_front + from_front
        from_behind = gradient + handed + in_back + from_back
        wire = np.maximum(before.occupied(from_before), behind.occupied(from_behind))
        done = self._share(worker)
        busy = busy + spans.repeated_ms * done / speed
        copy = 1e3 * self.workers.links.copy
        if copy:
            sent = ratios.activation * self._entering[ends[:, 0]] + ratios.gradient * self._leaving[begins[:, 1]]
            sent = sent + out_front + out_back + to_front + to_back
            others = total(self._handed, spans.backward) - total(self._handed, both(spans.backward, spans.weight))
            sent = sent + ratios.gradient * others
            busy = busy + copy * done * (from_before + from_behind + sent)
        if self.workers.replicas or self.workers.dp > 1:
            weights = total(self._parameters, spans.weight)
            hidden = own_backward + (total(self.weight, spans.weight) - total(self._update, spans.weight)) / speed
            waits = waits + exposed_exchange(self.workers, worker, weights, hidden) / own
            busy = busy + copy * done * all_reduce(self.workers, worker).copied * weights / own
        if self.workers.replicas:
            wire = np.maximum(wire, self._fan(worker, begins, ends))
        return busy, waits * done, wire * done

    def _fan(self, worker: int, begins: Places, ends: Places) -> Floats:
        """How long what a process sends to its neighbours' processes occupies the wires, in milliseconds."""
        ratios = self.workers.ratios
        front, back = fans(self.workers, worker)
        found = [
            fan * ratio * crossing
            for fan, at in ((front, begins), (back, ends))
            for ratio, crossing in (
                (ratios.activation, self._entering[at[:, 0]]),
                (ratios.gradient, self._leaving[at[:, 1]]),
            )
        ]
        return np.maximum.reduce(found)

    def _links(self, worker: int) -> tuple[LinkTimes, LinkTimes]:
        """The links to the previous and to the next worker."""
        return link_from(self.workers, worker - 1, worker), link_from(self.workers, worker + 1, worker)

    def _weight_copies(self, spans: _CandidateSpans, way: str, side: int) -> Floats:
        """Parameter bytes read on one side of a boundary and owned on the other: side 0 before it, 1 after it.

        Coming in: F or B here, W on that side. Going out: W here, F or B on that side.
        """
        sums, weight = self._parameters, spans.weight
        if way == "in":
            cut = (lambda span: front(span, weight[0])) if side == 0 else (lambda span: back(span, weight[1]))
            forward, backward = cut(spans.forward), cut(spans.backward)
        else:
            readers = (spans.forward, spans.backward)
            forward, backward = ((front if side == 0 else back)(weight, r[side]) for r in readers)
        return total(sums, forward) + total(sums, backward) - total(sums, both(forward, backward))

    def remember(self, begins: Places, ends: Places) -> None:
        """Look up in advance what crosses between all these cuts; afterwards `price` may be called only for these."""
        starts, columns = np.unique(begins[:, 0]), np.unique(ends[:, 0])
        first, last = np.unique(self.count - ends[:, 1]), np.unique(self.count - begins[:, 1])
        self._lookup = (
            (starts, columns, self.activations.table(starts, columns)),
            (first, last, self.gradients.table(first, last)),
        )

    def _received(self, chain: int, begins: Places, ends: Places) -> Floats:
        assert self._lookup is not None
        rows, columns, table = self._lookup[chain]
        return table[np.searchsorted(rows, begins), np.searchsorted(columns, ends)]

    def run(self, backward: Span, weight: Span, again: Places) -> MismatchedRuns:
        """A run of units with B or W on one side of a boundary and F on the other."""
        saved = self._saved(backward, weight)
        first, end = hull(self._saving[0](backward), self._saving[1](weight))
        entering = np.where(end > first, self._entering[first] + total(self._fixed, (first, end)), 0.0)
        repeated = (again > 0) & (end > first)
        return MismatchedRuns(
            first, end, np.where(repeated, entering, saved), repeated, total(self.forward, (first, end)), saved
        )

    def _saved(self, backward: Span, weight: Span) -> Floats:
        """Saved bytes that B of some units and W of some units read."""
        twice = total(self._saved_both, both(backward, weight))
        return total(self._saved_b, backward) + total(self._saved_w, weight) - twice

    def _again_ms(self, spans: _CandidateSpans, level: int) -> Floats:
        """Milliseconds at speed 1 of what a level computes again."""
        own = both(spans.forward, spans.backward)
        return total(self._levels[level - 1].again, own) if level else np.zeros(len(own[0]))

    def _values(self, worker: int, spans: _CandidateSpans, level: int) -> Floats:
        """Bytes that forward keeps for the worker's own B and W, or that these compute again."""
        forward, backward, weight = spans.forward, spans.backward, spans.weight
        now, own = self.workers.in_flight[worker], both(forward, backward)
        plain = self._saved(own, both(forward, weight))
        if not level:
            return now * plain
        sums = self._levels[level - 1]
        elsewhere = plain - self._saved(own, both(own, weight))  # read by W alone, of units whose B is not here
        kept = total(sums.saved, own) + elsewhere
        if self._keeps_entering:
            kept = kept + np.where(own[1] > own[0], self._entering[np.minimum(own[0], self.count)], 0.0)
        once = np.minimum(sums.alive.over(own), total(sums.made, own))
        return now * kept + self.workers.deferred[worker] * total(sums.deferred, own) + once

    def _others(self, worker: int, spans: _CandidateSpans) -> Floats:
        """All bytes but `_values`."""
        own = self.workers
        forward, backward, weight = spans.forward, spans.backward, spans.weight
        frozen = total(self._frozen, forward) + total(self._frozen, backward)
        frozen = frozen - total(self._frozen, both(forward, backward))
        copies = self._weight_copies(spans, "in", 0) + self._weight_copies(spans, "in", 1)
        now, earlier = own.in_flight[worker], own.in_flight_before[worker]
        kept = now * (spans.to_front.size + spans.to_back.size + spans.from_back.size)
        kept = kept + earlier * spans.from_front.size
        temporary = np.maximum(
            self._temporary.over(forward), np.maximum(self._temporary.over(backward), self._temporary.over(weight))
        )
        for run in (spans.from_front, spans.from_back):  # what was computed again exists at once, for one microbatch
            temporary = temporary + np.where(run.again, run.saved, 0.0)
        owned = own.owned_factor[worker] * total(self._parameters, weight)
        return owned + copies + frozen + kept + temporary


def levels_of(profile: Profile) -> tuple[tuple[SavingLevel, ...], ...]:
    """The levels of a profile, each with what every unit saves.

    If no unit has levels, there is one: units keep their inputs and random values, where that is less, and are computed
    again.
    """
    units = profile.units
    count = max(len(u.levels) for u in units)
    if count:
        padded = [u.levels + (u.levels[-1:] or (SavingLevel(u.saved_bytes, 0.0),)) * count for u in units]
        return tuple(tuple(of_unit[i] for of_unit in padded) for i in range(count))
    inputs = [0.0] * len(units)
    for v in profile.activations:
        for reader in v.readers:
            inputs[reader] += v.bytes
    found = []
    for u, entering in zip(units, inputs, strict=True):
        kept = entering + u.fixed_bytes
        if kept < u.saved_bytes:
            of_weights = u.saved_bytes if u.weight_ms else 0.0
            found.append(SavingLevel(kept, u.forward_ms, u.saved_bytes, u.saved_bytes, of_weights))
        else:
            found.append(SavingLevel(u.saved_bytes, 0.0))
    return (tuple(found),)


@dataclass(frozen=True)
class _LevelSums:
    """One level, as sums and maxima over units."""

    saved: Floats
    again: Floats
    made: Floats
    deferred: Floats
    alive: Maximum

    @staticmethod
    def of(level: Sequence[SavingLevel]) -> _LevelSums:
        return _LevelSums(
            prefix([unit.saved_bytes for unit in level]),
            prefix([unit.again_ms for unit in level]),
            prefix([unit.made_bytes for unit in level]),
            prefix([unit.deferred_bytes for unit in level]),
            Maximum([unit.alive_bytes for unit in level]),
        )


@dataclass(frozen=True)
class MismatchedRuns:
    """A run of mismatched units for every candidate.

    Attributes:
        first, end: the run [first, end); empty if end ≤ first.
        size: bytes that travel for them.
        again: whether they are computed again.
        forward_ms: of their forward, at speed 1.
        saved: bytes that their backward reads.
    """

    first: Places
    end: Places
    size: Floats
    again: NDArray[np.bool_]
    forward_ms: Floats
    saved: Floats


@dataclass(frozen=True)
class _CandidateSpans:
    """What every candidate runs, and its runs of mismatched units by where their other half is.

    Attributes:
        from_front, from_back: B or W here, F on an earlier or later worker.
        to_front, to_back: F here, B or W on an earlier or later worker.
    """

    forward: Span
    backward: Span
    weight: Span
    from_front: MismatchedRuns
    from_back: MismatchedRuns
    to_front: MismatchedRuns
    to_back: MismatchedRuns

    @property
    def repeated_ms(self) -> Floats:
        """Forward that is computed again here, at speed 1."""
        runs = (self.from_front, self.from_back)
        return sum((np.where(run.again, run.forward_ms, 0.0) for run in runs), np.zeros(len(self.forward[0])))

    @staticmethod
    def of(costs: CostModel, begins: Places, ends: Places) -> _CandidateSpans:
        """The spans between boundaries."""
        f, b, w, r = (begins[:, i] for i in range(4))
        f2, b2, w2, r2 = (ends[:, i] for i in range(4))
        forward, backward = (f, f2), (b, b2)
        weight = costs.owning((w, w2))
        return _CandidateSpans(
            forward,
            backward,
            weight,
            costs.run(front(backward, f), front(weight, f), r),
            costs.run(back(backward, f2), back(weight, f2), r2),
            costs.run(front(forward, b), front(forward, weight[0]), r),
            costs.run(back(forward, b2), back(forward, weight[1]), r2),
        )
