"""What candidate workers run, exchange and hold between two boundaries, whichever worker of a plan they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from fxpipe.planner.sums_over_runs import Floats, Places, Span, back, both, front, total
from fxpipe.planner.unit_sums import MismatchedRuns, UnitSums


class Holdings(NamedTuple):
    """The memory of every candidate at one level of `Unit.levels`, in bytes; at level 0 nothing is computed again.

    Attributes:
        owned: weights, which count `Workers.owned_factor` times.
        always: what does not depend on the worker.
        exchanged, from_front: what is sent or received for backward, for each microbatch in flight; from an earlier
            worker, as long as it is there.
        kept: for its own backward, for each microbatch in flight.
        deferred: for each between B and W.
        once: what is computed again.
        again_ms: milliseconds at speed 1 that this takes.
    """

    owned: Floats
    always: Floats
    exchanged: Floats
    from_front: Floats
    kept: Floats
    deferred: Floats
    once: Floats
    again_ms: Floats


class Candidates:
    """Candidate workers between boundaries, row by row. What only some ask for is computed when it is asked for.

    Args:
        costs: the sums over the profile's units.
        begins, ends: rows (f, b, w, r), shape (n, 4); no position of an end is before that of its begin. `remember`
            must have been called with their cuts.

    Attributes:
        forward, backward, weight: units whose F, B and W they run; `weight` from the first that has a W to the last.
        work_ms: F, B, W and the update of a microbatch, at speed 1.
        update_ms: of it, the update.
        owned: bytes of weights.
        activation, gradient: bytes that are received.
    """

    def __init__(self, costs: UnitSums, begins: Places, ends: Places) -> None:
        self.costs, self.begins, self.ends = costs, begins, ends
        self.forward: Span = (begins[:, 0], ends[:, 0])
        self.backward: Span = (begins[:, 1], ends[:, 1])
        self.weight = costs.owning((begins[:, 2], ends[:, 2]))
        self.work_ms = costs.load(ends) - costs.load(begins)
        self.update_ms = total(costs.update, self.weight)
        self.owned = total(costs.parameters, self.weight)
        self.activation = costs.received(0, begins[:, 0], ends[:, 0])
        self.gradient = costs.received(1, costs.count - ends[:, 1], costs.count - begins[:, 1])

    def __len__(self) -> int:
        return len(self.begins)

    def take(self, rows: Places) -> Candidates:
        """Some of them; what is known of them stays known."""
        taken = copy(self)
        for name, value in vars(self).items():
            if name != "costs":
                vars(taken)[name] = for_each(lambda known: known[rows], value)
        return taken

    @cached_property
    def forward_ms(self) -> Floats:
        """F at speed 1."""
        return total(self.costs.forward, self.forward)

    @cached_property
    def backward_ms(self) -> Floats:
        """B at speed 1, without W."""
        return total(self.costs.backward, self.backward)

    @cached_property
    def handed(self) -> tuple[Floats, Floats]:
        """Bytes of gradients that W reads of B elsewhere, and that B makes for W elsewhere."""
        sums = self.costs.handed
        shared = total(sums, both(self.weight, self.backward))
        return total(sums, self.weight) - shared, total(sums, self.backward) - shared

    @cached_property
    def copies_in(self) -> tuple[Floats, Floats]:
        """Bytes of weights that are read here and owned on an earlier worker, and on a later one."""
        first, end = self.weight
        return (
            self._read(front(self.forward, first), front(self.backward, first)),
            self._read(back(self.forward, end), back(self.backward, end)),
        )

    @cached_property
    def copies_out(self) -> tuple[Floats, Floats]:
        """Bytes of weights that are owned here and read on an earlier worker, and on a later one."""
        forward, backward, weight = self.forward, self.backward, self.weight
        return (
            self._read(front(weight, forward[0]), front(weight, backward[0])),
            self._read(back(weight, forward[1]), back(weight, backward[1])),
        )

    def _read(self, forward: Span, backward: Span) -> Floats:
        sums = self.costs.parameters
        return total(sums, forward) + total(sums, backward) - total(sums, both(forward, backward))

    @cached_property
    def from_front(self) -> MismatchedRuns:
        """B or W here, F on an earlier worker."""
        f, again = self.begins[:, 0], self.begins[:, 3]
        return self.costs.run(front(self.backward, f), front(self.weight, f), again)

    @cached_property
    def from_back(self) -> MismatchedRuns:
        """B or W here, F on a later worker."""
        f, again = self.ends[:, 0], self.ends[:, 3]
        return self.costs.run(back(self.backward, f), back(self.weight, f), again)

    @cached_property
    def to_front(self) -> MismatchedRuns:
        """F here, B or W on an earlier worker."""
        forward = self.forward
        return self.costs.run(front(forward, self.backward[0]), front(forward, self.weight[0]), self.begins[:, 3])

    @cached_property
    def to_back(self) -> MismatchedRuns:
        """F here, B or W on a later worker."""
        forward = self.forward
        return self.costs.run(back(forward, self.backward[1]), back(forward, self.weight[1]), self.ends[:, 3])

    @cached_property
    def repeated_ms(self) -> Floats:
        """Forward of mismatched units that is computed again here, at speed 1."""
        runs = (self.from_front, self.from_back)
        return sum((np.where(run.again, run.forward_ms, 0.0) for run in runs), np.zeros(len(self)))

    def holdings(self, levels: Iterable[int]) -> tuple[Holdings, ...]:
        """What they hold at some levels."""
        costs, inside = self.costs, both(self.forward, self.backward)
        frozen = total(costs.frozen, self.forward) + total(costs.frozen, self.backward) - total(costs.frozen, inside)
        peaks = [costs.temporary.over(span) for span in (self.forward, self.backward, self.weight)]
        always = sum(self.copies_in, frozen) + np.maximum.reduce(peaks)
        for run in (self.from_front, self.from_back):  # what was computed again exists at once, for one microbatch
            always = always + np.where(run.again, run.saved, 0.0)
        exchanged = self.to_front.size + self.to_back.size + self.from_back.size
        plain = costs.saved.of(inside, both(self.forward, self.weight))
        # what only W reads, of units whose B is elsewhere
        elsewhere = plain - costs.saved.of(inside, both(inside, self.weight))
        shared = (self.owned, always, exchanged, self.from_front.size)
        return tuple(Holdings(*shared, *costs.kept(level, inside, plain, elsewhere)) for level in levels)


def for_each(change: Callable[..., Any], *values: Any) -> Any:
    """A tuple, of tuples of arrays, of what `change` makes of the arrays at the same place in each of such tuples."""
    if isinstance(values[0], np.ndarray):
        return change(*values)
    parts = [for_each(change, *of_each) for of_each in zip(*values, strict=True)]
    return type(values[0])(*parts) if hasattr(values[0], "_fields") else tuple(parts)
