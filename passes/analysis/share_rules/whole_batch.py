"""What a rule derives for a call, compared with the call in the step on the whole batch (`whole_call.py`).

Its shapes must be those that the rule gives. Numbers that differ there depend on how many samples there are: the
call gets the whole batch's numbers, forward and backward.
"""

from __future__ import annotations

from itertools import zip_longest
from math import prod
from typing import Any

from torch import fx

from fxpipe.ir.program import value
from fxpipe.passes.analysis.share import Known, Lost, Rows, allows
from fxpipe.passes.analysis.share_rules.call import MEAN, SAME, SUM, OperatorCall, is_same
from fxpipe.passes.analysis.whole_call import (
    Place,
    WholeCall,
    changed_arguments,
    changed_numbers,
    shapes_of,
    type_of,
    whole_call,
    whole_shape,
)


def held_against_whole(call: OperatorCall, claim: Any) -> Any:
    """What is known about a call's result, after comparing with the call in the step on the whole batch."""
    whole = whole_call(call.node)
    if whole is None or isinstance(claim, Lost):
        return claim
    if isinstance(whole, str):
        return Lost(whole, call.node.name)
    if call.node.op == "call_function" and (why := _of_arguments(call)):
        return call.lost(why)
    if is_same(claim) and call.node not in call.facts.totals and (consumed := _consumed(call, whole)):
        return consumed
    shapes = shapes_of(value(call.node))
    shares = claim if isinstance(claim, tuple) else (claim,) * len(shapes)
    wrong = next(
        (
            share
            for share, mine, theirs in zip_longest(shares, shapes, whole.shapes)
            if mine is not None and not allows(share, mine, theirs or (), call.facts.parts)
        ),
        None,
    )
    if wrong is None:
        return claim
    call.facts.numbers.pop(call.node, None)
    if wrong in (SUM, MEAN):
        all(map(call.whole, call.tensors))  # as totals they may go with any number of samples: the next round decides
    if is_same(wrong):
        return call.lost("depends on how many samples there are, and is the same for every microbatch")
    return call.lost("does not have as many rows on the whole batch as in all microbatches")


def _of_arguments(call: OperatorCall) -> str:
    """Note the numbers that a call must take for the whole batch; or say why it cannot."""
    node = call.node
    changed = changed_arguments(node)
    numbers = changed_numbers(node)
    for place, whole in changed.items():
        if place not in numbers and not _only_sizes(call, place, whole):
            return "takes a number that depends on how many samples there are"
    if node in call.facts.kept:
        return ""
    if numbers:
        call.facts.numbers.setdefault(node, numbers)
    if node in call.facts.numbers and call.facts.backward.of(node) is None:
        return "takes a number that depends on how many samples there are, and its gradient cannot be separated"
    return ""


def _only_sizes(call: OperatorCall, place: Place, whole: Any) -> bool:
    """Whether an argument differs on the whole batch because its tensors are larger there."""
    kind = type_of(call.node, place)
    if call.name == "slice":
        return _same_slice(call)
    if call.name == "split" and place == 1:
        return True
    if call.name == "as_strided" and place != 1:
        return isinstance(call.known(call.tensors[0]), Rows)
    if kind == "List[int]":
        return call.name in _SIZED
    return call.name.startswith("native_group_norm") and place in (3, 5)


def _same_slice(call: OperatorCall) -> bool:
    """Whether a slice takes the same places of every sample, or the same blocks of samples."""
    source = call.tensors[0]
    shape, whole = call.shape(source), whole_shape(source)
    dim = call.get("dim") % len(shape)
    if whole is None or len(whole) != len(shape):
        return False
    theirs = changed_arguments(call.node)
    if 4 in theirs or "step" in theirs:
        return False
    start, end = (theirs.get(place, call.get(name)) for place, name in ((2, "start"), (3, "end")))
    mine, its = slice(call.get("start"), call.get("end")).indices(shape[dim]), slice(start, end).indices(whole[dim])
    share = call.known(source)
    if isinstance(share, Rows) and share.dim == dim:
        return its[:2] == (mine[0] * call.facts.parts, mine[1] * call.facts.parts)
    return its == mine or dim in call.same_dims(source)


def _consumed(call: OperatorCall, whole: WholeCall) -> Known | None:
    """What values that are equal for all samples, with a row for each, become in sums over the rows."""
    growing = [n for n in call.tensors if (shape := whole_shape(n)) is not None and shape != call.shape(n)]
    if not growing or whole.shapes != shapes_of(value(call.node)) or call.name in _PICKS:
        return None
    if call.name == "sum":
        ratio = prod(whole_shape(growing[0]) or ()) / max(prod(call.shape(growing[0])), 1)
        return (
            SUM if ratio == call.facts.parts else call.lost("adds up over what depends on how many samples there are")
        )
    if call.name in _ALIKE and all(_alike_along_growth(call, n) for n in growing):
        return SAME
    return call.lost("goes over values with a row for each sample")


def _alike_along_growth(call: OperatorCall, node: fx.Node) -> bool:
    shape, whole = call.shape(node), whole_shape(node) or ()
    grown = {d for d, (a, b) in enumerate(zip(shape, whole, strict=True)) if a != b}
    return grown <= call.same_dims(node)


_SIZED = {
    "view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "repeat", "ones", "zeros", "full", "empty", "rand",
    "randn", "randint", "normal", "empty_strided", "as_strided", "new_ones", "new_zeros", "new_full", "new_empty",
    "new_empty_strided", "split", "split_with_sizes", "select_backward", "slice_backward",
}  # fmt: skip
_PICKS = {"select", "slice", "index_select", "index", "_unsafe_index", "gather", "unbind"}
_ALIKE = {"mean", "amax", "amin", "max", "min", "any", "all"}
