"""rematerialize: compute again, where it is used, what need not or must not be sent or saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxpipe.ir.aten import is_getitem, is_random, viewed
from fxpipe.ir.program import AGAIN, INFO, Level, Program, info, size_of, value
from fxpipe.ir.transform import Pass
from fxpipe.passes.analysis.sources import sources_of
from fxpipe.passes.fold import remove_dead
from fxpipe.plan.spec import Phase
from fxpipe.torch_private import rename

aten = torch.ops.aten


@dataclass(frozen=True)
class Rematerialize(Pass):
    """Copy forward nodes to the workers and into the backward parts that use them.

    Five reasons, in this order; a random node, or a buffer's new value, is never computed twice:

    - weights: what backward reads and is made only from weights (a transpose, a cast under autocast, weight norm) is
      derived again in backward, from the weights that its policy gives it, never from those of forward;
    - checkpoints: what backward reads of a `torch.utils.checkpoint` region is recomputed from the region's inputs;
    - mismatches: if the cuts say so (`Cuts.recompute`), backward computes units whose forward ran on another worker
      again from their inputs, instead of receiving what they saved; it keeps what its own forward receives;
    - memory: what `recompute` has chosen (`Program.again`) of a worker's forward is computed again by its backward from
      what that forward leaves, instead of being saved itself;
    - cheapness: what is cheap to make from constants and the batch (causal masks, position ids, rotary tables) is made
      on the worker that uses it, unless that needs more bytes of batch or weights there than it saves.

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
        kinds = Kinds(program)
        copier = _Copier(program.graph, kinds)
        for node in list(program):
            record = info(node)
            assert record.worker is not None
            for source in list(node.all_input_nodes):
                again = kinds.why(source, record.phase, record.worker)
                if again is not None:
                    node.replace_input_with(source, copier.copy(source, node, record.phase, record.worker, again))
        remove_dead(program.graph)
        return program


class Kinds:
    """What every forward node is made from, and so whether and how far it can be computed again."""

    def __init__(self, program: Program) -> None:
        assert program.cuts is not None
        parameters = {p.node for p in program.parameters}
        updated = self.updated = set(program.updates())
        self.cuts = program.cuts
        sources = sources_of(program)
        self.leaves = sources.leaves
        self.weights = {n for n in sources.fixed if sources.made_of(n, parameters)}
        self.cheap = {n for n in sources.cheap if not sources.made_of(n, updated)}
        self.parameters = parameters
        self.present: dict[int, set[str]] = {}  # placeholders that each worker reads in any case
        self.once = {n for new in program.updates().values() for n in (new, viewed(new))}  # buffers' new values
        self.inputs = {b.node for b in program.batch if b.node}
        self.chosen = {(name, worker) for worker, again in enumerate(program.again) for name in again.values}
        for node in program:
            worker = info(node).worker
            if node not in self.cheap and worker is not None:
                here = self.present.setdefault(worker, set(self.inputs) if worker == 0 else set())
                here.update(n.name for n in node.all_input_nodes if n.op == "placeholder")
        self.arrives = set(self._arriving(program))  # (node, worker): received by that worker's forward

    def _arriving(self, program: Program) -> Iterator[tuple[fx.Node, int]]:
        for node in program:
            worker = info(node).worker
            if info(node).phase == "F" and worker is not None:
                for source in node.all_input_nodes:
                    if source.op == "call_function" and self.why(source, "F", worker) is None:
                        yield source, worker

    def why(self, source: fx.Node, phase: Phase, worker: int) -> Callable[[fx.Node], bool] | None:
        """None to leave `source` unchanged for a reader there; else a test of which ancestors to copy with it."""
        if source.op != "call_function" or info(source).phase != "F":
            return None
        if phase != "F" and source in self.weights:
            return lambda n: n in self.weights or n in self.cheap
        region = info(source).region
        if phase != "F" and region is not None and not self.only_once(source):
            return lambda n: (
                n in self.weights
                or (info(n).region == region and not self.only_once(n))
                or self._is_mismatched(n, worker)
                or self.is_chosen(n, worker)
            )
        if phase != "F" and (self._is_mismatched(source, worker) or self.is_chosen(source, worker)):
            return lambda n: (
                n in self.weights
                or self._is_mismatched(n, worker)
                or self.is_chosen(n, worker)
                or self.is_made_anywhere(n, worker)
            )
        if self.is_made_anywhere(source, worker):
            return self.cheap.__contains__
        return None

    def is_chosen(self, node: fx.Node, worker: int) -> bool:
        """Whether that worker's backward computes its own forward's node again because memory is short."""
        return (node.name, worker) in self.chosen and info(node).worker == worker and not self.only_once(node)

    def _is_mismatched(self, node: fx.Node, worker: int) -> bool:
        """Whether the cuts let that worker's backward compute a forward node of another worker again."""
        record = info(node)
        return (
            record.phase == "F"
            and record.worker != worker
            and self.cuts.recomputes(worker, record.unit)
            and not self.only_once(node)
            and (node, worker) not in self.arrives
        )

    def is_made_anywhere(self, node: fx.Node, worker: int) -> bool:
        """Whether a node of another worker is cheap to make there, and moves no more bytes than it saves."""
        if info(node).worker == worker or node not in self.cheap:
            return False
        missing = [n for n in self.leaves[node] if n.name not in self.present.get(worker, set())]
        moved = [n for n in missing if n.name in self.parameters or n.name in self.inputs]  # buffers are everywhere
        return sum(size_of(value(n)) for n in moved) <= size_of(value(node))

    def only_once(self, node: fx.Node) -> bool:
        """Whether the value comes from the random generator, or is a buffer's new value."""
        return is_random(node) or node in self.once or (is_getitem(node) and _counts_once(node))


def _counts_once(element: fx.Node) -> bool:
    """Whether an element of a tuple was drawn at random, or is a statistic that batch norm has updated."""
    operator = element.all_input_nodes[0]
    index = element.args[1]
    assert isinstance(index, int)
    return is_random(operator) or (_trains_statistics(operator) and index >= 3)


def _trains_statistics(node: fx.Node) -> bool:
    """Whether it is a batch norm in train mode, which takes running statistics only to update them."""
    return node.target is aten._native_batch_norm_legit_functional.default and bool(node.args[5])


def _forgets_statistics(node: fx.Node) -> bool:
    """Whether a copy of it needs no running statistics; if nothing else is wide, they decide the precision."""
    if not _trains_statistics(node):
        return False
    read, weight = node.args[:2]
    assert isinstance(read, fx.Node)
    return weight is not None or bool(value(read).dtype == value(node)[1].dtype)


def reads_again(node: fx.Node) -> list[fx.Node]:
    """The inputs that a copy of the node has."""
    if _forgets_statistics(node):
        return [n for n in node.args[:3] if isinstance(n, fx.Node)]
    return node.all_input_nodes


def _forget_statistics(node: fx.Node) -> None:
    """Make a copied batch norm have no running statistics: the same numbers, and nothing to send for it."""
    node.target = aten._native_batch_norm_legit.no_stats
    node.args = (*node.args[:3], *node.args[5:])
    node.meta["val"] = value(node)[:3]


class _Copier:
    """Copies nodes with the ancestors they need; each once per worker and phase.

    W does not repeat what B has computed again, unless it is made only from weights: B hands it over. Of a tuple, B
    takes the elements that W reads: tensors are handed over, never tuples.
    """

    def __init__(self, graph: fx.Graph, kinds: Kinds) -> None:
        self.graph = graph
        self.kinds = kinds
        self.copies: dict[tuple[fx.Node, int, Phase], fx.Node] = {}
        self.original: dict[fx.Node, fx.Node] = {}  # by copy: a node's readers may now read a copy

    def copy(
        self, source: fx.Node, reader: fx.Node, phase: Phase, worker: int, again: Callable[[fx.Node], bool]
    ) -> fx.Node:
        """The copy of `source` for that worker and phase, made before `reader` if it is the first to need it."""
        stack = [source]
        while stack:  # no recursion: chains can be thousands of nodes long
            node = stack[-1]
            if self._copy(node, worker, phase):
                stack.pop()
                continue
            inputs = [self.original.get(n, n) for n in reads_again(node)]
            needed = [n for n in inputs if n.op == "call_function" and again(n) and not self._copy(n, worker, phase)]
            if needed:
                stack.extend(needed)
                continue
            stack.pop()
            whole = self._input(node.all_input_nodes[0], worker, phase) if is_getitem(node) else None
            at: Phase = "B" if whole is not None and info(whole).phase == "B" else phase
            with self.graph.inserting_before(reader) if at == phase else self.graph.inserting_after(whole):
                copy = self.graph.node_copy(node, lambda n: self._input(n, worker, phase))
            rename(copy, f"{node.name}_again")
            if _forgets_statistics(copy):
                _forget_statistics(copy)
            copy.meta[INFO] = info(node).copy(phase=at, worker=worker, region=None, weight=at == "W")
            copy.meta[AGAIN] = node.name
            self.copies[node, worker, at] = copy
            self.original[copy] = node
        result = self._copy(source, worker, phase)
        assert result is not None
        return result

    def _copy(self, node: fx.Node, worker: int, phase: Phase) -> fx.Node | None:
        """The copy that a worker's part reads."""
        copy = self.copies.get((node, worker, phase))
        if copy is None and phase == "W" and node not in self.kinds.weights:
            copy = self.copies.get((node, worker, "B"))
        return copy

    def _input(self, node: fx.Node, worker: int, phase: Phase) -> fx.Node:
        original = self.original.get(node, node)
        return self._copy(original, worker, phase) or original
