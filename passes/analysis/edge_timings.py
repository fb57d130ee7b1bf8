"""Where in a stage's code each value is sent and first needed: the emitted text no longer has the nodes' times."""

from __future__ import annotations

from fxpipe.ir.program import Program, info
from fxpipe.ir.wire import is_recv, is_send
from fxpipe.plan.cost_records import EdgeTiming
from fxpipe.plan.spec import Phase


def edge_timings(program: Program) -> tuple[EdgeTiming, ...]:
    """The timing of every edge of a wired program, by the nodes' seconds, in the order of the sends.

    Linear in nodes. If an action takes no time at all, its values are made at its end and needed at its start.
    """
    spent: dict[tuple[int | None, Phase], float] = {}
    sent: dict[str, tuple[tuple[int | None, Phase], float]] = {}
    awaited: dict[str, tuple[tuple[int | None, Phase], float]] = {}
    for node in program:
        record = info(node)
        place = (record.worker, record.phase)
        now = spent.setdefault(place, 0.0)
        if is_send(node) or is_recv(node):
            (sent if is_send(node) else awaited)[program.wires[node.name].name] = (place, now)
        spent[place] = now + (record.seconds or 0.0)

    def share(at: tuple[tuple[int | None, Phase], float], otherwise: float) -> float:
        place, now = at
        return now / spent[place] if spent[place] else otherwise

    return tuple(EdgeTiming(name, share(sent[name], 1.0), share(awaited[name], 0.0)) for name in sent)
