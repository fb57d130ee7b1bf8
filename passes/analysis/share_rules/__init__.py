"""A rule for each operator: what its result is in the whole minibatch, from what its arguments are (`share.py`)."""

from __future__ import annotations

from torch import fx

from fxpipe.ir.aten import is_pointwise
from fxpipe.passes.analysis.share_rules import gradients, layers, shapes, sums
from fxpipe.passes.analysis.share_rules.call import OperatorCall, Rule, by_elements, operator_of, unknown

_RULES: dict[str, Rule] = {
    name: rule
    for rules in (sums.RULES, shapes.RULES, layers.RULES, gradients.RULES)
    for rule, names in rules
    for name in names.split()
}


def normalises(call: OperatorCall) -> bool:
    """Whether it is batch norm."""
    return _RULES.get(call.name) is layers.batch_norm


def mixes_samples(call: OperatorCall) -> bool:
    """Whether it is a batch norm that normalises over the samples of a microbatch."""
    return normalises(call) and layers.mixes_samples(call)


def counts_samples(call: OperatorCall, node: fx.Node) -> bool:
    """Whether an input is an index that reads each sample's own row: 0, 1, 2 … up to the batch."""
    return _RULES.get(call.name) is layers.index and layers.counts_up(call, node)


def rule_of(node: fx.Node) -> Rule:
    """The rule for a call."""
    rule = _RULES.get(operator_of(node))
    if rule is not None:
        return rule
    return by_elements if is_pointwise(node) else unknown
