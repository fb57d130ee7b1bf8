"""Makes measurements of several programs comparable, although each is made at another moment.

A shared machine is faster at one moment than at the next, by far more than the difference between two numbers of
microbatches. So every program after the first is run in turn with the first one: that shows how much longer it takes at
the same moment, and its nodes' times are scaled accordingly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fxpipe.costs.node_costs_file import MeasuredCosts
from fxpipe.costs.node_times import fastest_in_turn
from fxpipe.ir.program import Program, info
from fxpipe.plan.cost_records import OptimizerCosts


class Yardstick:
    """The first measured program, with which all later ones are compared.

    Attributes:
        optimizer: the costs of the optimizer, which are the same for all; None until they are known.
    """

    def __init__(self) -> None:
        self._first: tuple[Program, Mapping[str, float]] | None = None
        self.optimizer: OptimizerCosts | None = None

    def scaled(self, program: Program, costs: MeasuredCosts, threads: int | None = None) -> MeasuredCosts:
        """A program's costs as they would have been when the first one's were measured.

        Args:
            threads: CPU threads, with which the costs were measured.

        Raises:
            CaptureError: as `measure`.
        """
        own = _by_phase(program, costs.seconds)
        if self._first is None:
            self._first = program, own
            return costs
        first, of_first = self._first
        here, there = fastest_in_turn((program, first), threads)
        wanted = {p: of_first[p] * here[p] / there[p] if there[p] else own[p] for p in own}
        factors = {p: wanted[p] / own[p] if own[p] else 1.0 for p in own}
        seconds = {n.name: costs.seconds[n.name] * factors[info(n).phase] for n in program}
        return replace(costs, seconds=seconds)


def _by_phase(program: Program, seconds: Mapping[str, float]) -> dict[str, float]:
    found = {"F": 0.0, "B": 0.0}
    for node in program:
        found[info(node).phase] += seconds[node.name]
    return found
