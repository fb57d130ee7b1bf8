"""What every unit saves at a few levels of recomputation: the planner's view of `recompute`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import fx

from fxpipe.ir.program import AGAIN, Again, Program, info, size_of, value
from fxpipe.passes.analysis.left_values import copies_held, memory_of
from fxpipe.passes.analysis.sources import sources_of
from fxpipe.passes.cut import Cut
from fxpipe.passes.recompute import STEPS, Choices
from fxpipe.passes.rematerialize import Rematerialize
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.profile import SavingLevel

LEVELS = 5
"""The most levels, without the level that saves everything."""


def levels_of_units(program: Program) -> list[tuple[SavingLevel, ...]]:
    """For each unit of an uncut program, its levels; the same number for all, perhaps none.

    They are minimum cuts of the whole graph, as for one worker. A worker can make the same choice for any run of units
    if it also keeps what enters the run.
    """
    count = len(program.units)
    cuts = Cuts((0, count), (0, count))
    placed = Cut(cuts)(program)
    plain = Rematerialize()(placed)
    choices = Choices(placed, plain, 0, LEVELS + 1)
    sources = sources_of(program)
    anywhere = frozenset(n.name for n in sources.cheap | sources.fixed)
    seconds = _seconds(plain, count)
    levels = []
    for step in range(1, choices.last // STEPS + 1):
        names = choices.names(step * STEPS)
        again = Rematerialize()(replace(placed, again=(Again(tuple(names)),)))
        levels.append(_level(again, names, anywhere, seconds))
    return list(zip(*levels, strict=True)) if levels else [()] * count


def _seconds(program: Program, count: int) -> list[float]:
    """The seconds of backward, by unit."""
    seconds = [0.0] * count
    for node in _backward(program):
        seconds[info(node).unit] += info(node).seconds or 0.0
    return seconds


def _backward(program: Program) -> Iterable[fx.Node]:
    return (node for node in program if info(node).phase != "F")


def _level(
    program: Program, names: frozenset[str], anywhere: frozenset[str], seconds: Sequence[float]
) -> list[SavingLevel]:
    """What each unit saves at one level, of a program on one worker whose backward computes `names` again.

    What is made `anywhere` is neither saved nor sent. `seconds` are of backward, by unit, if nothing is computed again.
    """
    saved, repeated, deferred, alive = ([0.0] * len(seconds) for _ in range(4))
    inputs = {b.node for b in program.batch if b.node}
    readers: dict[fx.Node, list[fx.Node]] = {}  # of a value or its views
    for node in _backward(program):
        for source in node.all_input_nodes:
            readers.setdefault(memory_of(source), []).append(node)
    for memory, nodes in readers.items():
        size = size_of(value(memory))
        if memory.op == "placeholder":
            is_saved = memory.name in inputs
        else:
            is_saved = info(memory).phase == "F" and memory.name not in anywhere
        if is_saved:
            saved[max(info(n).unit for n in nodes)] += size
        elif memory.meta.get(AGAIN) in names:
            outside = [n for n in nodes if n.meta.get(AGAIN) not in names]
            repeated[info(memory).unit] += size if outside else 0.0
            deferred[info(memory).unit] += size if any(info(n).weight for n in outside) else 0.0
    most = 0  # of what was computed again, for the next call that is not a copy
    for node, held in copies_held(list(_backward(program)), names):
        most = max(most, held)
        if node.meta.get(AGAIN) not in names:
            alive[info(node).unit] = max(alive[info(node).unit], most)
            most = 0
    now = _seconds(program, len(seconds))
    again = [1e3 * max(after - before, 0.0) for after, before in zip(now, seconds, strict=True)]
    return [SavingLevel(*row) for row in zip(saved, again, repeated, alive, deferred, strict=True)]
