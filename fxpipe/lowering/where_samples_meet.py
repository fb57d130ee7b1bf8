"""Finds why the microbatches' losses are not the whole batch's: the call in which samples meet and that affects the
loss.

The analysis of a step ends at the first call that is not known to treat samples alike, and this need not be the cause:
a sort by expert moves tokens, and the result for each is as if nothing had moved. So the values of both steps are
compared, call by call. A value that is not proved to be rows, a sum or a mean, but looks like it, counts as that:

    sort ✗   experts ✗   put back: rows ✓   cross_entropy: mean ✓   ┐
    counts: mean ✓   odds: mean ✓   counts * odds: neither ✗ ── sum ┴ loss
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.device_copies import widened
from fxpipe.ir.program import Program, info
from fxpipe.ir.transform import run_passes
from fxpipe.passes.analysis.microbatches import microbatches_of
from fxpipe.passes.analysis.share import Known, Lost, Rows, Share
from fxpipe.passes.fold import Fold
from fxpipe.passes.next_to import NextTo, partners
from fxpipe.stages.compare import relative_error
from fxpipe.task.batch import Batch, as_scalar


def where_samples_meet(
    program: Program, whole: Program, parts: Sequence[Batch], batch: Batch, far: float
) -> str | None:
    """The reason, in words; None if every value agrees with the microbatches'.

    `program` is captured on a microbatch, and `whole` on the batch; up to `far` values count as equal, relatively.
    """
    folded = run_passes(program, [NextTo(), Fold()])
    found = microbatches_of(folded)
    named = partners(program, whole)
    lost = {node.name for node, known in found.known.items() if isinstance(known, Lost) and node.name in named}
    lost.discard(str(folded.loss_node))  # it is known to differ, even if the values are near
    mine = [_Forward(program, lost).values(part) for part in parts]
    theirs = _Forward(whole, {named[name] for name in lost}).values(batch)
    seen: dict[str, Known] = {}
    for name in lost:
        known = _seen(theirs.get(named[name]), [values.get(name) for values in mine], far)
        if known is not None:
            seen[name] = known
    loss = microbatches_of(folded, seen=seen).loss
    return loss.why if isinstance(loss, Lost) else None


class _Forward(fx.Interpreter):
    """Runs the forward calls of a captured step, and keeps the values of some."""

    def __init__(self, program: Program, names: Collection[str]) -> None:
        super().__init__(fx.GraphModule(nn.Module(), program.graph))
        self._program, self._names = program, names
        self._kept: dict[str, Any] = {}

    def values(self, batch: Batch) -> dict[str, Any]:
        """By name, for one batch."""
        self._kept = {}
        leaves = [(i, leaf.node) for i, leaf in enumerate(self._program.batch) if leaf.node]
        feed = {**self._program.values, **{node: self._copied(batch.values[i]) for i, node in leaves}}
        with torch.no_grad():
            self.run(*(feed[name] for name in self._program.placeholders))
        return self._kept

    def _copied(self, leaf: Any) -> Tensor:
        return leaf.detach().clone() if isinstance(leaf, Tensor) else as_scalar(leaf, self._program.device)

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function" and info(n).phase != "F":
            return None
        made = super().run_node(n)
        if n.name in self._names:
            self._kept[n.name] = made
        return made


def _seen(whole: Any, parts: Sequence[Any], far: float) -> Known | None:
    """How the microbatches' values relate to the whole batch's, judged by numbers; None if these do not show it."""
    if not isinstance(whole, Tensor) or not all(
        isinstance(part, Tensor) and part.dim() == whole.dim() for part in parts
    ):
        return None

    def same(made: Tensor) -> bool:
        return relative_error(made, whole) <= far

    first = parts[0]
    for dim, (size, own) in enumerate(zip(whole.shape, first.shape, strict=True)):
        if size != sum(part.shape[dim] for part in parts):
            continue
        for outer in (n for n in range(1, own + 1) if own % n == 0):
            blocks = [part.unflatten(dim, (outer, -1)) for part in parts]
            if same(torch.cat(blocks, dim + 1).flatten(dim, dim + 1)):
                return Rows(dim, outer)
    if first.shape != whole.shape:
        return None
    if all(same(part) for part in parts):
        return Share.SAME
    total = torch.stack([widened(part) for part in parts]).sum(0)
    return Share.MEAN if same(total / len(parts)) else Share.SUM if same(total) else None
