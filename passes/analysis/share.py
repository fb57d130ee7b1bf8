"""What a microbatch's value is of the whole minibatch's: the words of `microbatches.py` and its rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import Any

from fxpipe.passes.analysis.backward_calls import BackwardCalls
from torch import fx

from fxpipe.ir.program import Program


class Share(Enum):
    """A value that has no rows of the batch.

    SAME: each microbatch has the whole minibatch's value. UNIFORM: so it is, and its elements are alike (filled, or
    drawn independently), so that it goes with any rows. SUM: the whole value is the sum of the microbatches', MEAN:
    their mean.
    """

    SAME = "the same in every microbatch"
    UNIFORM = "the same in every element"
    SUM = "a sum over the batch"
    MEAN = "a mean over the batch"


@dataclass(frozen=True)
class Rows:
    """The whole value is the microbatches' values, put together along a dimension.

    Attributes:
        dim: which one.
        outer: how many blocks the dimension is made of, each of them put together by itself: a transposed
            [time, batch], seen as one dimension, has `time` of them.
    """

    dim: int
    outer: int = 1


@dataclass(frozen=True)
class Alike:
    """The same in every microbatch, and along some dimensions: an expanded weight, which goes with rows there.

    Attributes:
        dims: along which it is the same.
        periods: other dimensions, and after how many places it repeats itself along them: a mask for each window of a
            picture, once for each sample.
    """

    dims: frozenset[int]
    periods: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class Lost:
    """Nothing is known of the value.

    Attributes:
        why: what lost it, in words.
        node: the name of the node that did.
    """

    why: str
    node: str


Known = Share | Rows | Alike | Lost


@dataclass
class Microbatches:
    """What is known of a program that was captured on one microbatch; `microbatches.py` derives it.

    Attributes:
        batch: how many samples the microbatch has.
        backward: which backward calls belong to which forward call.
        parts: how many times as large the whole batch is; 0 if the program does not say (`whole_call.py`).
        changing: the placeholders of buffers that the step updates.
        known: what each forward value is; a tuple for an operator whose results differ.
        alone: the nodes that are computed from the batch and from constants: no gradient goes through them.
        totals: sums and means over the batch, by what they are, that are not only added up: the whole minibatch's value
            must take their place, and then they are the same in every microbatch.
        likelihoods: the means of negative log-likelihoods, which divide by the weights of one microbatch's targets.
        numbers: by a call that takes numbers which depend on how many samples there are: which it must take for the
            whole minibatch, by their place.
        kept: calls whose number depends on it, too, and is right as it is: it makes a mean of a sum.
        factors: by a quotient or product that would be a sum, the input that makes it a mean if that is scaled.
        divided: by an addition of a sum and what is none, the values that are sums, too, once they are divided by the
            number of microbatches, each with the call that reads it.
        batch_norms: the normalisations over the samples of a microbatch.
        passed_over: calls that serve metrics, of which nothing is derived.
    """

    program: Program
    batch: int
    backward: BackwardCalls
    parts: int = 0
    changing: frozenset[str] = frozenset()
    known: dict[fx.Node, Any] = field(default_factory=dict)
    alone: set[fx.Node] = field(default_factory=set)
    totals: dict[fx.Node, Share] = field(default_factory=dict)
    likelihoods: list[fx.Node] = field(default_factory=list)
    numbers: dict[fx.Node, dict[int | str, Any]] = field(default_factory=dict)
    kept: set[fx.Node] = field(default_factory=set)
    factors: dict[fx.Node, fx.Node] = field(default_factory=dict)
    divided: dict[fx.Node, list[tuple[fx.Node, fx.Node]]] = field(default_factory=dict)
    batch_norms: list[fx.Node] = field(default_factory=list)
    passed_over: frozenset[fx.Node] = frozenset()

    @property
    def loss(self) -> Known:
        """What the loss of one microbatch is."""
        node = self.program.loss_node
        assert node is not None
        return self.known[node]


def fits(known: Known, own: Sequence[int], whole: Sequence[int], parts: int) -> bool:
    """Whether a value of which this is known can have that shape on the whole batch."""
    if known is Share.UNIFORM or isinstance(known, Lost):
        return True
    if len(own) != len(whole):
        return False
    if isinstance(known, Rows):
        return list(whole) == [n * parts if d == known.dim else n for d, n in enumerate(own)]
    if not isinstance(known, Alike):
        return list(own) == list(whole)
    periods = dict(known.periods)
    return all(
        mine == theirs or d in known.dims or (d in periods and theirs % periods[d] == 0)
        for d, (mine, theirs) in enumerate(zip(own, whole, strict=True))
    )


def after_view(
    rows: Rows,
    before: Sequence[int],
    after: Sequence[int],
    batch: int,
    may_be: Callable[[Rows], bool],
    groups: bool = False,
) -> Rows | None:
    """The rows of a tensor that is seen in another shape; None if the batch is divided.

    Args:
        before, after: the shapes.
        batch: how many samples a microbatch has.
        may_be: whether the result's shape on the whole batch allows it.
        groups: whether a row may be several whole samples: the rewards of each prompt's answers. Only the shape on the
            whole batch tells groups of samples from samples in two dimensions.
    """
    outer = prod(before[: rows.dim]) * rows.outer
    block = prod(before) // max(outer, 1)
    found: list[Rows] = []
    grouped: list[Rows] = []
    for dim, size in enumerate(after):
        above, below = prod(after[:dim]), prod(after[dim + 1 :])
        if not above or not below or outer % above or block % below:
            continue
        if size == outer // above * (block // below) and may_be(made := Rows(dim, outer // above)):
            (grouped if block // below % batch else found).append(made)
    if not found and groups:
        return grouped[0] if len(grouped) == 1 else None
    # More than one fits if some are of size 1: take what is the batch alone.
    alone = [r for r in found if after[r.dim] == batch and r.outer == 1]
    return next(iter(alone or found), None)
