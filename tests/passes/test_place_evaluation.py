"""The placement of least cost, against all placements."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from fxpipe.passes.place_evaluation import Held, Passed, cheapest
from hypothesis import given
from hypothesis import strategies as st


def cost(cuts: Sequence[int], held: Sequence[Held], values: Sequence[Passed]) -> tuple[int, int]:
    """Bytes of held tensors that move, and bytes of values that cross: the definition, counted worker by worker."""

    def worker(unit: int) -> int:
        return next(k for k in range(len(cuts) - 1) if cuts[k] <= unit < cuts[k + 1])

    moved = sum(t.bytes * len({worker(u) for u in t.readers} - {t.owner}) for t in held)
    homes = [0 if v.unit < 0 else worker(v.unit) for v in values]
    passed = sum(v.bytes * len({worker(u) for u in v.readers} - {home}) for v, home in zip(values, homes, strict=True))
    return moved, passed


def all_cuts(workers: int, units: int) -> list[tuple[int, ...]]:
    inner = itertools.combinations_with_replacement(range(units + 1), workers - 1)
    return [(0, *positions, units) for positions in inner]


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, int, list[Held], list[Passed]]:
    workers, units = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    sizes = st.integers(1, 6)
    readers = st.sets(st.integers(0, units - 1), min_size=1, max_size=3).map(lambda s: tuple(sorted(s)))
    held = draw(st.lists(st.builds(Held, sizes, st.integers(0, workers - 1), readers), max_size=6))
    values = []
    for unit in draw(st.lists(st.integers(-1, units - 2), max_size=8)):
        later = st.sets(st.integers(unit + 1, units - 1), min_size=1, max_size=3)
        values.append(Passed(draw(sizes), unit, tuple(sorted(draw(later)))))
    return workers, units, held, values


@given(problems())
def test_no_placement_costs_less(problem: tuple[int, int, list[Held], list[Passed]]) -> None:
    workers, units, held, values = problem
    found = cheapest(workers, units, held, values)
    assert found in all_cuts(workers, units)
    assert cost(found, held, values) == min(cost(cuts, held, values) for cuts in all_cuts(workers, units))


def test_many_units_and_workers_take_moments() -> None:
    workers, units = 64, 3000
    held = [Held(100, u * workers // units, (u,)) for u in range(units)]
    held.append(Held(5000, 0, (0, units - 1)))
    found = cheapest(workers, units, held, [Passed(10, u, (u + 1,)) for u in range(units - 1)])
    assert cost(found, held, []) == (5000, 0)
