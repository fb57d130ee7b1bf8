"""Views, slices and operators that put tensors together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from fxpipe.ir.program import value
from fxpipe.passes.analysis.share import Known, Rows, after_view
from fxpipe.passes.analysis.share_rules.call import (
    MEAN,
    SAME,
    OperatorCall,
    Rule,
    common_rows,
    is_same,
    new_places,
    unknown,
    without_rows,
)
from fxpipe.passes.analysis.whole_call import whole_shape


def _of_rows(rule: Callable[[OperatorCall, Rows], Any]) -> Rule:
    """The rule of calls whose first tensor has rows of the batch; what else it is stays so."""

    def whole_rule(call: OperatorCall) -> Any:
        share = call.known(call.tensors[0])
        return rule(call, share) if isinstance(share, Rows) else share

    return whole_rule


@_of_rows
def _view(call: OperatorCall, share: Rows) -> Known:
    groups = whole_shape(call.node) is not None
    rows = after_view(share, call.shape(call.tensors[0]), call.shape(), call.facts.batch, call.may_be, groups=groups)
    return rows or call.lost("divides the batch over several dimensions")


@_of_rows
def _expand(call: OperatorCall, share: Rows) -> Known:
    before, after = call.shape(call.tensors[0]), call.shape()
    dim = share.dim + len(after) - len(before)
    if after[dim] != before[share.dim]:
        return call.lost("repeats the samples")
    return Rows(dim, share.outer)


@_of_rows
def _moved(call: OperatorCall, share: Rows) -> Known:
    at = new_places(call)[share.dim]
    if at is not None:
        return Rows(at, share.outer)
    one = "drops the dimension of the batch, which is of size 1 here"
    return call.lost(one if call.name == "squeeze" else "takes one sample of the batch")


@_of_rows
def _slice(call: OperatorCall, share: Rows) -> Known:
    shape = call.shape(call.tensors[0])
    if call.get("dim") % len(shape) != share.dim:
        return share
    begin, end, _ = slice(call.get("start"), call.get("end")).indices(shape[share.dim])
    blocks = _blocks(shape, share, begin, end) if call.get("step") == 1 else None
    return blocks or call.lost("takes some samples of the batch")


def _index_select(call: OperatorCall) -> Known:
    """Rows of a table in the order of an index, or the same places of every sample."""
    source, index = call.tensors
    share, order = call.known(source), call.known(index)
    dim = call.get("dim") % max(len(call.shape(source)), 1)
    if isinstance(order, Rows):
        return Rows(dim, order.outer) if call.whole(source) else call.lost("reads samples by an index")
    if isinstance(share, Rows) and share.dim == dim:
        return call.lost("reads samples by an index")
    return share if call.whole(index) else call.lost("reads by a sum over the batch")


@_of_rows
def _split(call: OperatorCall, share: Rows) -> Any:
    """Pieces of each sample, or the blocks of samples that were put together."""
    shape = call.shape(call.tensors[0])
    if call.get("dim") % len(shape) != share.dim:
        return share
    sizes = [piece.shape[share.dim] for piece in value(call.node)]
    ends = itertools.accumulate(sizes)
    blocks = [_blocks(shape, share, end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return tuple(blocks) if all(blocks) else call.lost("divides the batch")


def _blocks(shape: Sequence[int], share: Rows, begin: int, end: int) -> Rows | None:
    """Some places along the batch: again rows of all samples, if they are whole blocks, such as one of two views."""
    size = shape[share.dim] // share.outer
    return Rows(share.dim, (end - begin) // size) if begin < end and begin % size == end % size == 0 else None


def _cat(call: OperatorCall) -> Known:
    tensors = [n for n in call.tensors if value(n).numel()]  # an empty cache has no shape
    if not tensors:
        return SAME
    if call.name == "stack":
        count = len(call.shape(tensors[0])) + 1
        dim = call.get("dim") % count
        rows = common_rows(call, tensors, call.shape(tensors[0]))
        return Rows(rows.dim + (dim <= rows.dim), rows.outer) if isinstance(rows, Rows) else rows or _joined(call)
    dim = call.get("dim") % max(len(call.shape()), 1)
    shares = [call.known(n) for n in tensors]
    if all(s == Rows(dim) for s in shares) and len({call.shape(n)[dim] for n in tensors}) == 1:
        return Rows(dim, len(tensors))
    rows = next((s for s in shares if isinstance(s, Rows)), None)
    if rows is None:
        return _joined(call)
    if rows.dim == dim or any(isinstance(s, Rows) and s != rows for s in shares):
        return call.lost("puts samples together with other samples")
    others = [n for s, n in zip(shares, tensors, strict=True) if not isinstance(s, Rows)]
    if all(call.whole(n) and rows.dim in call.same_dims(n) for n in others):
        return rows
    return call.lost("puts samples together with what is the same for every microbatch")


def _joined(call: OperatorCall) -> Known:
    shares = {call.known(n) for n in call.tensors if value(n).numel()}
    if MEAN in shares and all(s is MEAN or is_same(s) for s in shares):
        return MEAN  # what is the same in every microbatch is its own mean
    return shares.pop() if len(shares) == 1 else without_rows(call) or call.lost("joins a sum over the batch to others")


@_of_rows
def _repeat(call: OperatorCall, share: Rows) -> Known:
    repeats, count = call.get("repeats"), len(call.shape(call.tensors[0]))
    dim = share.dim + len(repeats) - count
    return Rows(dim, share.outer * repeats[dim])


def _pad(call: OperatorCall) -> Known:
    share: Known = call.known(call.tensors[0])
    if not isinstance(share, Rows):
        return unknown(call)
    after = call.shape()
    return share if after[share.dim] == call.shape(call.tensors[0])[share.dim] else call.lost("pads the batch")


def _as_strided(call: OperatorCall) -> Known:
    """Shows every element at its own place, as decompositions do to give a result its layout."""
    source = call.tensors[0]
    shown, result = value(source), value(call.node)
    steps = [(n, step) for n, step in zip(result.shape, result.stride(), strict=True) if n > 1]
    share: Known = call.known(source)
    if (
        shown.shape == result.shape
        and shown.storage_offset() == result.storage_offset()
        and steps == [(n, step) for n, step in zip(shown.shape, shown.stride(), strict=True) if n > 1]
    ):
        return share
    return unknown(call)


@_of_rows
def _last_two(call: OperatorCall, share: Rows) -> Known:
    return call.lost("works along the batch") if share.dim >= len(call.shape()) - 2 else share


def _scatter(call: OperatorCall) -> Known:
    """Writes into a slice of a tensor."""
    source, written = call.tensors
    dim = call.get("dim") % len(call.shape(source))
    share, new = call.known(source), call.known(written)
    if isinstance(new, Rows) and call.name == "select_scatter":
        new = Rows(new.dim + (new.dim >= dim), new.outer)
    rows = share if isinstance(share, Rows) else new
    if not isinstance(rows, Rows) or rows.dim == dim:
        return call.lost("writes some samples of the batch")
    if share == new or (share == rows and call.whole(written) and not call.shape(written)):
        return rows
    if share != rows and call.whole(source) and rows.dim in call.same_dims(source):
        return rows
    others = rows.dim - (call.name == "select_scatter" and rows.dim > dim)
    if share == rows and call.whole(written) and others in call.same_dims(written):
        return rows
    return call.lost("puts samples together with what is the same for every microbatch")


RULES: tuple[tuple[Rule, str], ...] = (
    (_view, "view _unsafe_view reshape _reshape_alias unflatten flatten"),
    (_expand, "expand"),
    (_moved, "permute transpose t squeeze unsqueeze select unbind"),
    (_slice, "slice"),
    (_index_select, "index_select"),
    (_split, "split split_with_sizes chunk"),
    (_cat, "cat stack"),
    (_repeat, "repeat"),
    (_pad, "constant_pad_nd"),
    (_as_strided, "as_strided"),
    (_last_two, "tril triu"),
    (_scatter, "slice_scatter select_scatter"),
)
