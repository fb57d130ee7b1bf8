"""What each forward value of a microbatch is in the whole minibatch: rows of it, its sum, its mean, or the same.

The loss of a minibatch is the mean, or the sum, of its microbatches' losses only if that can be derived, operator by
operator, from the leaves of the batch. `share_rules/` has a rule for each operator. A value is lost if an operator
is unknown or mixes samples, and so is all that is computed from it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import fx

from fxpipe.ir.aten import is_getitem, is_random
from fxpipe.ir.program import Program, info
from fxpipe.passes.analysis.metric_nodes import metric_nodes
from fxpipe.passes.analysis.share import BackwardCalls, Known, Lost, Microbatches, Rows, Share
from fxpipe.passes.analysis.share_rules import counts_samples, mixes_samples, normalises, rule_of
from fxpipe.passes.analysis.share_rules.call import OperatorCall, fills, is_same
from fxpipe.passes.analysis.share_rules.sameness import same_of
from fxpipe.passes.analysis.share_rules.whole_batch import held_against_whole
from fxpipe.passes.analysis.whole_call import whole_shape

NOTHING_SEEN: Mapping[str, Known] = {}


def microbatches_of(
    program: Program,
    dims: Mapping[str, int | None] | None = None,
    metrics: Collection[str] = (),
    seen: Mapping[str, Known] = NOTHING_SEEN,
) -> Microbatches:
    """Derive what each forward value is; linear in the graph, for each value that must be known for the whole batch.

    Args:
        program: at level FOLDED, captured on one microbatch. If `next_to` has put it next to the step on the whole
            batch, everything derived is compared with that.
        dims: by leaf of the batch, the dimension along which it is cut; None if every microbatch gets all of it. By
            default from the leaves themselves.
        metrics: of the step, those to derive, too; calls that serve only the others are skipped.
        seen: by node name, what values were on one batch: used if nothing can be derived.
    """
    placeholders = program.placeholders
    leaves = {placeholders[b.node]: b.leaf for b in program.batch if b.node}
    dims = {leaf.name: leaf.dim for leaf in leaves.values()} if dims is None else dims
    sizes = {
        node: leaf.tensor.shape[dim]
        for node, leaf in leaves.items()
        if node.users and leaf.tensor is not None and (dim := dims[leaf.name]) is not None  # the rest may have any size
    }
    batch = min(sizes.values(), default=1)
    updated = program.updates()
    constants = {placeholders[b.node] for b in program.buffers if b.node not in updated}
    facts = Microbatches(
        program,
        batch=batch,
        backward=BackwardCalls(program),
        changing=frozenset(updated),
        passed_over=frozenset(metric_nodes(program, kept=metrics)),
    )
    facts.parts = min((_parts(node, dims[leaves[node].name], n) for node, n in sizes.items()), default=0)
    while True:
        before = dict(facts.totals)
        facts.numbers.clear()
        facts.kept.clear()
        facts.divided.clear()
        facts.factors.clear()
        facts.likelihoods.clear()
        facts.batch_norms.clear()
        facts.alone = {*leaves, *constants}
        for node in placeholders.values():
            dim = dims[leaves[node].name] if node in leaves else None
            if sizes.get(node, batch) == batch:
                facts.known[node] = Share.SAME if dim is None else Rows(dim)
            else:
                facts.known[node] = Lost(f"{leaves[node].name} has {sizes[node]} rows for {batch} samples", node.name)
            facts.known[node] = held_against_whole(OperatorCall(facts, node), facts.known[node])
        for node in program:
            if info(node).phase == "F" and node not in facts.passed_over:
                _derive(facts, node)
                if isinstance(facts.known[node], Lost):
                    facts.known[node] = seen.get(node.name, facts.known[node])
                if facts.known[node] != facts.totals.get(node, facts.known[node]):
                    del facts.totals[node]  # it is computed from what has become a total
                if node in facts.totals:
                    facts.known[node] = Share.SAME
                facts.known[node] = held_against_whole(OperatorCall(facts, node), facts.known[node])
        if facts.totals == before:
            return facts


def _parts(node: fx.Node, dim: int | None, size: int) -> int:
    """How many times as large the leaf is in the whole batch; 0 if that is not known."""
    shape = whole_shape(node)
    return 0 if shape is None or dim is None else shape[dim] // size


def _derive(facts: Microbatches, node: fx.Node) -> None:
    inputs = node.all_input_nodes
    if fills(node) or (all(n in facts.alone for n in inputs) and not is_random(node)):
        facts.alone.add(node)
    if is_getitem(node):
        share = facts.known[inputs[0]]
        facts.known[node] = share[node.args[1]] if isinstance(share, tuple) else share  # type: ignore[index]
        return
    call = OperatorCall(facts, node)
    lost = next(
        (facts.known[n] for n in inputs if isinstance(facts.known[n], Lost) and not counts_samples(call, n)), None
    )
    if mixes_samples(call):
        facts.batch_norms.append(node)
    changing = next((n for n in inputs if n.name in facts.changing), None)
    if changing is not None and not normalises(call):  # batch norm only updates its running statistics
        lost = lost or call.lost(f"reads {changing.name}, which every microbatch changes")
    if lost is None and all(is_same(facts.known[n]) for n in inputs):
        facts.known[node] = same_of(call)
    else:
        facts.known[node] = lost or rule_of(node)(call)
