"""Which values to keep and which to compute again: the least cost at a price for kept bytes, by a minimum cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

_MOST = 1 << 28
"""The sum of all finite capacities: flows are 32-bit."""

_LARGE = 1 << 29
"""The capacity of edges that no cut may cross."""

LEAST = 1e4
"""The price at which all time is worth a ten-thousandth of all bytes."""


@dataclass(frozen=True)
class Item:
    """A value of forward that backward may need.

    `seconds` compute it again from its inputs, inf if that is impossible. `bytes` keep it, inf if it cannot be kept by
    itself, such as a view or a tuple. Its `inputs` are positions of earlier items, without values that exist anyway.
    """

    seconds: float
    bytes: float
    inputs: tuple[int, ...] = ()
    needed: bool = False


@dataclass(frozen=True)
class Keeping:
    """One choice: the positions of the items that are computed again and of those that are kept, and their cost."""

    repeated: frozenset[int]
    kept: frozenset[int]
    seconds: float
    bytes: float


@dataclass(frozen=True)
class KeepOrRepeat:
    """The choice for some items, each after its inputs.

    Every needed item is kept, or computed again from inputs that are kept or computed again. That is a cut of a graph
    in which each item v is an edge in(v) → out(v), after the graph of torch's min-cut partitioner (Chen 2022, "Min-cut
    optimal recomputation", torch/_functorch/partitioners.py). The sink's side exists in backward:

        in(v) → out(v)     bytes(v) · price: cut if v exists only because it was kept
        source → in(v)     seconds(v): cut if v is computed again
        out(u) → in(v)     not to be cut, for each input u: v is computed again only if u exists
        out(v) → in(v)     not to be cut: what is computed again exists
        out(v) → sink      not to be cut, if v is needed

    Unlike torch's graph this one also counts time, so a minimum cut is a point of the lower convex hull of seconds
    against bytes (a Lagrangian relaxation), and prices from 0 to `LEAST` give all of them.
    """

    items: Sequence[Item]
    _seconds: float = field(init=False)
    _bytes: float = field(init=False)

    def __post_init__(self) -> None:
        for name in ("seconds", "bytes"):
            finite = (getattr(item, name) for item in self.items)
            object.__setattr__(self, f"_{name}", sum(v for v in finite if math.isfinite(v)) or 1.0)

    def at(self, price: float) -> Keeping:
        """The least seconds + price · bytes, each as a share of the sum over all items; of equal choices, the one that
        computes least again.
        """
        from scipy.sparse import csr_matrix
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        count = len(self.items)
        source, sink = 2 * count, 2 * count + 1
        scale = _MOST / (1.0 + price)
        edges: dict[tuple[int, int], int] = {}
        for v, item in enumerate(self.items):
            into, out = 2 * v, 2 * v + 1
            edges[into, out] = _capacity(scale * price * item.bytes / self._bytes)
            edges[source, into] = _capacity(scale * item.seconds / self._seconds)
            edges[out, into] = _LARGE
            edges.update({(2 * u + 1, into): _LARGE for u in item.inputs})
            if item.needed:
                edges[out, sink] = _LARGE
        rows, columns = np.array(list(edges), dtype=np.int32).reshape(-1, 2).T
        sizes = np.fromiter(edges.values(), dtype=np.int32, count=len(edges))
        graph = csr_matrix((sizes, (rows, columns)), shape=(2 * count + 2,) * 2)
        flow = maximum_flow(graph, source, sink)
        if flow.flow_value >= _LARGE:
            raise ValueError("a needed item can be neither kept nor computed again")
        left = graph - flow.flow
        left.data = np.maximum(left.data, 0)
        left.eliminate_zeros()
        there = {int(n) for n in breadth_first_order(left.T.tocsr(), sink, return_predecessors=False)}
        repeated = frozenset(v for v in range(count) if 2 * v in there)
        return self.keeping(repeated)

    def keeping(self, repeated: frozenset[int]) -> Keeping:
        """The cost of a choice that computes these items again, and keeps the others that are needed."""
        needed = {u for v in repeated for u in self.items[v].inputs}
        needed.update(v for v, item in enumerate(self.items) if item.needed)
        kept = frozenset(needed - repeated)
        return Keeping(
            repeated,
            kept,
            sum(self.items[v].seconds for v in repeated),
            sum(self.items[v].bytes for v in kept),
        )

    def hull(self, most: int) -> list[Keeping]:
        """Choices from the fastest to the one that keeps least, each slower and smaller than the one before.

        They are on the lower convex hull of seconds against bytes; if it has more than `most` points, those that leave
        the smallest gaps between them.
        """
        choices = [self.at(0.0), self.at(LEAST)]
        if choices[1].bytes >= choices[0].bytes:
            return choices[:1]
        open_ = [0]  # the gaps that may have a point inside, by their start
        while open_ and len(choices) < most:
            i = max(open_, key=lambda i: choices[i].bytes - choices[i + 1].bytes)
            first, last = choices[i], choices[i + 1]
            price = (last.seconds - first.seconds) / self._seconds * self._bytes / (first.bytes - last.bytes)
            inner = self.at(price)
            is_new = first.bytes > inner.bytes > last.bytes and first.seconds <= inner.seconds < last.seconds
            open_.remove(i)
            if is_new:
                choices.insert(i + 1, inner)
                open_ = [*(j + (j > i) for j in open_), i, i + 1]
        return choices


def _capacity(size: float) -> int:
    return _LARGE if math.isinf(size) or math.isnan(size) else round(size)
