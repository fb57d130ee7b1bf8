"""Views, slices and operators that put tensors together."""

from __future__ import annotations

import itertools
from typing import Any

from fxpipe.passes.analysis.share import Known, Rows, after_view
from fxpipe.passes.analysis.share_rules.call import (
    MEAN,
    SAME,
    OperatorCall,
    Rule,
    aligned,
    alike,
    is_same,
    moved,
    unknown,
    without_rows,
)
from fxpipe.passes.analysis.whole_call import whole_shape

from fxpipe.ir.program import value


def _view(call: OperatorCall) -> Known:
    source = call.tensors[0]
    known: Known = call.known(source)
    if not isinstance(known, Rows):
        return known
    groups = whole_shape(call.node) is not None
    made = after_view(known, call.shape(source), call.shape(), call.found.batch, call.may_be, groups=groups)
    return made or call.lost("divides the batch over several dimensions")


def _expand(call: OperatorCall) -> Known:
    source = call.tensors[0]
    known: Known = call.known(source)
    if not isinstance(known, Rows):
        return known
    dim = known.dim + len(call.shape()) - len(call.shape(source))
    if call.shape()[dim] != call.shape(source)[known.dim]:
        return call.lost("repeats the samples")
    return Rows(dim, known.outer)


def _moved(call: OperatorCall) -> Known:
    known: Known = call.known(call.tensors[0])
    if not isinstance(known, Rows):
        return known
    at = moved(call)[known.dim]
    if at is not None:
        return Rows(at, known.outer)
    one = "drops the dimension of the batch, which is of size 1 here"
    return call.lost(one if call.name == "squeeze" else "takes one sample of the batch")


def _slice(call: OperatorCall) -> Known:
    source = call.tensors[0]
    known: Known = call.known(source)
    dim = call.get("dim") % len(call.shape(source))
    if not isinstance(known, Rows) or dim != known.dim:
        return known
    begin, end, _ = slice(call.get("start"), call.get("end")).indices(call.shape(source)[dim])
    blocks = _blocks(call, begin, end) if call.get("step") == 1 else None
    return blocks or call.lost("takes some samples of the batch")


def _index_select(call: OperatorCall) -> Known:
    """Rows of a table in the order of an index, or the same places of every sample."""
    source, index = call.tensors
    known, order = call.known(source), call.known(index)
    dim = call.get("dim") % max(len(call.shape(source)), 1)
    if isinstance(order, Rows):
        return Rows(dim, order.outer) if call.whole(source) else call.lost("reads samples by an index")
    if isinstance(known, Rows) and known.dim == dim:
        return call.lost("reads samples by an index")
    return known if call.whole(index) else call.lost("reads by a sum over the batch")


def _split(call: OperatorCall) -> Any:
    """Pieces of each sample, or the blocks of samples that were put together."""
    source = call.tensors[0]
    known: Known = call.known(source)
    dim = call.get("dim") % len(call.shape(source))
    if not isinstance(known, Rows) or dim != known.dim:
        return known
    sizes = [piece.shape[dim] for piece in value(call.node)]
    ends = itertools.accumulate(sizes)
    found = [_blocks(call, end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return tuple(found) if all(found) else call.lost("divides the batch")


def _blocks(call: OperatorCall, begin: int, end: int) -> Rows | None:
    """Some places along the batch: again rows of all samples, if they are whole blocks, such as one of two views."""
    source = call.tensors[0]
    known = call.known(source)
    size = call.shape(source)[known.dim] // known.outer
    return Rows(known.dim, (end - begin) // size) if begin < end and begin % size == end % size == 0 else None


def _cat(call: OperatorCall) -> Known:
    tensors = [n for n in call.tensors if value(n).numel()]  # an empty cache has no shape
    if not tensors:
        return SAME
    if call.name == "stack":
        count = len(call.shape(tensors[0])) + 1
        dim = call.get("dim") % count
        rows = aligned(call, tensors, call.shape(tensors[0]))
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
    others = [(s, n) for s, n in zip(shares, tensors, strict=True) if not isinstance(s, Rows)]
    if all(call.whole(n) and rows.dim in alike(s, len(call.shape(n))) for s, n in others):
        return rows
    return call.lost("puts samples together with what is the same for every microbatch")


def _joined(call: OperatorCall) -> Known:
    shares = {call.known(n) for n in call.tensors if value(n).numel()}
    if MEAN in shares and all(s is MEAN or is_same(s) for s in shares):
        return MEAN  # what is the same in every microbatch is its own mean
    return shares.pop() if len(shares) == 1 else without_rows(call) or call.lost("joins a sum over the batch to others")


def _repeat(call: OperatorCall) -> Known:
    known: Known = call.known(call.tensors[0])
    if not isinstance(known, Rows):
        return known
    repeats, count = call.get("repeats"), len(call.shape(call.tensors[0]))
    dim = known.dim + len(repeats) - count
    return Rows(dim, known.outer * repeats[dim])


def _pad(call: OperatorCall) -> Known:
    known: Known = call.known(call.tensors[0])
    if not isinstance(known, Rows):
        return unknown(call)
    after = call.shape()
    return known if after[known.dim] == call.shape(call.tensors[0])[known.dim] else call.lost("pads the batch")


def _as_strided(call: OperatorCall) -> Known:
    """Shows every element at its own place, as decompositions do to give a result its layout."""
    source = call.tensors[0]
    shown, made = value(source), value(call.node)
    steps = [(n, step) for n, step in zip(made.shape, made.stride(), strict=True) if n > 1]
    known: Known = call.known(source)
    if (
        shown.shape == made.shape
        and shown.storage_offset() == made.storage_offset()
        and steps == [(n, step) for n, step in zip(shown.shape, shown.stride(), strict=True) if n > 1]
    ):
        return known
    return unknown(call)


def _last_two(call: OperatorCall) -> Known:
    known: Known = call.known(call.tensors[0])
    if isinstance(known, Rows) and known.dim >= len(call.shape()) - 2:
        return call.lost("works along the batch")
    return known


def _scatter(call: OperatorCall) -> Known:
    """Writes into a slice of a tensor."""
    source, written = call.tensors
    shape, dim = call.shape(source), call.get("dim") % len(call.shape(source))
    known, new = call.known(source), call.known(written)
    if isinstance(new, Rows) and call.name == "select_scatter":
        new = Rows(new.dim + (new.dim >= dim), new.outer)
    rows = known if isinstance(known, Rows) else new
    if not isinstance(rows, Rows) or rows.dim == dim:
        return call.lost("writes some samples of the batch")
    if known == new or (known == rows and call.whole(written) and not call.shape(written)):
        return rows
    if known != rows and call.whole(source) and rows.dim in alike(known, len(shape)):
        return rows
    others = rows.dim - (call.name == "select_scatter" and rows.dim > dim)
    if known == rows and call.whole(written) and others in alike(new, len(call.shape(written))):
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
