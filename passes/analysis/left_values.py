"""How many bytes every worker's forward leaves for its backward, and its backward for weight gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from fxpipe.ir.aten import is_view
from fxpipe.ir.program import AGAIN, Program, info, is_call_of, size_of, value


@dataclass(frozen=True)
class LeftValues:
    """The bytes of one worker and one microbatch, and the seconds of its backward and its weight gradients."""

    saved: int  # that forward leaves
    deferred: int  # that backward leaves, if weight gradients are separate
    repeated: int  # the most that backward holds at once of what it computes again to save memory
    seconds: float


def left_values(program: Program) -> list[LeftValues]:
    """By worker, for a program after `rematerialize` and before `comm`; linear in the graph.

    Views of one value count once, as does the batch. Forward does not leave what only backward receives.
    """
    assert program.cuts is not None
    left = []
    calls: list[list[fx.Node]] = [[] for _ in range(program.cuts.workers)]
    for node in program:
        calls[info(node).worker or 0].append(node)
    for worker, mine in enumerate(calls):
        chosen = frozenset(program.again[worker].values) if program.again else frozenset[str]()
        later = [node for node in mine if info(node).phase != "F"]
        backward, weights = ([node for node in mine if info(node).phase == phase] for phase in ("B", "W"))
        there = _held_by_forward(program, mine, worker)
        saved = {memory for memory in _read(later) if memory in there}
        deferred = {m for m in _read(weights) if m in there or is_call_of(m, "B")}
        left.append(
            LeftValues(
                _size(saved),
                _size(deferred),
                max((held for _, held in copies_held(backward, chosen)), default=0),
                sum(info(node).seconds or 0.0 for node in later),
            )
        )
    return left


def memory_of(node: fx.Node) -> fx.Node:
    """The value whose memory a view on the same worker shares; values from other workers have their own memory."""
    while node.op == "call_function" and is_view(node) and node.all_input_nodes:
        parent = node.all_input_nodes[0]
        if isinstance(value(parent), (tuple, list)):
            break
        if parent.op == "call_function" and info(parent).worker != info(node).worker:
            return parent
        node = parent
    return node


def _held_by_forward(program: Program, mine: Iterable[fx.Node], worker: int) -> set[fx.Node]:
    """What is in memory when a worker's forward ends: what it made, or read from other workers or the batch."""
    placed = {b.node for b in program.batch if b.node} | set(program.updates())
    held: set[fx.Node] = set()
    for node in mine:
        if info(node).phase != "F":
            continue
        held.add(node)
        held.update(n for n in node.all_input_nodes if n.op == "call_function" or n.name in placed)
    if worker == 0:
        held.update(n for name, n in program.placeholders.items() if name in placed)
    return held


def _read(calls: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """The memory that calls read."""
    for node in calls:
        for source in node.all_input_nodes:
            yield memory_of(source)


def _size(nodes: Iterable[fx.Node]) -> int:
    return sum(size_of(value(node)) for node in nodes)


def copies_held(backward: Sequence[fx.Node], chosen: Collection[str]) -> Iterator[tuple[fx.Node, int]]:
    """For each call, the bytes of chosen copies that exist, each from its making to its last reader."""
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(backward):
        for source in node.all_input_nodes:
            last[memory_of(source)] = i
    ending: dict[int, int] = {}
    now = 0
    for i, node in enumerate(backward):
        if node.meta.get(AGAIN) in chosen and memory_of(node) is node and hasattr(value(node), "dtype"):
            now += size_of(value(node))
            ending[last.get(node, i)] = ending.get(last.get(node, i), 0) + size_of(value(node))
        yield node, now
        now -= ending.pop(i, 0)
