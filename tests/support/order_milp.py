"""The fastest synchronous pipeline of a small chain of units, by mixed-integer programming: the judge of the search.

What it optimises, with scipy's HiGHS. Given are units in a chain with times F, B and W, equal workers, microbatches, a
latency for each message between neighbours, and how many microbatches a worker may hold. Free are

- the cuts: which worker runs F, B and W of which units, contiguous and in order; all at one place ('same'), W with B
  ('bidirectional'), or each by itself, W of a unit on the worker of its B or an earlier one ('three-way');
- the order of each worker's actions: any, in which F comes before B before W of a microbatch, and the F, the B and the
  W each in the order of microbatches. These two orders lose nothing, since microbatches are equal.

F waits for F on the previous worker, B for B on the next one, the latency later. No message takes part of a link.
Minimised is the longest time of a worker from its first F to its last W. That is the period of minibatches that follow
each other with a flush on each worker of its own, as ZB-H2 has them: the worker that takes longest never waits between
two minibatches, and all others have room to shift. It is Qi et al.'s integer program (Zero Bubble Pipeline Parallelism,
2024, appendix G) with the cuts as variables, and with microbatches held from F to W as memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

Times = Sequence[tuple[float, float, float]]
PHASES = "FBW"


@dataclass
class _Model:
    """Rows of a program in the making: each says that a sum of variables is at least a number."""

    integer: list[int] = field(default_factory=list)
    most: list[float] = field(default_factory=list)
    rows: list[tuple[Mapping[int, float], float]] = field(default_factory=list)

    def variable(self, most: float, integer: bool = False) -> int:
        self.integer.append(int(integer))
        self.most.append(most)
        return len(self.most) - 1

    def at_least(self, terms: Mapping[int, float], least: float) -> None:
        self.rows.append((terms, least))

    def least(self, objective: int, limit: float) -> tuple[float, float]:
        """The smallest value of a variable, and a proved lower bound of it."""
        data, row, column = [], [], []
        for i, (terms, _) in enumerate(self.rows):
            for j, factor in terms.items():
                data.append(factor)
                row.append(i)
                column.append(j)
        matrix = csr_array((data, (row, column)), shape=(len(self.rows), len(self.most)))
        found = milp(
            np.eye(1, len(self.most), objective)[0],
            integrality=np.array(self.integer),
            bounds=Bounds(0, np.array(self.most)),
            constraints=LinearConstraint(matrix, np.array([least for _, least in self.rows]), np.inf),
            options={"time_limit": limit, "mip_rel_gap": 1e-4},
        )
        assert found.x is not None, found.message
        return float(found.fun), float(found.mip_dual_bound)


def fastest(
    times: Times,
    workers: int,
    microbatches: int,
    mode: str,
    *,
    latency: float = 0.0,
    held: int | None = None,
    limit: float = 60.0,
) -> tuple[float, float]:
    """The least period of a minibatch over all cuts and orders, and what was proved of it, in the units of `times`.

    Args:
        times: F, B and W of each unit.
        held: the most microbatches that a worker holds something of at once; None for no limit.
        limit: seconds of search.
    """
    model = _Model()
    horizon = 2 * (microbatches * sum(map(sum, times)) + 2 * workers * latency)
    period = model.variable(horizon)
    spent = _cuts(model, times, workers, mode)
    start = {
        (phase, k, j): model.variable(horizon) for phase in PHASES for k in range(workers) for j in range(microbatches)
    }

    def after(one: tuple[str, int, int], other: tuple[str, int, int], more: float = 0.0, unless: int = -1) -> None:
        """`one` begins after the end of `other`, unless a variable is 1 (or, given as ~variable, 0)."""
        terms = {start[one]: 1.0, start[other]: -1.0}
        for variable, factor in spent[other[0], other[1]].items():
            terms[variable] = terms.get(variable, 0.0) - factor
        constant = sum(times[u][PHASES.index(other[0])] for u in _last(other[1], workers, times)) + more
        if unless >= 0:
            terms[unless] = horizon
        elif unless < -1:
            terms[~unless] = -horizon
            constant -= horizon
        model.at_least(terms, constant)

    for k in range(workers):
        order: dict[tuple[str, int, str, int], int] = {}
        for j in range(microbatches):
            if k:
                after(("F", k, j), ("F", k - 1, j), latency)
            if k < workers - 1:
                after(("B", k, j), ("B", k + 1, j), latency)
            after(("B", k, j), ("F", k, j))
            after(("W", k, j), ("B", k, j))
            for phase in PHASES if j else ():
                after((phase, k, j), (phase, k, j - 1))
        for early, late in ("FB", "BW", "FW"):
            for i in range(microbatches):
                for j in range(i):  # which comes first, the early phase of a later microbatch i or the late one of j?
                    first = order[early, i, late, j] = model.variable(1, integer=True)
                    after((late, k, j), (early, k, i), unless=~first)
                    after((early, k, i), (late, k, j), unless=first)
        for i in range(microbatches if held is not None else 0):
            assert held is not None
            model.at_least({order["F", i, "W", j]: -1.0 for j in range(i)}, i + 1 - held - i)
        terms = {period: 1.0, start["F", k, 0]: 1.0, start["W", k, microbatches - 1]: -1.0}
        for variable, factor in spent["W", k].items():
            terms[variable] = terms.get(variable, 0.0) - factor
        model.at_least(terms, sum(times[u][2] for u in _last(k, workers, times)))
    return model.least(period, limit)


def _last(worker: int, workers: int, times: Times) -> range:
    """The units whose times are constants of a worker: the last one has all, less those of the workers before it."""
    return range(len(times)) if worker == workers - 1 else range(0)


def _cuts(model: _Model, times: Times, workers: int, mode: str) -> dict[tuple[str, int], dict[int, float]]:
    """The time of each phase on each worker, as factors of variables: 1 where a unit is on a worker or before it."""
    chains = {"same": "FFF", "bidirectional": "FBB", "three-way": "FBW"}[mode]
    before: dict[str, list[list[int]]] = {}
    for chain in dict.fromkeys(chains):
        rows = [[model.variable(1, integer=True) for _ in times] for _ in range(workers - 1)]
        for row in rows:
            for one, following in pairwise(row):
                model.at_least({one: 1.0, following: -1.0}, 0.0)
        for row, wider in pairwise(rows):
            for one, other in zip(row, wider, strict=True):
                model.at_least({other: 1.0, one: -1.0}, 0.0)
        before[chain] = rows
    if mode == "three-way":
        for backward, weights in zip(before["B"], before["W"], strict=True):
            for one, other in zip(backward, weights, strict=True):
                model.at_least({other: 1.0, one: -1.0}, 0.0)
    spent: dict[tuple[str, int], dict[int, float]] = {}
    for number, (phase, chain) in enumerate(zip(PHASES, chains, strict=True)):
        for k in range(workers):
            terms: dict[int, float] = {}
            for u, unit in enumerate(times):
                if k < workers - 1:
                    terms[before[chain][k][u]] = unit[number]
                if k:
                    terms[before[chain][k - 1][u]] = -unit[number]
            spent[phase, k] = terms
    return spent
