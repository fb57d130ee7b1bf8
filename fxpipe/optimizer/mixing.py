"""Whose values the results of an operator are made of, from whose its arguments are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxpipe.optimizer.whose import UNSURE, Whose, Workers, several, union

Operator = torch._ops.OpOverload

_LIKE = {
    *("empty_like", "full_like", "ones_like", "zeros_like", "rand_like", "randn_like", "randint_like"),
    *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "lift_fresh"),
}
"""What only looks at shape and dtype."""

_OVERWRITING = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"}
_OVERWRITING |= {"_foreach_copy_", "_foreach_zero_"}
"""What writes into a tensor without reading it."""

_MOVING = {
    *("cat", "stack", "flip", "roll", "repeat", "repeat_interleave", "gather", "take", "index", "index_select"),
    *("tril", "triu", "constant_pad_nd", "split_copy", "unbind_copy", "select_scatter", "slice_scatter", "diag_embed"),
}
"""What moves elements to other places, and can do so with the sets of workers."""

_PLACES = {"index", "indices", "repeats", "dim", "dims", "shifts"}
"""Arguments that say where elements are moved to."""

_ELEMENTWISE = {"copy_", "_to_copy", "masked_fill", "masked_fill_", "_unsafe_view", "_reshape_copy", "dropout"}
"""What torch does not tag as such."""


@dataclass(frozen=True)
class _Manner:
    """How an operator treats its arguments.

    Attributes:
        names: of its arguments.
        lists: `_foreach_` and `_fused_` operators: they treat what has the same place in their lists together, and
            nothing else.
        like: only shapes are looked at.
        written: names of the arguments that are written into; `overwritten` are those among them that are not read.
        moving, elementwise: what becomes of elements; neither is anything else, such as a sum.
    """

    names: tuple[str, ...]
    lists: bool
    like: bool
    written: tuple[str, ...]
    overwritten: tuple[str, ...]
    moving: bool
    elementwise: bool


@functools.cache
def _manner(operator: Operator) -> _Manner:
    name = operator._schema.name.partition("::")[2]
    written = [a for a in operator._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return _Manner(
        names=tuple(a.name for a in operator._schema.arguments),
        lists=name.startswith(("_foreach_", "_fused_", "_amp_foreach_")),
        like=name in _LIKE,
        written=tuple(a.name for a in written),
        overwritten=tuple(a.name for a in written if a.kwarg_only or name in _OVERWRITING),
        moving=name in _MOVING,
        elementwise=name in _ELEMENTWISE or torch.Tag.pointwise in operator.tags,
    )


def spread(
    whose: Whose, operator: Operator, args: Sequence[Any], kwargs: dict[str, Any], result: Any, here: Callable[[], str]
) -> None:
    """Write down whose values an operator's results are made of, and what it has written into.

    Args:
        here: says where it was called; asked where several workers' values come together.
    """
    manner = _manner(operator)
    given = {**dict(zip(manner.names, args, strict=False)), **kwargs}
    if manner.lists:
        _by_place(whose, manner, given, result, here)
        return
    every = tensors(list(given.values()))
    read = [] if manner.like else every
    if manner.overwritten:
        read = tensors([value for name, value in given.items() if name not in manner.overwritten])
    workers = 0
    for tensor in read:
        workers |= whose.of(tensor)
    inputs = {tensor.untyped_storage()._cdata for tensor in every}
    fresh = [tensor for tensor in tensors(result) if tensor.untyped_storage()._cdata not in inputs]
    into = tensors([given.get(name) for name in manner.written]) if manner.written else []
    if not several(workers):
        for tensor in fresh + into:
            whose.put(tensor, workers)
        return
    at = whose.at(read)
    results = into + fresh
    if not results:
        return  # a view
    mixed = _mixed(whose, manner, operator, given, results, read, workers)
    for tensor, made in zip(results, mixed, strict=True):
        if not at and any(several(each) for each in set(made.flatten().tolist())):
            at = here()
        whose.put_elements(tensor, made, at)


def tensors(values: Any) -> list[Tensor]:
    """All tensors in these."""
    if isinstance(values, Tensor):
        return [values]
    if not isinstance(values, (list, tuple)):
        return []
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors(value)
    return found


def _by_place(whose: Whose, manner: _Manner, given: dict[str, Any], result: Any, here: Callable[[], str]) -> None:
    """Of operators on lists."""
    lists = {name: value for name, value in given.items() if isinstance(value, (list, tuple)) and tensors(value)}
    count = max(map(len, lists.values()), default=0)
    each = [0] * count
    common = 0
    for name, value in given.items():
        if name in manner.overwritten:
            continue
        if name in lists and len(value) == count:
            for place, tensor in enumerate(value):
                each[place] |= whose.of(tensor)
        elif isinstance(value, Tensor) and name == "scalars" and value.shape == (count,):
            each = [one | other for one, other in zip(each, whose.elements(value).tolist(), strict=True)]
        else:
            for tensor in tensors(value):
                common |= whose.of(tensor)
    at = ""
    if any(several(workers | common) for workers in each):
        at = whose.at(tensors(list(given.values()))) or here()
    for value in (*(given.get(name) for name in manner.written), result):
        if isinstance(value, (list, tuple)) and len(value) == count:
            for place, tensor in enumerate(value):
                workers = each[place] | common
                whose.put(tensor, workers, at if several(workers) else "")
        else:
            for tensor in tensors(value):
                workers = functools.reduce(int.__or__, each, common)
                whose.put(tensor, workers, (at or here()) if several(workers) else "")


def _mixed(
    whose: Whose,
    manner: _Manner,
    operator: Operator,
    given: dict[str, Any],
    results: Sequence[Tensor],
    read: Sequence[Tensor],
    workers: Workers,
) -> list[Tensor]:
    """For each result the workers of each element."""
    if manner.elementwise:
        with_shapes = [whose.elements(tensor) for tensor in read]
        with suppress(RuntimeError):  # of no common shape: it is not elementwise after all
            each = functools.reduce(torch.bitwise_or, with_shapes)
            return [each.broadcast_to(result.shape) for result in results]
    if all(result.numel() == 1 for result in results):
        return [_everywhere(result, workers) for result in results]
    try:
        if manner.moving:
            made = _moved(whose, operator, given)
        else:
            made = _through_nan(whose, operator, given, results, read, workers)
        if [tensor.shape for tensor in made] == [result.shape for result in results]:
            return made
    except Exception:  # it cannot: what is known without
        pass
    return [_not_known(whose, operator, result, read, workers) for result in results]


def _moved(whose: Whose, operator: Operator, given: dict[str, Any]) -> list[Tensor]:
    """The sets of workers, moved as the elements are; all are of those, too, whose values say where to."""
    where = {name: value for name, value in given.items() if name in _PLACES}
    sets = {name: pytree.tree_map_only(Tensor, whose.elements, given[name]) for name in given if name not in where}
    also = functools.reduce(int.__or__, map(whose.of, tensors(list(where.values()))), 0)
    return [made | also for made in tensors(_called(operator, {**sets, **where}))]


def _called(operator: Operator, given: dict[str, Any]) -> Any:
    """With arguments by name; `self` is no keyword in Python."""
    arguments = [a for a in operator._schema.arguments if a.name in given]
    places = [given[a.name] for a in arguments if not a.kwarg_only]
    return operator(*places, **{a.name: given[a.name] for a in arguments if a.kwarg_only})


def _through_nan(
    whose: Whose,
    operator: Operator,
    given: dict[str, Any],
    results: Sequence[Tensor],
    read: Sequence[Tensor],
    workers: Workers,
) -> list[Tensor]:
    """Where NaN comes out if all that is made of one worker's values is NaN: only what is computed from it is.

    Raises:
        Exception: this operator does not go on with NaN.
    """
    if not all(t.is_floating_point() or t.is_complex() for t in (*results, *filter(whose.of, read))):
        raise TypeError("whole numbers are never NaN")
    made = [torch.zeros(result.shape, dtype=torch.int64, device=result.device) for result in results]
    for bit in _bits(workers):

        def poisoned(tensor: Tensor, bit: Workers = bit) -> Tensor:
            if not tensor.is_floating_point() and not tensor.is_complex():
                return tensor
            return tensor.masked_fill((whose.elements(tensor) & bit) != 0, torch.nan)

        found = tensors(_called(operator, pytree.tree_map_only(Tensor, poisoned, given)))
        for mine, tensor in zip(made, found, strict=True):
            mine[tensor.isnan()] |= bit
    return made


def _not_known(whose: Whose, operator: Operator, result: Tensor, read: Sequence[Tensor], workers: Workers) -> Tensor:
    """Decompositions treat matrices one by one; anything else may use all for all."""
    decomposes = operator._schema.name.partition("::")[2].startswith(("linalg_", "_linalg_", "cholesky", "inverse"))
    for tensor in read if decomposes else ():
        batch = tensor.shape[:-2]
        if tensor.dim() > 2 and result.shape[: len(batch)] == batch:
            each = [union(part) for part in whose.elements(tensor).flatten(0, len(batch) - 1)]
            shape = (*batch, *[1] * (result.dim() - len(batch)))
            return torch.tensor(each, device=result.device).view(shape).expand(result.shape).clone()
    return _everywhere(result, workers | UNSURE)


def _everywhere(result: Tensor, workers: Workers) -> Tensor:
    return torch.full(result.shape, workers, dtype=torch.int64, device=result.device)


def _bits(workers: Workers) -> Iterable[Workers]:
    while workers:
        yield workers & -workers
        workers &= workers - 1
