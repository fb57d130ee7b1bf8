"""What the metrics of microbatches are in the whole minibatch, and which buffers microbatches change."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from fxpipe.ir.aten import is_getitem, is_random
from fxpipe.ir.program import INFO, info
from fxpipe.passes.analysis.microbatches import microbatches_of
from fxpipe.passes.analysis.share import Lost, Microbatches, Share
from fxpipe.passes.analysis.share_rules import normalises
from fxpipe.passes.analysis.share_rules.call import OperatorCall, is_same
from fxpipe.passes.analysis.whole_call import arguments_of, changed_arguments, computes_nothing

aten = torch.ops.aten
COUNTER = "num_batches_tracked"  # of a batch norm, a separate warning covers batch norm


def with_metrics(facts: Microbatches) -> Microbatches:
    """What is known about the loss, and about metrics that can be derived and need no change to the loss.

    Metrics that cannot be derived, and all metrics if deriving them would change what the loss is computed from, are
    computed from the microbatch's own values.
    """
    program = facts.program
    names = list(program.metrics())
    if isinstance(facts.loss, Lost):
        return facts
    extended = facts
    while names:
        both = microbatches_of(program, metrics=names)
        nodes = program.metrics()
        lost = [name for name in names if isinstance(both.known[nodes[name]], Lost)]
        names = [name for name in names if name not in lost]
        if not lost:
            extended = both if _needs(both, facts) == _needs(facts, facts) else facts
            break
    _keep_own_values(extended, program.metrics().keys() - (set(names) if extended is not facts else set()))
    return extended


def _needs(of: Microbatches, facts: Microbatches) -> Any:
    """Everything needed of the calls from which the loss is computed."""
    calls = facts.known.keys()
    likelihoods = [node for node in of.likelihoods if node in calls]
    several = (of.totals, of.numbers, of.factors, of.divided)
    return [
        likelihoods,
        of.batch_norms,
        of.kept & calls,
        *({n: v for n, v in entry.items() if n in calls} for entry in several),
    ]


def _keep_own_values(facts: Microbatches, metrics: Collection[str]) -> None:
    """For some metrics, compute again from the microbatch what the loss will take from the whole minibatch."""
    program = facts.program
    changed = {*facts.totals, *facts.numbers, *facts.factors, *facts.likelihoods}
    changed |= {reader for pairs in facts.divided.values() for _, reader in pairs}
    for node in program:
        if info(node).phase == "F" and any(n in changed for n in node.all_input_nodes):
            changed.add(node)
    outputs = list(program.output_nodes)
    backward = next((n for n in program if info(n).phase == "B"), program.graph.output_node())
    for i, output in enumerate(program.outputs):
        if output.kind == "metric" and output.target in metrics and outputs[i] in changed:
            again = _behind(outputs[i], changed)
            if not any(is_random(n) for n in again):  # another draw would change those after it
                outputs[i] = _copied(program.graph, [n for n in program if n in again], backward)
    program.graph.output_node().args = (tuple(outputs),)


def _copied(graph: fx.Graph, nodes: Sequence[fx.Node], before: fx.Node) -> fx.Node:
    """The last of some calls, computed again by calls without a backward."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        with graph.inserting_before(before):
            copies[node] = graph.node_copy(node, lambda n: copies.get(n, n))
        copies[node].meta = {**node.meta, INFO: info(node).copy(), "seq_nr": None}
    return copies[nodes[-1]]


def _behind(node: fx.Node, among: Collection[fx.Node]) -> set[fx.Node]:
    """A node, and all nodes among these that it is computed from."""
    nodes, stack = {node}, [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source in among and source not in nodes:
                nodes.add(source)
                stack.append(source)
    return nodes


def changed_buffers(facts: Microbatches) -> list[str]:
    """The names of the buffers that every microbatch changes, although only a whole batch should.

    Left out are buffers to which each microbatch adds its share of a sum, buffers that are set to what is the same in
    every microbatch, and the statistics of batch norm.
    """
    program = facts.program
    placeholders, updates = program.placeholders, program.updates()
    names = {b.node: b.names[0] for b in program.buffers}
    return [
        names[node]
        for node, new in updates.items()
        if not (names[node].endswith(COUNTER) or _is_right(facts, placeholders[node], new))
    ]


def _is_right(facts: Microbatches, old: fx.Node, new: fx.Node) -> bool:
    while new.op == "call_function" and (new.target is aten.copy.default or computes_nothing(new)):
        new = new.all_input_nodes[-1]
    if new.op != "call_function":
        return is_same(facts.known.get(new))
    if is_getitem(new) and normalises(OperatorCall(facts, new.all_input_nodes[0])):
        return True
    share = facts.known[new]
    if is_same(share) or (new.target is aten.fill.Scalar and not changed_arguments(new)):
        return True
    if new.target is not aten.add.Tensor or old not in new.args or new.kwargs:
        return False
    added = next((n for n in new.all_input_nodes if n is not old), None)
    if added is not None:
        return facts.known[added] is Share.SUM
    number, whole = arguments_of(new).get(1), changed_arguments(new).get(1)
    return whole is not None and number is not None and whole == number * facts.parts
