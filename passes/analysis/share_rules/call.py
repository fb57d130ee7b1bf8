"""An operator's call as the rules see it, and what several rules need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxpipe.ir.program import info, value
from fxpipe.passes.analysis.share import Alike, Known, Lost, Microbatches, Rows, Share, allows
from fxpipe.passes.analysis.whole_call import whole_shape
from fxpipe.torch_private import OpOverload, schema_of

SAME, UNIFORM, SUM, MEAN = Share.SAME, Share.UNIFORM, Share.SUM, Share.MEAN


@dataclass(frozen=True)
class OperatorCall:
    """An operator's call: its arguments by the names of its schema, and what is known about them."""

    facts: Microbatches
    node: fx.Node

    @property
    def name(self) -> str:
        return operator_of(self.node)

    def get(self, argument: str) -> Any:
        """The value of an argument, its default if it is not given."""
        for i, declared in enumerate(schema_of(self.node.target).arguments):
            if declared.name == argument:
                if i < len(self.node.args):
                    return self.node.args[i]
                return self.node.kwargs.get(argument, declared.default_value)
        raise KeyError(argument)

    @property
    def tensors(self) -> list[fx.Node]:
        """All arguments that are tensors, each as often as it occurs."""
        nodes: list[fx.Node] = []
        fx.node.map_arg((self.node.args, self.node.kwargs), nodes.append)
        return nodes

    def known(self, node: fx.Node) -> Any:
        return self.facts.known[node]

    def shape(self, node: fx.Node | None = None) -> tuple[int, ...]:
        shown = value(node or self.node)
        return tuple((shown[0] if isinstance(shown, (tuple, list)) else shown).shape)

    def lost(self, why: str) -> Lost:
        if self.node.op == "placeholder":
            return Lost(f"{self.node.name} {why}", self.node.name)
        place = f" ({info(self.node).source})" if info(self.node).source else ""
        return Lost(f"{self.name}{place} {why}", self.node.name)

    def may_be(self, share: Known) -> bool:
        """Whether the result's shape in the whole batch, if known, allows it."""
        whole = whole_shape(self.node)
        return whole is None or allows(share, self.shape(), whole, self.facts.parts)

    def whole(self, node: fx.Node) -> bool:
        """Whether a value is the whole minibatch's, or can be: then it becomes so (`Microbatches.totals`)."""
        share = self.known(node)
        if share in (SUM, MEAN) and node in self.facts.alone:
            self.facts.totals[node] = share
        return is_same(share) or node in self.facts.totals

    def same_dims(self, node: fx.Node) -> frozenset[int]:
        """Along which of its dimensions a value is known to be the same."""
        share = self.known(node)
        if isinstance(share, Alike):
            return share.dims
        return frozenset(range(len(self.shape(node))) if share is UNIFORM else ())

    def period(self, node: fx.Node, dim: int) -> int:
        """After how many places along a dimension a value is known to repeat; its size if that is unknown."""
        share, size = self.known(node), self.shape(node)[dim]
        if size == 1 or dim in self.same_dims(node):
            return 1
        return dict(share.periods).get(dim, size) if isinstance(share, Alike) else size

    def is_same_for_samples(self, node: fx.Node, dim: int, rows: Rows, size: int) -> bool:
        """Whether a value that is the same in every microbatch is also the same for every sample.

        Along its dimension `dim` are samples: `rows` of a dimension of this size.
        """
        repeats = self.period(node, dim)
        of_sample, groups = divmod(size // rows.outer, self.facts.batch)
        return repeats == 1 or (repeats < self.shape(node)[dim] and not groups and of_sample % repeats == 0)


def is_same(share: Any) -> bool:
    """Whether a value is the same in every microbatch."""
    return share in (SAME, UNIFORM) or isinstance(share, Alike)


Rule = Callable[[OperatorCall], Any]
"""What a call's result is, from what its arguments are; a tuple if its results differ."""


def made_of_totals(facts: Microbatches, node: fx.Node) -> bool:
    """Whether a value is, or is computed from, one that was made the whole minibatch's."""
    seen, stack = set(), [node]
    while stack:
        at = stack.pop()
        if at in facts.totals:
            return True
        if at not in seen and at in facts.alone and at.op == "call_function" and not fills(at):
            seen.add(at)
            stack += at.all_input_nodes
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
    rows = common_rows(call, call.tensors, call.shape())
    if rows is not None:
        return rows
    return without_rows(call) or not_linear(call)


def not_linear(call: OperatorCall) -> Lost:
    """It gives different results for the whole batch's sum or mean and for the microbatches'."""
    of = next(k for n in call.tensors if (k := call.known(n)) in (SUM, MEAN))
    return call.lost(f"is not linear, and is applied to {of.value}")


def common_rows(call: OperatorCall, tensors: Sequence[fx.Node], shape: Sequence[int]) -> Known | None:
    """Rows of a result to which tensors are broadcast; None if none of them has rows."""
    common: Rows | None = None
    for node in tensors:
        if not isinstance(share := call.known(node), Rows):
            continue
        rows = Rows(share.dim + len(shape) - len(call.shape(node)), share.outer)
        if common not in (None, rows):
            return call.lost("puts samples together with other samples")
        common = rows
    if common is None:
        return None
    size = shape[common.dim]
    for node in tensors:
        share, its_shape = call.known(node), call.shape(node)
        dim = common.dim - len(shape) + len(its_shape)
        if isinstance(share, Rows):
            if its_shape[dim] != size:
                return call.lost("puts samples together with other samples")
        elif not call.whole(node):
            return call.lost(f"combines samples with {share.value}")
        elif dim >= 0 and not call.is_same_for_samples(node, dim, common, size):
            return call.lost(
                "combines samples with a tensor that has a row for each and is the same for every microbatch"
            )
    return common


def argument(call: OperatorCall, name: str) -> Any:
    return call.get(name) if any(a.name == name for a in schema_of(call.node.target).arguments) else None


def reduced_dims(call: OperatorCall, count: int) -> set[int]:
    dims = next((v for name in ("dim", "dims") if (v := argument(call, name)) is not None), None)
    if dims is None or dims == []:
        return set(range(count))
    return {d % max(count, 1) for d in (dims if isinstance(dims, (list, tuple)) else [dims])}


def new_places(call: OperatorCall) -> list[int | None]:
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
    gone = reduced_dims(call, len(shape))
    if call.name == "squeeze":
        gone = {d for d in gone if shape[d] == 1}
    if argument(call, "keepdim"):
        return places
    return [None if d in gone else d - sum(g < d for g in gone) for d in range(len(shape))]
