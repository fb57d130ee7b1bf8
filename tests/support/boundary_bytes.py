"""The bytes over each boundary between neighbouring workers, per microbatch: by the edges, and by the graph alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import fx

from fxpipe.ir.program import Program, info, value
from fxpipe.plan.spec import EdgeSpec

Boundary = tuple[int, bool]
"""The worker before it, and whether values go to later workers."""


def sent(edges: Iterable[EdgeSpec]) -> dict[Boundary, int]:
    """Bytes by boundary; an edge from worker 0 to worker 2 crosses two."""
    found: Counter[Boundary] = Counter()
    for edge in edges:
        if edge.kind != "token":
            for boundary in _between(edge.src, edge.dst):
                found[boundary] += edge.tensor.bytes
    return dict(found)


def least(program: Program) -> dict[Boundary, int]:
    """The lower bound: of each boundary, the memory of all values that are made on one side and read on the other.

    Args:
        program: one whose nodes have workers, and no Send or Recv yet.
    """
    batch = {b.node for b in program.batch if b.node}
    found: Counter[Boundary] = Counter()
    for node in program.graph.nodes:
        if node.op == "call_function":
            home = info(node).worker or 0
        elif node.name in batch:
            home = 0  # only worker 0 reads data
        else:
            continue
        readers = {info(user).worker or 0 for user in node.users if user.op == "call_function"}
        for boundary in {b for reader in readers for b in _between(home, reader)}:
            found[boundary] += _memory(node)
    return dict(found)


def _between(src: int, dst: int) -> Iterator[Boundary]:
    for worker in range(min(src, dst), max(src, dst)):
        yield worker, src < dst


def _memory(node: fx.Node) -> int:
    """Bytes without what only repeats the same memory."""
    shown = value(node)
    assert isinstance(shown, torch.Tensor), node
    sizes = (size for size, step in zip(shown.shape, shown.stride(), strict=True) if step)
    return shown.element_size() * torch.Size(sizes).numel()
