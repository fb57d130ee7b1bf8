"""What the metrics of microbatches are in the whole minibatch, without changing anything for the loss."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import fx

from fxpipe.ir.aten import is_random
from fxpipe.ir.program import INFO, info
from fxpipe.passes.analysis.microbatches import microbatches_of
from fxpipe.passes.analysis.share import Lost, Microbatches


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
