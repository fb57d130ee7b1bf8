"""Sums over the units of a profile, from which follows what runs of units compute, exchange and hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fxpipe.errors import CutError
from fxpipe.planner.profile import Profile, SavingLevel, Unit
from fxpipe.planner.sums_over_runs import Crossing, Floats, Maximum, Places, Span, Trim, both, hull, prefix, total


class MismatchedRuns(NamedTuple):
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


class SavedSums:
    """Bytes that forwards save for B and for W of the same units."""

    def __init__(self, units: Sequence[Unit]) -> None:
        of_b = [u.saved_bytes - u.weight_saved_bytes for u in units]
        of_w = [u.saved_bytes if u.weight_ms > 0 else 0.0 for u in units]
        self._of_b, self._of_w = prefix(of_b), prefix(of_w)
        self._of_both = prefix([size if u.weight_ms > 0 else 0.0 for size, u in zip(of_b, units, strict=True)])
        self._reads_for_b, self._reads_for_w = Trim([size > 0 for size in of_b]), Trim([size > 0 for size in of_w])

    def of(self, backward: Span, weight: Span) -> Floats:
        """What B of some units and W of some units read."""
        twice = total(self._of_both, both(backward, weight))
        return total(self._of_b, backward) + total(self._of_w, weight) - twice

    def hull(self, backward: Span, weight: Span) -> Span:
        """From the first of these units that saves something for them to the last."""
        return hull(self._reads_for_b(backward), self._reads_for_w(weight))


class UnitSums:
    """Sums over the units of a profile, for a number of microbatches.

    Raises:
        CutError: the profile has no units.
    """

    def __init__(self, profile: Profile, microbatches: int) -> None:
        self.profile = profile
        units = profile.units
        count = len(units)
        if not count:
            raise CutError("there are no units to cut")
        self.count = count
        self.forward = prefix([u.forward_ms for u in units])
        self.backward = prefix([u.backward_ms for u in units])
        self.weight = prefix([u.weight_ms + u.update_ms / microbatches for u in units])
        self.update = prefix([u.update_ms / microbatches for u in units])
        self.saved = SavedSums(units)
        self._fixed = prefix([u.fixed_bytes for u in units])
        self.handed = prefix([u.gradient_bytes if u.weight_ms > 0 else 0.0 for u in units])
        self.parameters = prefix([u.parameter_bytes for u in units])
        self.frozen = prefix([u.frozen_bytes for u in units])
        self.owning = Trim([u.weight_ms > 0 or u.parameter_bytes > 0 or u.update_ms > 0 for u in units])
        self.temporary = Maximum([u.temporary_bytes for u in units])
        self._levels = tuple(_LevelSums.of(level) for level in levels_of(profile))
        self._keeps_entering = any(u.levels for u in units)
        last = count - 1
        self.activations = Crossing(count, [(v.bytes, v.producer, v.readers) for v in profile.activations])
        self.gradients = Crossing(
            count, [(v.bytes, last - v.producer, [last - r for r in v.readers]) for v in profile.gradients]
        )
        self._entering = self.activations.total()  # bytes that a run from here on reads of earlier units
        self._leaving = self.gradients.total()[::-1]  # bytes of gradients that cross a position
        self._lookup: tuple[_CrossingBytes, ...] = ()

    def load(self, states: Places) -> Floats:
        """Work before boundaries, rows (f, b, w, …), in milliseconds at speed 1; without the policy's."""
        return self.forward[states[..., 0]] + self.backward[states[..., 1]] + self.weight[states[..., 2]]

    def remember(self, begins: Places, ends: Places) -> None:
        """Look up in advance what crosses between all these cuts; afterwards `price` may be called only for these."""
        count = self.count
        tables = (
            (self.activations, begins[:, 0], ends[:, 0]),
            (self.gradients, count - ends[:, 1], count - begins[:, 1]),
        )
        self._lookup = tuple(_CrossingBytes.of(count, *table) for table in tables)

    def received(self, chain: int, begins: Places, ends: Places) -> Floats:
        """Bytes of activations (chain 0) or gradients (1) that arrive at runs of units, in the chain's direction."""
        crossing = self._lookup[chain]
        return crossing.bytes[crossing.row[begins], crossing.column[ends]]

    def run(self, backward: Span, weight: Span, again: Places) -> MismatchedRuns:
        """A run of units with B or W on one side of a boundary and F on the other."""
        saved = self.saved.of(backward, weight)
        first, end = self.saved.hull(backward, weight)
        entering = np.where(end > first, self._entering[first] + total(self._fixed, (first, end)), 0.0)
        repeated = (again > 0) & (end > first)
        return MismatchedRuns(
            first, end, np.where(repeated, entering, saved), repeated, total(self.forward, (first, end)), saved
        )

    def kept(self, level: int, own: Span, plain: Floats, elsewhere: Floats) -> tuple[Floats, Floats, Floats, Floats]:
        """The last four columns of `Holdings` at a level.

        Args:
            own: units whose F and B a candidate has.
            plain: bytes that its own B and W read, if nothing is computed again.
            elsewhere: of them, those that W reads of other units.
        """
        if not level:
            nothing = np.zeros(len(plain))
            return plain, nothing, nothing, nothing
        sums = self._levels[level - 1]
        kept = total(sums.saved, own) + elsewhere
        if self._keeps_entering:
            kept = kept + np.where(own[1] > own[0], self._entering[np.minimum(own[0], self.count)], 0.0)
        once = np.minimum(sums.alive.over(own), total(sums.made, own))
        return kept, total(sums.deferred, own), once, total(sums.again, own)


class _CrossingBytes(NamedTuple):
    """Bytes between positions, and the row and the column of each position."""

    row: Places
    column: Places
    bytes: Floats

    @staticmethod
    def of(count: int, chain: Crossing, begins: Places, ends: Places) -> _CrossingBytes:
        places = np.unique(begins), np.unique(ends)
        at = [np.zeros(count + 1, dtype=np.int64) for _ in places]
        for numbers, positions in zip(at, places, strict=True):
            numbers[positions] = np.arange(len(positions))
        return _CrossingBytes(at[0], at[1], chain.table(*places))


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
    level = []
    for u, entering in zip(units, inputs, strict=True):
        kept = entering + u.fixed_bytes
        if kept < u.saved_bytes:
            of_weights = u.saved_bytes if u.weight_ms else 0.0
            level.append(SavingLevel(kept, u.forward_ms, u.saved_bytes, u.saved_bytes, of_weights))
        else:
            level.append(SavingLevel(u.saved_bytes, 0.0))
    return (tuple(level),)


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
