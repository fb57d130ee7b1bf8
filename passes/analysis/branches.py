"""Branches of a model whose code computes them in turns: an order in which each of them is in one piece."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from torch import fx

from fxpipe.costs.analytic import analytic_seconds
from fxpipe.ir.aten import is_random
from fxpipe.ir.program import Program
from fxpipe.passes.analysis.sources import Sources
from fxpipe.planner.device import CPU

LEAST = 1 / 16
"""The least work of a branch that is put together, as a share of the whole forward's: half of one of eight workers'."""


@dataclass
class _Branch:
    """Calls that depend on each other, their seconds, and the places of the first and the last in the program."""

    nodes: list[fx.Node]
    work: float
    first: int
    last: int


def branches_together(program: Program, nodes: Sequence[fx.Node], sources: Sources) -> list[fx.Node]:
    """Forward calls in an equivalent order, in which branches with much work do not take turns: first the one that ends
    first.

    A branch begins with the batch and ends where a call reads several branches. What is made from weights alone counts
    as no work. Calls that read the same parameter or updated buffer are in one branch, since they should be on one
    worker, and so are all that draw random numbers: they keep their order. The calls are given in the program's order,
    without those that are cheap to make again from the batch or from weights.
    """
    shared = {p.node for p in program.parameters} | set(program.updates())
    seconds = {node: 0.0 if node in sources.fixed else analytic_seconds(node, CPU) for node in nodes}
    least = LEAST * sum(seconds.values())
    place = {node: i for i, node in enumerate(nodes)}
    branch_of: dict[fx.Node, _Branch] = {}
    latest: dict[str, fx.Node] = {}  # the last call that read a parameter or buffer, or that drew
    for i, node in enumerate(nodes):
        read = _branches(node.all_input_nodes, branch_of)
        if any(later.first < branch.last for branch, later in pairwise(read)):
            large = sorted((b for b in read if b.work >= least), key=lambda b: b.last)
            order = [n for b in large for n in sorted(b.nodes, key=place.__getitem__)]
            place |= zip(order, sorted(place[n] for n in order), strict=True)
        leaves = chain.from_iterable(sources.leaves.get(n, (n,)) for n in node.all_input_nodes)
        keys = [*(n.name for n in leaves if n.name in shared), *(["random numbers"] if is_random(node) else [])]
        joined = _branches([*node.all_input_nodes, *(latest[key] for key in keys if key in latest)], branch_of)
        branch = max(joined, key=lambda b: len(b.nodes), default=_Branch([], 0.0, i, i))
        for other in joined:
            if other is not branch:
                branch.nodes += other.nodes
                branch.work += other.work
                branch.first = min(branch.first, other.first)
                branch_of |= dict.fromkeys(other.nodes, branch)
        branch.nodes.append(node)
        branch.work += seconds[node]
        branch.last = i
        branch_of[node] = branch
        latest |= dict.fromkeys(keys, node)
    return sorted(nodes, key=place.__getitem__)


def _branches(nodes: Iterable[fx.Node], branch_of: Mapping[fx.Node, _Branch]) -> list[_Branch]:
    """The branches of these calls, in the order in which they begin."""
    branches = {id(branch_of[n]): branch_of[n] for n in nodes if n in branch_of}
    return sorted(branches.values(), key=lambda b: b.first)
