"""Which buffers several microbatches change differently from the whole batch."""

from __future__ import annotations

import torch
from torch import fx

from fxpipe.ir.aten import is_getitem
from fxpipe.passes.analysis.share import Microbatches, Share
from fxpipe.passes.analysis.share_rules import normalises
from fxpipe.passes.analysis.share_rules.call import OperatorCall, is_same
from fxpipe.passes.analysis.whole_call import arguments_of, changed_arguments, computes_nothing

aten = torch.ops.aten
COUNTER = "num_batches_tracked"  # of a batch norm, a separate warning covers batch norm


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
