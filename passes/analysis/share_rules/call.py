"""An operator's call as the rules see it, and what several rules need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fxpipe.passes.analysis.share import Alike, Known, Lost, Microbatches, Rows, Share, fits
from fxpipe.passes.analysis.whole_call import whole_shape
from torch import fx

from fxpipe.ir.program import info, value
from fxpipe.torch_private import OpOverload, schema_of

SAME, UNIFORM, SUM, MEAN = Share.SAME, Share.UNIFORM, Share.SUM, Share.MEAN


@dataclass(frozen=True)
class OperatorCall:
    """An operator's call: its arguments by the names of its schema, and what is known about them."""

    found: Microbatches
    node: fx.Node

    @property
    def name(self) -> str:
        return operator_of(self.node)

    def get(self, argument: str) -> Any:
        """The value of an argument, its default if it is not given."""
        for i, known in enumerate(schema_of(self.node.target).arguments):
            if known.name == argument:
                if i < len(self.node.args):
                    return self.node.args[i]
                return self.node.kwargs.get(argument, known.default_value)
        raise KeyError(argument)

    @property
    def tensors(self) -> list[fx.Node]:
        """All arguments that are tensors, each as often as it occurs."""
        found: list[fx.Node] = []
        fx.node.map_arg((self.node.args, self.node.kwargs), found.append)
        return found

    def known(self, node: fx.Node) -> Any:
        return self.found.known[node]

    def shape(self, node: fx.Node | None = None) -> tuple[int, ...]:
        shown = value(node or self.node)
        return tuple((shown[0] if isinstance(shown, (tuple, list)) else shown).shape)

    def lost(self, why: str) -> Lost:
        if self.node.op == "placeholder":
            return Lost(f"{self.node.name} {why}", self.node.name)
        place = f" ({info(self.node).source})" if info(self.node).source else ""
        return Lost(f"{self.name}{place} {why}", self.node.name)

    def may_be(self, known: Known) -> bool:
        """Whether the result's shape in the whole batch, if known, allows it."""
        whole = whole_shape(self.node)
        return whole is None or fits(known, self.shape(), whole, self.found.parts)

    def whole(self, node: fx.Node) -> bool:
        """Whether a value is the whole minibatch's, or can be: then it becomes so (`Microbatches.totals`)."""
        share = self.known(node)
        if share in (SUM, MEAN) and node in self.found.alone:
            self.found.totals[node] = share
        return is_same(share) or node in self.found.totals


def is_same(known: Any) -> bool:
    """Whether a value is the same in every microbatch."""
    return known in (SAME, UNIFORM) or isinstance(known, Alike)


def alike(known: Any, count: int) -> frozenset[int]:
    """Along which of its `count` dimensions a value is known to be the same."""
    if isinstance(known, Alike):
        return known.dims
    return frozenset(range(count) if known is UNIFORM else ())


def period(known: Any, dim: int, shape: Sequence[int]) -> int:
    """After how many places along a dimension a value is known to repeat; its size if that is unknown."""
    if shape[dim] == 1 or dim in alike(known, len(shape)):
        return 1
    return dict(known.periods).get(dim, shape[dim]) if isinstance(known, Alike) else shape[dim]


def goes_with(call: OperatorCall, rows: Rows, size: int, known: Any, dim: int, shape: Sequence[int]) -> bool:
    """Whether a value that is the same in every microbatch is also the same for every sample.

    Args:
        rows: of a dimension of this size.
        known, dim, shape: of the value; its dimension at that place.
    """
    repeats = period(known, dim, shape)
    of_sample, groups = divmod(size // rows.outer, call.found.batch)
    return repeats == 1 or (repeats < shape[dim] and not groups and of_sample % repeats == 0)


Rule = Callable[[OperatorCall], Any]
"""What a call's result is, from what its arguments are; a tuple if its results differ."""


def made_of_totals(found: Microbatches, node: fx.Node) -> bool:
    """Whether a value is, or is computed from, one that was made the whole minibatch's."""
    seen, rest = set(), [node]
    while rest:
        at = rest.pop()
        if at in found.totals:
            return True
        if at not in seen and at in found.alone and at.op == "call_function" and not fills(at):
            seen.add(at)
            rest += at.all_input_nodes
    return False


def fills(node: fx.Node) -> bool:
    """Whether it fills the shape of a tensor with a number, for any values of the tensor."""
    name = operator_of(node)
    if name in ("zeros_like", "ones_like", "new_zeros", "new_ones"):
        return True
    return name in ("full_like", "new_full") and not isinstance(node.args[-1], fx.Node)


def operator_of(node: fx.Node) -> str:
    target = node.target
    return schema_of(target).name.partition("::")[2] if isinstance(target, OpOverload) else str(target)


def without_rows(call: OperatorCall) -> Known | None:
    """The result of any operator on values that are the whole minibatch's."""
    return SAME if all(call.whole(n) for n in call.tensors) else None


def unknown(call: OperatorCall) -> Known:
    return without_rows(call) or call.lost("is not known to treat all samples alike")


def by_elements(call: OperatorCall) -> Known:
    """Each element of the result comes from the elements at the same place after broadcasting."""
    rows = aligned(call, call.tensors, call.shape())
    if rows is not None:
        return rows
    return without_rows(call) or not_linear(call)


def not_linear(call: OperatorCall) -> Lost:
    """It gives different results for the whole batch's sum or mean and for the microbatches'."""
    of = next(k for n in call.tensors if (k := call.known(n)) in (SUM, MEAN))
    return call.lost(f"is not linear, and is applied to {of.value}")


def aligned(call: OperatorCall, tensors: Sequence[fx.Node], shape: Sequence[int]) -> Known | None:
    """Rows of a result to which tensors are broadcast; None if none of them has rows."""
    found: Rows | None = None
    for node in tensors:
        if not isinstance(known := call.known(node), Rows):
            continue
        rows = Rows(known.dim + len(shape) - len(call.shape(node)), known.outer)
        if found not in (None, rows):
            return call.lost("puts samples together with other samples")
        found = rows
    if found is None:
        return None
    size = shape[found.dim]
    for node in tensors:
        known, own = call.known(node), call.shape(node)
        dim = found.dim - len(shape) + len(own)
        if isinstance(known, Rows):
            if own[dim] != size:
                return call.lost("puts samples together with other samples")
        elif not call.whole(node):
            return call.lost(f"combines samples with {known.value}")
        elif dim >= 0 and not goes_with(call, found, size, known, dim, own):
            return call.lost(
                "combines samples with a tensor that has a row for each and is the same for every microbatch"
            )
    return found


def argument(call: OperatorCall, name: str) -> Any:
    return call.get(name) if any(a.name == name for a in schema_of(call.node.target).arguments) else None


def reduced(call: OperatorCall, count: int) -> set[int]:
    given = next((v for name in ("dim", "dims") if (v := argument(call, name)) is not None), None)
    if given is None or given == []:
        return set(range(count))
    return {d % max(count, 1) for d in (given if isinstance(given, (list, tuple)) else [given])}


def moved(call: OperatorCall) -> list[int | None]:
    """The place of each dimension of the argument in the result of permute, unsqueeze, squeeze, select and reductions.

    None if it disappears.
    """
    shape, after = call.shape(call.tensors[0]), len(call.shape())
    places: list[int | None] = list(range(len(shape)))
    if call.name == "permute":
        order = [d % after for d in call.get("dims")]
        return [order.index(d) for d in range(after)]
    if call.name in ("transpose", "t"):
        one, other = (0, after - 1) if call.name == "t" else (call.get("dim0") % after, call.get("dim1") % after)
        places[one], places[other] = other, one
        return places
    if call.name == "unsqueeze":
        at = call.get("dim") % after
        return [d + (d >= at) for d in range(len(shape))]
    gone = reduced(call, len(shape))
    if call.name == "squeeze":
        gone = {d for d in gone if shape[d] == 1}
    if argument(call, "keepdim"):
        return places
    return [None if d in gone else d - sum(g < d for g in gone) for d in range(len(shape))]
