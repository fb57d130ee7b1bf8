"""What is made again where it is read, instead of being sent or saved; used by planner and passes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fxpipe.ir.aten import is_cheap, is_random
from fxpipe.ir.program import Program, info


@dataclass(frozen=True)
class Sources:
    """The forward nodes that can be made again, because they are not random and are made only of placeholders."""

    cheap: frozenset[fx.Node]  # to make: masks, position ids, casts and transposes of weights
    fixed: frozenset[fx.Node]  # made from weights and constants, at any cost: no batch or buffer update changes them
    leaves: dict[fx.Node, frozenset[fx.Node]]  # the placeholders that each is made from

    def made_of(self, node: fx.Node, names: set[str]) -> bool:
        """Whether one of these placeholders is among the node's leaves."""
        return any(leaf.name in names for leaf in self.leaves[node])


def sources_of(program: Program) -> Sources:
    """The sources of a program at any level; linear in the graph, except for the leaves."""
    changing = {b.node for b in program.batch if b.node} | set(program.updates())
    cheap: set[fx.Node] = set()
    fixed: set[fx.Node] = set()
    leaves: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in program:
        inputs = node.all_input_nodes
        if info(node).phase != "F" or is_random(node):
            continue
        if not all(n.op == "placeholder" or n in leaves for n in inputs):
            continue
        of = frozenset(leaf for n in inputs for leaf in leaves.get(n, frozenset([n])))
        if is_cheap(node) and all(n.op == "placeholder" or n in cheap for n in inputs):
            cheap.add(node)
        if not any(leaf.name in changing for leaf in of):
            fixed.add(node)
        if node in cheap or node in fixed:
            leaves[node] = of
    return Sources(frozenset(cheap), frozenset(fixed), leaves)
