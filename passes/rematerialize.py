"""rematerialize: compute again where it is used what need not, or must not, be sent or saved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from fxpipe.passes.fold import remove_dead
from torch import fx

from fxpipe.aten import is_cheap, is_getitem, is_random
from fxpipe.plan import Phase
from fxpipe.program import INFO, Level, Program, info, size_of, value
from fxpipe.transform import Pass


@dataclass(frozen=True)
class Rematerialize(Pass):
    """Copy forward nodes to the workers and into the backward passes that use them.

    Three reasons, in this order; a random node is never computed twice:

    - weights: what backward reads of weights alone (a transpose, a cast under autocast, weight norm) is derived again
      in backward, from the weights that its policy gives it, never from what forward saw;
    - checkpoints: what backward reads of a `torch.utils.checkpoint` region is recomputed from the region's inputs;
    - cheapness: what is made cheaply from constants and the batch (causal masks, position ids, rotary tables) is made
      on the worker that uses it, unless that would need more bytes of batch or weights there than it saves.

    Before (backward reads forward's cast):      After:
        w16 = _to_copy(w)          # F               w16 = _to_copy(w)             # F
        y = mm(x, w16)             # F               y = mm(x, w16)                # F
        dx = mm(dy, t(w16))        # B               w16_again = _to_copy(w)       # B
                                                     dx = mm(dy, t(w16_again))     # B
    """

    name: ClassVar[str] = "rematerialize"
    requires: ClassVar[Level] = Level.PLACED
    provides: ClassVar[Level] = Level.PLACED

    def __call__(self, program: Program) -> Program:
        program = program.copy()
        kinds = _Kinds(program)
        copier = _Copier(program.graph)
        for node in list(program):
            record = info(node)
            assert record.worker is not None
            for source in list(node.all_input_nodes):
                wanted = kinds.why(source, record.phase, record.worker)
                if wanted is not None:
                    node.replace_input_with(source, copier.copy(source, node, record.phase, record.worker, wanted))
        remove_dead(program.graph)
        return program


class _Kinds:
    """What every forward node is made of, and so whether and how far it can be computed again."""

    def __init__(self, program: Program) -> None:
        parameters = {p.node for p in program.parameters}
        updated = set(program.updates())
        self.weights: set[fx.Node] = set()  # made of parameters and constants alone, a parameter among them
        self.cheap: set[fx.Node] = set()  # made cheaply of placeholders alone
        self.leaves: dict[fx.Node, frozenset[fx.Node]] = {}  # the placeholders a node of these two kinds is made of
        self.parameters = parameters
        self.present: dict[int, set[str]] = {}  # placeholders each worker reads in any case
        fixed = {n for n in program.graph.nodes if n.op == "placeholder" and n.name not in updated}
        self.inputs = {b.node for b in program.batch if b.node}
        for node in program:
            record = info(node)
            if record.phase == "F":
                self._classify(node, fixed)
            if node not in self.cheap and record.worker is not None:
                here = self.present.setdefault(record.worker, set(self.inputs) if record.worker == 0 else set())
                here.update(n.name for n in node.all_input_nodes if n.op == "placeholder")

    def _classify(self, node: fx.Node, fixed: set[fx.Node]) -> None:
        sources = node.all_input_nodes
        if is_random(node) or not all(n in fixed or n in self.leaves for n in sources):
            return
        leaves = frozenset(leaf for n in sources for leaf in self.leaves.get(n, frozenset([n])))
        only_weights = not any(n.name in self.inputs for n in leaves) and any(n.name in self.parameters for n in leaves)
        cheap = is_cheap(node) and all(n.op == "placeholder" or n in self.cheap for n in sources)
        if only_weights:
            self.weights.add(node)
        if cheap:
            self.cheap.add(node)
        if only_weights or cheap:
            self.leaves[node] = leaves

    def why(self, source: fx.Node, phase: Phase, worker: int) -> Callable[[fx.Node], bool] | None:
        """None to leave `source` alone for a reader there; else which of its ancestors to copy along."""
        if source.op != "call_function" or info(source).phase != "F":
            return None
        if phase == "B" and source in self.weights:
            return self.leaves.__contains__
        region = info(source).region
        if phase == "B" and region is not None and not _fixed_by_chance(source):
            return lambda n: n in self.weights or (info(n).region == region and not _fixed_by_chance(n))
        if info(source).worker != worker and source in self.cheap and self._pays(source, worker):
            return self.cheap.__contains__
        return None

    def _pays(self, source: fx.Node, worker: int) -> bool:
        missing = [n for n in self.leaves[source] if n.name not in self.present.get(worker, set())]
        moved = [n for n in missing if n.name in self.parameters or n.name in self.inputs]  # buffers are everywhere
        return sum(size_of(value(n)) for n in moved) <= size_of(value(source))


def _fixed_by_chance(node: fx.Node) -> bool:
    """Whether the value came from the random generator, directly or as an element of what did."""
    return is_random(node) or (is_getitem(node) and is_random(node.all_input_nodes[0]))


class _Copier:
    """Copies nodes with the ancestors they need; each once for a worker and phase."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.made: dict[tuple[fx.Node, int, Phase], fx.Node] = {}
        self.original: dict[fx.Node, fx.Node] = {}  # by copy: readers of a node may read a copy by now

    def copy(
        self, source: fx.Node, reader: fx.Node, phase: Phase, worker: int, wanted: Callable[[fx.Node], bool]
    ) -> fx.Node:
        """The copy of `source` for that worker and phase, made before `reader` if it is the first to want it."""
        stack = [source]
        while stack:  # no recursion: chains can be thousands of nodes long
            node = stack[-1]
            if (node, worker, phase) in self.made:
                stack.pop()
                continue
            inputs = [self.original.get(n, n) for n in node.all_input_nodes]
            needed = [
                n for n in inputs if n.op == "call_function" and wanted(n) and (n, worker, phase) not in self.made
            ]
            if needed:
                stack.extend(needed)
                continue
            stack.pop()
            with self.graph.inserting_before(reader):
                made = self.graph.node_copy(node, lambda n: self._input(n, worker, phase))
            made._rename(f"{node.name}_again")
            record = copy.copy(node.meta[INFO])
            record.phase, record.worker, record.region = phase, worker, None
            made.meta[INFO] = record
            self.made[node, worker, phase] = made
            self.original[made] = node
        return self.made[source, worker, phase]

    def _input(self, node: fx.Node, worker: int, phase: Phase) -> fx.Node:
        original = self.original.get(node, node)
        return self.made.get((original, worker, phase), original)
