"""Edge timings against the emitted stages: with a second a call, shares can be counted in their lines."""

from __future__ import annotations

import re

import pytest
from cached import captured, cuts, lowered

from fxpipe.ir.program import Program, info
from fxpipe.ir.wire import is_recv, is_send
from fxpipe.passes.analysis.edge_timings import edge_timings
from fxpipe.plan.cost_records import EdgeTiming

LINE = re.compile(
    r'^    (?:(?P<sends>comm\.send)|\w+ = (?P<receives>comm\.recv))\("(?P<name>[^"]+)"|^    \w+ = (?!comm)', re.M
)


def wired(name: str, shift: int) -> Program:
    """A case cut for three workers, backward `shift` modules later, with a second for each call."""
    made: list[Program] = []
    case, _, _ = captured(name)
    lowered(
        name, workers=3, **cuts(case, 3, shift), outline=False, observers=[lambda applied: made.append(applied.program)]
    )
    for node in made[-1]:
        info(node).seconds = 0.0 if is_send(node) or is_recv(node) else 1.0
    return made[-1]


def counted(program: Program) -> dict[str, EdgeTiming]:
    """The same from the text: the lines of other kinds, and of this kind, above each send and each receive."""
    made: dict[str, tuple[float, int]] = {}
    needed: dict[str, tuple[float, int]] = {}
    for source in program.files.values():
        for function in re.split(r"^def ", source, flags=re.M)[1:]:
            lines = list(LINE.finditer(function))
            total = sum(not line["name"] for line in lines)
            above, place = 0, 0
            for line in lines:
                if line["name"]:
                    (made if line["sends"] else needed)[line["name"]] = above / total, place
                    place += 1
                else:
                    above += 1
    return {
        name: EdgeTiming(name, share, needed[name][0], (place, needed[name][1]))
        for name, (share, place) in made.items()
    }


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("name", ["gpt", "unet"])
def test_shares_are_those_of_the_emitted_lines(name: str, shift: int) -> None:
    program = wired(name, shift)
    found = edge_timings(program)
    assert {timing.name: timing for timing in found} == counted(program)
    assert {timing.name for timing in found} == {edge.name for edge in program.wires.values()}
    assert len({timing.made for timing in found}) > 2
    assert len({timing.needed for timing in found}) > 2


def test_time_counts_and_not_the_number_of_calls() -> None:
    program = wired("unet", 1)
    for number, node in enumerate(program):
        if not is_send(node) and not is_recv(node):
            info(node).seconds = float(number % 7)
    for timing in edge_timings(program):
        for is_end, share in ((is_send, timing.made), (is_recv, timing.needed)):
            (end,) = [n for n in program if is_end(n) and program.wires[n.name].name == timing.name]
            place = (info(end).worker, info(end).phase)
            part = [n for n in program if (info(n).worker, info(n).phase) == place]
            seconds = [info(n).seconds or 0.0 for n in part]
            assert share == sum(seconds[: part.index(end)]) / sum(seconds)


def test_where_nothing_takes_time_values_are_made_last_and_needed_first() -> None:
    program = wired("unet", 0)
    for node in program:
        info(node).seconds = 0.0
    found = edge_timings(program)
    assert found
    assert {(timing.made, timing.needed) for timing in found} == {(1.0, 0.0)}
