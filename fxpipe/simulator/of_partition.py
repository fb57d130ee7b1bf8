"""A planned partition as a scenario, before anything is compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np

from fxpipe.plan.cost_records import StageTime
from fxpipe.plan.spec import Phase
from fxpipe.plan.urgency import turn_of
from fxpipe.planner.link_times import all_reduce, exposed_exchange
from fxpipe.planner.partition import Partition
from fxpipe.planner.profile import Profile, Value
from fxpipe.planner.workers import Ratios, Workers
from fxpipe.schedule.base import Schedule
from fxpipe.schedule.graph import handed_on_by, reach_of
from fxpipe.schedule.versions import versions_of
from fxpipe.simulator.scenario import Message, Scenario, WeightCopy

_Key = tuple[int, Phase, int, Phase]
READING: tuple[Phase, Phase] = ("F", "B")
"""The phases that read weights."""

PARTS = 8
"""The number of messages into which values between two workers are combined, by the time when they are made."""


def scenario_of_partition(profile: Profile, partition: Partition, workers: Workers, schedule: Schedule) -> Scenario:
    """The partition on these workers, as a scenario for `simulate(schedule, …)`.

    Values between two workers that are made at about the same time count as one message. It is sent when the last value
    is made, and waited for when the first is needed.
    """
    return Scenario(
        workers=tuple(_time(profile, partition, workers, k, schedule) for k in range(workers.count)),
        messages=tuple(_Messages(profile, partition, workers.ratios, schedule).all()),
        weight_copies=tuple(_weight_copies(profile, partition, schedule, workers.ratios.weights)),
        links=workers.links,
        placement=schedule.placement,
    )


def _time(profile: Profile, partition: Partition, workers: Workers, k: int, schedule: Schedule) -> StageTime:
    load = partition.loads[k]
    update = load.update * workers.microbatches
    backward, weight = load.backward + load.recompute, load.weight
    if not schedule.weights_apart:
        backward, weight = backward + weight, 0.0
    if workers.dp > 1:
        size = sum(unit.parameter_bytes for unit in profile.units[partition.weights[k] : partition.weights[k + 1]])
        waits = exposed_exchange(workers, k, np.array([size]), np.array([1e3 * (weight or backward)]))
        update += float(waits[0]) / 1e3 + workers.links.copy * all_reduce(workers, k).copied * size
    return StageTime(load.forward, backward, update, weight)


class _Messages:
    """Combines the values between each two workers into messages, by phase and by the time when they are made.

    Attributes:
        weights_phase: the phase that makes weight gradients: W, or B if they are not separate.
    """

    def __init__(self, profile: Profile, partition: Partition, ratios: Ratios, schedule: Schedule) -> None:
        self.profile = profile
        self.weights_phase = schedule.runs_in("W")
        self.chain = not schedule.after
        self.reach = reach_of(schedule.graph)
        self.ratios = ratios
        self.cuts = partition.cuts
        self.forward = list(accumulate((u.forward_ms for u in profile.units), initial=0.0))
        self.owner = {
            chain: _workers(bounds) for chain, bounds in (("F", self.cuts.forward), ("B", self.cuts.backward))
        }
        self.combined: dict[tuple[_Key, int], tuple[float, float, float]] = {}

    def all(self) -> Iterator[Message]:
        """Every message; on the same link, activations and gradients come before saved values."""
        chains: tuple[tuple[Phase, Sequence[Value]], ...] = (
            ("F", self.profile.activations),
            ("B", self.profile.gradients),
        )
        for chain, values in chains:
            owner = self.owner[chain]
            for value in values:
                if any(owner[reader] != owner[value.producer] for reader in value.readers):
                    self._value(value, chain, chain == "F")
        yield from self._messages()
        self.combined = {}
        self._saved()
        yield from self._messages()

    def _messages(self) -> Iterator[Message]:
        for (way, _), (size, made_at, needed) in sorted(self.combined.items()):
            kind = "saved" if way[1] == "F" != way[3] else ""
            yield Message(*way, size, made_at, needed, turn=turn_of(kind, size))

    def _share(self, worker: int, unit: int) -> float:
        """The share of a worker's forward that is over when a unit begins."""
        first, end = self.cuts.forward[worker : worker + 2]
        whole = self.forward[end] - self.forward[first]
        return min(max((self.forward[unit] - self.forward[first]) / whole, 0.0), 1.0) if whole else 0.0

    def _save(self, source: int, target: int, size: float, made_at: float, phase: Phase = "B") -> None:
        """Bytes that a forward saves for a backward on another worker; a later worker gets activations first."""
        self._add((source, "F", target, phase), self.ratios.saved * size, 1.0 if source < target else made_at)

    def _add(self, key: _Key, size: float, made_at: float = 1.0, needed: float = 0.0) -> None:
        if key[0] != key[2] and size:
            part = key, int(made_at * PARTS)
            before = self.combined.get(part, (0.0, 0.0, 1.0))
            self.combined[part] = (before[0] + size, max(before[1], made_at), min(before[2], needed))

    def _value(self, value: Value, chain: Phase, forward: bool) -> None:
        """A value that is sent from reader to reader: each forwards it when it has arrived (`handed_on_by`)."""
        owner = self.owner[chain]
        home = owner[value.producer]
        starts = value.batch and not self.chain  # known when worker 0 begins
        made_at_home = 0.0 if starts else self._share(home, value.producer + 1) if forward else 1.0
        targets = sorted({owner[reader] for reader in value.readers} - {home}, reverse=not forward)
        by = handed_on_by(home, targets, self.reach, value.batch)
        arrived: list[tuple[int, float]] = []
        for target, before in zip(targets, by, strict=True):
            source, made_at = (home, made_at_home) if before is None else arrived[before]
            needed = 0.0
            if forward:
                needed = self._share(target, min(r for r in value.readers if owner[r] == target))
            ratio = self.ratios.activation if forward else self.ratios.gradient
            self._add((source, chain, target, chain), ratio * value.bytes, made_at, needed)
            arrived.append((target, needed if forward else 1.0))

    def _saved(self) -> None:
        """Saved values, what recomputation needs, and gradients that W reads from B on another worker."""
        again = self.cuts.recomputes
        placed = zip(self.owner["F"], self.owner["B"], _workers(self.cuts.weights), strict=True)
        for i, (unit, (source, backward, weight)) in enumerate(zip(self.profile.units, placed, strict=True)):
            if source == backward == weight:
                continue
            of_b = 0.0 if again(backward, i) else unit.saved_bytes - unit.weight_saved_bytes
            of_w = unit.saved_bytes if unit.weight_ms and not again(weight, i) else 0.0
            made_at = self._share(source, i + 1)
            if backward == weight:
                self._save(source, backward, max(of_b, of_w), made_at)
            else:
                self._save(source, backward, of_b, made_at)
                self._save(source, weight, of_w, made_at, self.weights_phase)
                if unit.weight_ms:
                    self._add((backward, "B", weight, self.weights_phase), self.ratios.gradient * unit.gradient_bytes)
            for k in {backward, weight}:
                if again(k, i):
                    self._save(source, k, unit.fixed_bytes, made_at)
        for k, first, _ in self.cuts.recompute:
            self._entering(k, first)

    def _entering(self, k: int, first: int) -> None:
        """The activations that enter a run of units that worker k recomputes."""
        for value in self.profile.activations:
            if value.producer < first <= max(value.readers):
                source = self.owner["F"][value.producer]
                self._save(source, k, value.bytes, self._share(source, value.producer + 1))


def _workers(bounds: Sequence[int]) -> list[int]:
    """The worker of every unit."""
    return [k for k, (first, end) in enumerate(pairwise(bounds)) for _ in range(first, end)]


def _weight_copies(profile: Profile, partition: Partition, schedule: Schedule, ratio: float) -> Iterator[WeightCopy]:
    sizes: dict[tuple[int, int], float] = {}
    phases: dict[tuple[int, int], set[Phase]] = {}
    cuts = partition.cuts
    placed = zip(*map(_workers, (cuts.weights, cuts.forward, cuts.backward)), strict=True)
    for unit, (owner, *reading) in zip(profile.units, placed, strict=True):
        if not unit.parameter_bytes or reading == [owner, owner]:
            continue
        readers = dict(zip(READING, reading, strict=True))
        for reader in {*readers.values()} - {owner}:
            sizes[owner, reader] = sizes.get((owner, reader), 0.0) + unit.parameter_bytes
            phases.setdefault((owner, reader), set()).update(phase for phase in READING if readers[phase] == reader)
    if not sizes:
        return
    versions = versions_of(schedule)
    for (owner, reader), size in sorted(sizes.items()):
        lags = tuple(
            (phase, tuple(versions.lag(phase, reader, owner, j) for j in range(schedule.microbatches)))
            for phase in sorted(phases[owner, reader])
        )
        yield WeightCopy(owner, reader, lags, ratio * size, turn_of("weights", size))
