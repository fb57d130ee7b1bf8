"""Values that are the same in every microbatch: along which of their dimensions they are equal, too.

An expanded class token, a recurrent layer's zeros and the mask of a dropped path have a row for each sample, and all
rows are equal: they fit the rows of the batch, for any number of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import lcm, prod
from typing import Any

from torch import fx

from fxpipe.ir.aten import is_pointwise, is_random
from fxpipe.ir.program import value
from fxpipe.passes.analysis.share import Alike, Microbatches, Rows, Share, after_view, allows
from fxpipe.passes.analysis.share_rules.call import (
    SAME,
    UNIFORM,
    OperatorCall,
    argument,
    new_places,
    reduced_dims,
)
from fxpipe.passes.analysis.whole_call import WholeCall, shapes_of, whole_call, whole_shape

Dims = Callable[[OperatorCall, list[frozenset[int]]], set[int]]
"""Along which dimensions a result is equal, from those of the arguments."""


def same_of(call: OperatorCall) -> Any:
    """The result of an operator whose arguments are all the same in every microbatch."""
    if is_random(call.node):
        return _drawn(call)
    if call.name in _FILLED:
        return UNIFORM
    tensors = call.tensors
    if not tensors:
        return SAME
    pointwise = is_pointwise(call.node)
    if call.name == "cat" and (blocks := _blocks(call)):
        return blocks
    if all(call.known(n) is UNIFORM for n in tensors) and (pointwise or call.name in _KEEPS_UNIFORM):
        return UNIFORM
    rule = _elements if pointwise else _DIMS.get(call.name)
    dims = rule(call, [call.same_dims(n) for n in tensors]) if rule else set()
    repeating = _PERIODS[rule](call) if rule in _PERIODS else {}
    periods = {d: n for d, n in repeating.items() if 1 < n < call.shape()[d]}
    share = Alike(frozenset(dims), frozenset(periods.items())) if dims or periods else SAME
    return _rows_of_view(call, share) or share


def _drawn(call: OperatorCall) -> Any:
    """Numbers that each sample draws for itself are rows: their mean is not the same in every microbatch."""
    if drawn_once(call.facts, call.node):
        return SAME
    shape, whole = call.shape(), whole_shape(call.node)
    if whole is None or len(whole) != len(shape) or whole == shape:
        grown = [d for d, size in enumerate(shape) if size % call.facts.batch == 0]
    else:
        grown = [d for d, (mine, theirs) in enumerate(zip(shape, whole, strict=True)) if mine != theirs]
    return Rows(grown[0]) if len(grown) == 1 else call.lost("draws numbers for several samples together")


def drawn_once(facts: Microbatches, node: fx.Node) -> bool:
    """Whether a call draws numbers that do not belong to samples: eager PyTorch draws them once for the whole batch.

    The call has the same shapes in the step on the whole batch; if that is not known, no dimension is a multiple of
    the batch.
    """
    if not is_random(node) or facts.parts == 1:
        return False
    shapes, whole = shapes_of(value(node)), whole_call(node)
    if isinstance(whole, WholeCall):
        return shapes == whole.shapes
    return all(size % facts.batch for shape in shapes for size in shape or ())


def _rows_of_view(call: OperatorCall, share: Alike | Share) -> Rows | None:
    """A value equal for each sample, merged with other dimensions: no longer equal, but still rows."""
    if _DIMS.get(call.name) is not _view or call.may_be(share):
        return None
    source = call.tensors[0]
    shape, theirs = call.shape(source), whole_shape(source) or ()
    grown = [d for d, (mine, its) in enumerate(zip(shape, theirs, strict=True)) if mine != its]
    if len(grown) != 1 or shape[grown[0]] != call.facts.batch or grown[0] not in call.same_dims(source):
        return None
    return after_view(Rows(grown[0]), shape, call.shape(), call.facts.batch, call.may_be)


def _blocks(call: OperatorCall) -> Rows | None:
    """Concatenated blocks, each of equal elements and as long as the number of samples: labels of two kinds."""
    dim = call.get("dim") % max(len(call.shape()), 1)
    sizes = {call.shape(n)[dim] for n in call.tensors if len(call.shape(n)) == len(call.shape())}
    alone = all(call.known(n) is UNIFORM for n in call.tensors)
    if not alone or len(sizes) != 1 or sizes.pop() % call.facts.batch:
        return None
    rows = Rows(dim, len(call.tensors))
    if not call.facts.parts:
        return rows
    both = [(call.shape(n), whole_shape(n)) for n in call.tensors]
    return rows if all(its and allows(rows, shape, its, call.facts.parts) for shape, its in both) else None


def _periods_of_elements(call: OperatorCall) -> dict[int, int]:
    count = len(call.shape())
    periods = dict.fromkeys(range(count), 1)
    for node in call.tensors:
        shape = call.shape(node)
        for d in range(len(shape)):
            place = d + count - len(shape)
            periods[place] = lcm(periods[place], call.period(node, d))
    return periods


def _periods_of_view(call: OperatorCall) -> dict[int, int]:
    """Merged dimensions: those that are equal, before the others, make it repeat the others."""
    source = call.tensors[0]
    before, periods = call.shape(source), {}
    for these, ours in _joined(before, call.shape()):
        inner = [d for d in these if before[d] > 1]
        while len(inner) > 1 and call.period(source, inner[0]) == 1:
            inner.pop(0)
        if len(ours) == 1 and inner:
            periods[ours[0]] = call.period(source, inner[0]) * prod(before[d] for d in inner[1:])
    return periods


def _elements(call: OperatorCall, dims: list[frozenset[int]]) -> set[int]:
    return _broadcast([call.shape(node) for node in call.tensors], dims, len(call.shape()))


def _broadcast(shapes: Sequence[Sequence[int]], dims: Sequence[frozenset[int]], count: int) -> set[int]:
    """Along which of `count` dimensions tensors are equal, each broadcast to these."""
    equal_dims = set(range(count))
    for shape, its_dims in zip(shapes, dims, strict=True):
        missing = count - len(shape)
        equal_dims &= {d for d in range(count) if d < missing or shape[d - missing] == 1 or d - missing in its_dims}
    return equal_dims


def _first(call: OperatorCall, dims: list[frozenset[int]]) -> set[int]:
    """Works along some dimensions of its first argument, and keeps the others."""
    count = len(call.shape(call.tensors[0]))
    return set(dims[0]) - reduced_dims(call, count) if len(call.shape()) == count else set()


def _normalised(call: OperatorCall, dims: list[frozenset[int]]) -> set[int]:
    count = len(call.shape(call.tensors[0])) - len(call.get("normalized_shape"))
    return {d for d in dims[0] if d < count}


def _view(call: OperatorCall, dims: list[frozenset[int]]) -> set[int]:
    before = call.shape(call.tensors[0])
    equal_dims = set[int]()
    for these, ours in _joined(before, call.shape()):
        if all(d in dims[0] or before[d] == 1 for d in these):
            equal_dims |= set(ours)
    return equal_dims


def _joined(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[range, range]]:
    """Which dimensions of a tensor become which of its view, in the smallest groups of equal size."""
    i = j = 0
    while i < len(before) and j < len(after):
        begin, first = i, j
        i, j = i + 1, j + 1
        while prod(before[begin:i]) != prod(after[first:j]) and (i < len(before) or j < len(after)):
            if (prod(before[begin:i]) < prod(after[first:j]) and i < len(before)) or j == len(after):
                i += 1
            else:
                j += 1
        yield range(begin, i), range(first, j)


def _moved(call: OperatorCall, dims: list[frozenset[int]]) -> set[int]:
    """Dimensions are permuted; new ones, and those that a reduction keeps, have size 1."""
    places = new_places(call)
    new_dims = set(range(len(call.shape()))) - set(places)
    kept_dims = reduced_dims(call, len(places)) if argument(call, "keepdim") else set()
    return new_dims | kept_dims | {at for d, at in enumerate(places) if at is not None and d in dims[0]}


def _cat(call: OperatorCall, dims: list[frozenset[int]]) -> set[int]:
    return set(frozenset.intersection(*dims)) - {call.get("dim") % max(len(call.shape()), 1)}


def _stack(call: OperatorCall, dims: list[frozenset[int]]) -> set[int]:
    at = call.get("dim") % len(call.shape())
    return {d + (d >= at) for d in frozenset.intersection(*dims)}


def _product(call: OperatorCall, dims: list[frozenset[int]]) -> set[int]:
    """The rows of the first matrix, and which matrix of several it is."""
    count = len(call.shape())
    left, right = dims[-2:]
    rows = {d for d in left if d <= count - 2}
    return {d for d in rows if d == count - 2 or d in right} if count > 1 else set()


def _samples(call: OperatorCall, dims: list[frozenset[int]]) -> set[int]:
    like = [
        d for n, d in zip(call.tensors, dims, strict=True) if len(call.shape(n)) == len(call.shape(call.tensors[0]))
    ]
    if "scaled_dot_product" in call.name:
        return {0} if all(0 in d for d in like) else set()
    return {0} & dims[0]


def _index(call: OperatorCall, dims: list[frozenset[int]]) -> set[int]:
    """Along which dimensions the indices are equal, if they index the first dimensions of the table."""
    if None in call.get("indices"):
        return set()
    shapes = [call.shape(node) for node in call.tensors[1:]]
    return _broadcast(shapes, dims[1:], max(map(len, shapes)))


def _placed(call: OperatorCall, dims: list[frozenset[int]]) -> set[int]:
    """The gradient of a select or a slice, placed into zeros."""
    at = call.get("dim") % len(call.shape())
    return {d + (call.name == "select_backward" and d >= at) for d in dims[0]} - {at}


def _written(call: OperatorCall, dims: list[frozenset[int]]) -> set[int]:
    """Overwrites some places along a dimension."""
    at = call.get("dim") % len(call.shape())
    less = call.name == "select_scatter"
    return {d for d in dims[0] - {at} if d - (less and d > at) in dims[1]}


def _table(call: OperatorCall, dims: list[frozenset[int]]) -> set[int]:
    return set(dims[1])


_FILLED = {
    "ones", "zeros", "full", "empty", "new_ones", "new_zeros", "new_full", "new_empty", "ones_like", "zeros_like",
    "full_like", "empty_like", "scalar_tensor", "empty_strided", "fill",
}  # fmt: skip
_KEEPS_UNIFORM = {
    "clone", "_to_copy", "view", "_unsafe_view", "reshape", "expand", "permute", "transpose", "t", "squeeze",
    "unsqueeze", "select", "slice", "repeat", "unbind", "split", "split_with_sizes", "chunk", "sum", "mean",
}  # fmt: skip
_PERIODS: dict[Dims | None, Callable[[OperatorCall], dict[int, int]]] = {
    _elements: _periods_of_elements,
    _view: _periods_of_view,
}
_DIMS: dict[str, Dims] = {}
for _rule, _names in (
    (_elements, "clone _to_copy alias detach lift_fresh_copy copy log_sigmoid_forward"),
    (_elements, "_prelu_kernel hardswish floor_divide complex polar expand repeat"),
    (_view, "view _unsafe_view reshape _reshape_alias"),
    (_moved, "permute transpose t unsqueeze select unbind squeeze sum mean amax amin max min argmax argmin any all"),
    (_cat, "cat"),
    (_stack, "stack"),
    (_product, "mm addmm bmm baddbmm"),
    (
        _first,
        "_safe_softmax _softmax _log_softmax cumsum sort argsort topk flip roll slice index_select constant_pad_nd "
        "split split_with_sizes chunk",
    ),
    (_samples, "convolution native_group_norm _scaled_dot_product_flash_attention_for_cpu"),
    (_samples, "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention"),
    (_normalised, "native_layer_norm _fused_rms_norm"),
    (_table, "embedding"),
    (_index, "index _unsafe_index"),
    (_placed, "select_backward slice_backward"),
    (_written, "slice_scatter select_scatter"),
):
    _DIMS.update(dict.fromkeys(_names.split(), _rule))
