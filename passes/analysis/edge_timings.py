"""When each value of a stage is sent and first needed: the emitted text no longer has the nodes' times."""

from __future__ import annotations

from typing import NamedTuple

from fxpipe.ir.program import Program, info
from fxpipe.ir.wire import is_recv, is_send
from fxpipe.plan.cost_records import EdgeTiming
from fxpipe.plan.spec import Phase

_Action = tuple[int | None, Phase]


def edge_timings(program: Program) -> tuple[EdgeTiming, ...]:
    """The timing of every edge of a wired program, by the nodes' seconds, in the order of the sends.

    Linear in nodes. If an action takes no time at all, its values are made at its end and needed at its start.
    """
    spent: dict[_Action, float] = {}
    count: dict[_Action, int] = {}
    sent: dict[str, _Moment] = {}
    awaited: dict[str, _Moment] = {}
    for node in program:
        record = info(node)
        action = (record.worker, record.phase)
        now = spent.setdefault(action, 0.0)
        if is_send(node) or is_recv(node):
            place = count[action] = count.get(action, -1) + 1
            (sent if is_send(node) else awaited)[program.wires[node.name].name] = _Moment(action, now, place)
        spent[action] = now + (record.seconds or 0.0)

    def share(moment: _Moment, default: float) -> float:
        whole = spent[moment.action]
        return moment.seconds / whole if whole else default

    return tuple(
        EdgeTiming(name, share(end, 1.0), share(awaited[name], 0.0), (end.place, awaited[name].place))
        for name, end in sent.items()
    )


class _Moment(NamedTuple):
    """A send or a wait, with the seconds of its action and the number of sends and waits before it."""

    action: _Action
    seconds: float
    place: int
