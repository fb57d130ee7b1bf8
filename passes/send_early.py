"""send_early: backward first makes what other workers wait for, then the rest, as far as that costs no memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxpipe.ir.aten import is_random
from fxpipe.ir.program import Level, Program, info
from fxpipe.ir.stage import Stage
from fxpipe.ir.transform import Pass
from fxpipe.ir.wire import is_recv, is_send
from fxpipe.passes.analysis.liveness import part_memories
from fxpipe.passes.split import stages_of


@dataclass(frozen=True)
class SendEarly(Pass):
    """Move calls of a backward on which no send depends after its last send: most make weight gradients.

    The previous worker then waits less, once per worker at the start of a minibatch with a flush. The moved calls keep
    their inputs longer. So only the last of them are moved, those of the stage's first layers, as many as do not raise
    the function's memory peak: the code of the later layers needs more anyway.

    Nothing else changes, not even a bit: random draws, and what they are made from, stay in place.

    Before:  dw = mm(t(dy), x)           After:  dx = mm(dy, w)
             dx = mm(dy, w)                      comm.send("dx", dx)
             comm.send("dx", dx)                 dw = mm(t(dy), x)
    """

    name: ClassVar[str] = "send_early"
    requires: ClassVar[Level] = Level.WIRED
    provides: ClassVar[Level] = Level.WIRED

    def __call__(self, program: Program) -> Program:
        program = program.copy()
        calls: dict[int, list[fx.Node]] = {}
        for node in program:
            if info(node).phase == "B":
                calls.setdefault(info(node).worker or 0, []).append(node)
        stages: Sequence[Stage] = ()
        for worker, nodes in calls.items():
            if late := _late(nodes):
                stages = stages or stages_of(program)
                _move(_as_many_as_fit(stages[worker], nodes, late), _last_send(nodes))
        return program


def _late(calls: Sequence[fx.Node]) -> list[fx.Node]:
    """The calls before the last send of a function that could come after it."""
    needed: set[fx.Node] = set()
    for node in reversed(calls):
        if node in needed or is_send(node) or is_recv(node) or is_random(node):
            needed.add(node)
            needed.update(node.all_input_nodes)
    last = max((i for i, node in enumerate(calls) if is_send(node)), default=0)
    return [node for node in calls[:last] if node not in needed]


def _as_many_as_fit(stage: Stage, calls: Sequence[fx.Node], late: Sequence[fx.Node]) -> Sequence[fx.Node]:
    """The longest end of `late` that can come after the last send without more memory for the function."""
    copies = (node for node in stage.parts["B"].graph.nodes if node.op == "call_function")
    copy_of = dict(zip(calls, copies, strict=True))
    end = stage.parts["B"].graph.output_node()

    def peaks(order: Iterable[fx.Node]) -> tuple[int, int]:
        for node in order:
            end.prepend(copy_of[node])
        memory = next(part for part in part_memories(stage) if part.phase == "B")
        return memory.peak, memory.peak_unreceived

    most = peaks(calls)
    few, many = 0, len(late)  # this many fit; this many do not
    while few < many:
        tried = (few + many + 1) // 2
        peak = peaks(_moved(calls, late[-tried:]))
        if peak[0] <= most[0] and peak[1] <= most[1]:
            few = tried
        else:
            many = tried - 1
    return late[len(late) - few :]


def _moved(calls: Sequence[fx.Node], late: Sequence[fx.Node]) -> list[fx.Node]:
    """The calls in their new order."""
    moved, last = set(late), _last_send(calls)
    order: list[fx.Node] = []
    for node in calls:
        if node not in moved:
            order.append(node)
        if node is last:
            order += late
    return order


def _last_send(calls: Sequence[fx.Node]) -> fx.Node:
    return next(node for node in reversed(calls) if is_send(node))


def _move(late: Iterable[fx.Node], after: fx.Node) -> None:
    for node in late:
        after.append(node)
        after = node
