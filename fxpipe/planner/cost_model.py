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
from typing import NamedTuple

import numpy as np

from fxpipe.planner.candidate_workers import Candidates, Holdings
from fxpipe.planner.link_times import LinkTimes, all_reduce, exposed_exchange, fans, link_from
from fxpipe.planner.profile import Profile
from fxpipe.planner.sums_over_runs import Floats, Places, total
from fxpipe.planner.unit_sums import UnitSums
from fxpipe.planner.workers import Workers


class WorkerTimes(NamedTuple):
    """Milliseconds of every candidate, in the terms of the module's docstring."""

    busy: Floats
    waits: Floats
    wire: Floats

    @property
    def cost(self) -> Floats:
        """The cost, if memory does not matter."""
        return np.maximum(self.busy + self.waits, self.wire)


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


class CostModel(UnitSums):
    """Prices workers of one profile; see the module's docstring for the model."""

    def __init__(self, profile: Profile, workers: Workers) -> None:
        super().__init__(profile, workers.microbatches)
        self.workers = workers

    def with_workers(self, workers: Workers) -> CostModel:
        """The model for other workers with equally many microbatches; it shares what was remembered."""
        assert workers.microbatches == self.workers.microbatches
        other = copy(self)
        other.workers = workers
        return other

    def floor(self, worker: int, of: Candidates) -> Floats:
        """A lower bound of `price` that is faster to compute: computation, activations and gradients."""
        ratios = self.workers.ratios
        before, behind = self._links(worker)
        waits = before.occupied(ratios.activation * of.activation) + behind.occupied(ratios.gradient * of.gradient)
        return self._busy(worker, of) + (waits + before.latency + behind.latency) * self._share(worker)

    def price(self, worker: int, of: Candidates, with_memory: bool = False) -> Costs:
        """The cost of `worker`, if it is any of the candidates.

        Args:
            with_memory: count memory even if it has no limit.
        """
        times = self.times(worker, of)
        if not with_memory and not np.isfinite(self.workers.memory[worker]) and self.workers.recompute != "full":
            nothing = np.zeros(len(of))
            return Costs(times.cost, times.waits, times.wire, nothing, nothing, nothing)
        return self.fitting(worker, times, of.holdings(self.allowed(worker)))

    def times(self, worker: int, of: Candidates) -> WorkerTimes:
        """What the worker's time is made of, whatever its memory."""
        if not self.workers.links.free:
            return self._times(worker, of)
        busy = self._busy(worker, of) + of.repeated_ms / self.workers.rates[worker]
        return WorkerTimes(busy, np.zeros(len(of)), np.zeros(len(of)))

    def terms(self, worker: int) -> tuple[object, ...]:
        """All that `times` and `floor` know of a worker: those of workers that have the same are the same."""
        workers, links = self.workers, self._links(worker)
        work = workers.owned_ms[worker], workers.own_microbatches(worker), workers.speeds[worker]
        return *work, workers.replicas_of(worker), *links, all_reduce(workers, worker), fans(workers, worker)

    def fitting(self, worker: int, times: WorkerTimes, held: Sequence[Holdings]) -> Costs:
        """The costs of candidates at the level that takes least time of those that fit into the worker's memory.

        Args:
            held: of the candidates, at every level that the worker may have.
        """
        limit, waits, wire = self.workers.memory[worker], times.waits, times.wire
        nothing = np.zeros_like(waits)
        best = Costs(np.full_like(waits, np.inf), waits, wire, np.full_like(waits, np.inf), nothing, nothing)
        for level in held:
            again = level.again_ms / self.workers.rates[worker]
            values = self._values(worker, level)
            memory = self._others(worker, level) + values
            cost = np.where(memory <= limit, np.maximum(times.busy + again + waits, wire), np.inf)
            better = (cost < best.cost) | (np.isinf(best.cost) & (memory < best.memory))
            costs = Costs(cost, waits, wire, memory, again, values)
            names = ("cost", "memory", "again", "values")
            taken = {name: np.where(better, getattr(costs, name), getattr(best, name)) for name in names}
            best = replace(best, **taken)
            if np.isfinite(best.cost).all():
                break  # what fits with less computed again is faster
        return best

    def arriving(self, worker: int, of: Candidates) -> Floats:
        """Bytes that the worker receives from others for a minibatch: all its replicas, in all pipelines."""
        workers, ratios = self.workers, self.workers.ratios
        values = ratios.activation * of.activation + ratios.gradient * (of.gradient + of.handed[0])
        values = values + ratios.saved * (of.from_front.size + of.from_back.size)
        copies = ratios.weights * sum(of.copies_in) * workers.replicas_of(worker)
        return workers.dp * (workers.microbatches * values + copies)

    def memory(self, worker: int, of: Candidates) -> Floats:
        """The least bytes that the worker needs."""
        held = of.holdings(self.allowed(worker))
        return self._others(worker, held[0]) + np.minimum.reduce([self._values(worker, level) for level in held])

    @property
    def repeats(self) -> bool:
        """Whether workers may compute anything again to save memory."""
        return self.workers.recompute != "none"

    def allowed(self, worker: int) -> Sequence[int]:
        """The levels of recomputation that the worker may have; 0 is none."""
        if self.workers.recompute == "full":
            return (len(self._levels),)
        limited = self.repeats and np.isfinite(self.workers.memory[worker])
        return range(len(self._levels) + 1 if limited else 1)

    def repeated(self, of: Candidates, row: int) -> list[tuple[int, int]]:
        """The runs [first, end) of units that the backward of one candidate computes again."""
        runs = (of.from_front, of.from_back)
        return [(int(run.first[row]), int(run.end[row])) for run in runs if run.again[row]]

    def _busy(self, worker: int, of: Candidates) -> Floats:
        """Milliseconds of F + B + W + update + policy."""
        policy = self.workers.owned_ms[worker] / self.workers.microbatches * of.owned
        work, once = of.work_ms, policy
        if (share := self._share(worker)) != 1:
            work, once = share * (work - of.update_ms), of.update_ms + policy
        return (work + once) / self.workers.speeds[worker]

    def _share(self, worker: int) -> float:
        """The share of a minibatch's microbatches that one process of the worker does."""
        return self.workers.own_microbatches(worker) / self.workers.microbatches

    def _times(self, worker: int, of: Candidates) -> WorkerTimes:
        busy, ratios = self._busy(worker, of), self.workers.ratios
        activation, gradient = ratios.activation * of.activation, ratios.gradient * of.gradient
        speed, microbatches = self.workers.speeds[worker], self.workers.own_microbatches(worker)
        share = ratios.weights / microbatches
        before, behind = self._links(worker)
        own_forward, own_backward = of.forward_ms / speed, of.backward_ms / speed
        in_front, in_back = (share * copies for copies in of.copies_in)
        if (readers := self.workers.replicas_of(worker)) > 1:  # the owner sends the weights to each of them
            in_front, in_back = in_front * readers / before.sharing, in_back * readers / behind.sharing
        out_front, out_back = (share * copies for copies in of.copies_out)
        handed = ratios.gradient * of.handed[0]
        from_front, to_front, from_back, to_back = (
            ratios.saved * run.size for run in (of.from_front, of.to_front, of.from_back, of.to_back)
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
        busy = busy + of.repeated_ms * done / speed
        copy = 1e3 * self.workers.links.copy
        if copy:
            sent = ratios.activation * self._entering[of.ends[:, 0]] + ratios.gradient * self._leaving[of.begins[:, 1]]
            sent = sent + out_front + out_back + to_front + to_back
            sent = sent + ratios.gradient * of.handed[1]
            busy = busy + copy * done * (from_before + from_behind + sent)
        if self.workers.replicas or self.workers.dp > 1:
            hidden = own_backward + (total(self.weight, of.weight) - of.update_ms) / speed
            waits = waits + exposed_exchange(self.workers, worker, of.owned, hidden) / microbatches
            busy = busy + copy * done * all_reduce(self.workers, worker).copied * of.owned / microbatches
        if self.workers.replicas:
            wire = np.maximum(wire, self._fan(worker, of))
        return WorkerTimes(busy, waits * done, wire * done)

    def _fan(self, worker: int, of: Candidates) -> Floats:
        """How long what a process sends to its neighbours' processes occupies the wires, in milliseconds."""
        ratios = self.workers.ratios
        front, back = fans(self.workers, worker)
        times = [
            fan * ratio * crossing
            for fan, at in ((front, of.begins), (back, of.ends))
            for ratio, crossing in (
                (ratios.activation, self._entering[at[:, 0]]),
                (ratios.gradient, self._leaving[at[:, 1]]),
            )
        ]
        return np.maximum.reduce(times)

    def _links(self, worker: int) -> tuple[LinkTimes, LinkTimes]:
        """The links to the previous and to the next worker."""
        return link_from(self.workers, worker - 1, worker), link_from(self.workers, worker + 1, worker)

    def between(self, begins: Places, ends: Places) -> Candidates:
        """Candidates between boundaries; see there."""
        return Candidates(self, begins, ends)

    def _values(self, worker: int, held: Holdings) -> Floats:
        """Bytes that forward keeps for the worker's own B and W, or that these compute again."""
        workers = self.workers
        return workers.in_flight[worker] * held.kept + workers.deferred[worker] * held.deferred + held.once

    def _others(self, worker: int, held: Holdings) -> Floats:
        """All bytes but `_values`."""
        workers = self.workers
        sent = workers.in_flight[worker] * held.exchanged + workers.in_flight_before[worker] * held.from_front
        return workers.owned_factor[worker] * held.owned + held.always + sent
