"""Times that were measured at different moments, made comparable by the first program, which is run again with each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from cached import captured
from fxpipe.passes.fold import Fold
from fxpipe.passes.units import Units

from fxpipe.costs import yardstick as module
from fxpipe.costs.node_costs import node_costs
from fxpipe.costs.node_costs_file import MeasuredCosts
from fxpipe.costs.node_times import fastest_in_turn
from fxpipe.costs.yardstick import Yardstick
from fxpipe.ir.program import Program, info
from fxpipe.ir.transform import run_passes


def program_of(name: str) -> Program:
    return run_passes(captured(name)[2], [Fold(), Units()])


def sums(program: Program, costs: MeasuredCosts) -> dict[str, float]:
    return {p: sum(costs.seconds[n.name] for n in program if info(n).phase == p) for p in ("F", "B")}


def test_a_slow_moment_is_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second program was measured when the machine was three times as slow: in turn it takes twice the first."""
    first, second = program_of("conv"), program_of("function")
    costs = node_costs(first, repeats=3)
    slow = node_costs(second, repeats=3)
    before = dict(slow.seconds)

    def in_turn(programs: Sequence[Program], threads: int | None = None) -> list[dict[str, float]]:
        assert list(programs) == [second, first]
        assert threads == 1
        return [{"F": 2.0, "B": 6.0}, {"F": 1.0, "B": 2.0}]

    monkeypatch.setattr(module, "fastest_in_turn", in_turn)
    yardstick = Yardstick()
    assert yardstick.scaled(first, costs, 1) is costs
    found = yardstick.scaled(second, slow, 1)
    of_first, of_second = sums(first, costs), sums(second, found)
    assert of_second == pytest.approx({"F": 2 * of_first["F"], "B": 3 * of_first["B"]})
    factors = {p: of_second[p] / sums(second, slow)[p] for p in ("F", "B")}
    assert found.seconds == pytest.approx({n.name: before[n.name] * factors[info(n).phase] for n in second})
    assert dataclasses.replace(found, seconds=slow.seconds) == slow


def test_programs_in_turn() -> None:
    """The same program twice takes about as long as itself, whatever the machine does meanwhile."""
    program = program_of("conv")
    one, two = fastest_in_turn((program, program), threads=1)
    assert one.keys() == two.keys() == {"F", "B"}
    for phase in ("F", "B"):
        assert 0 < one[phase] < 2 * two[phase] < 4 * one[phase]
