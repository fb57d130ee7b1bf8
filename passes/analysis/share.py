"""What a microbatch's value is in the whole minibatch: the words of `microbatches.py` and its rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import Any

from torch import fx

from fxpipe.ir.aten import is_getitem
from fxpipe.ir.program import Program, info
from fxpipe.passes.analysis.whole_call import WholeCall, changed_numbers, computes_nothing, whole_call


class Share(Enum):
    """A value that has no rows of the batch.

    SAME: each microbatch has the whole minibatch's value. UNIFORM: the same, and its elements are equal, so it fits any
    rows. SUM: the whole value is the sum of the microbatches' values, MEAN: their mean.
    """

    SAME = "the same in every microbatch"
    UNIFORM = "the same in every element"
    SUM = "a sum over the batch"
    MEAN = "a mean over the batch"


@dataclass(frozen=True)
class Rows:
    """The whole value is the microbatches' values, concatenated along a dimension.

    The dimension may have several blocks, each concatenated separately: a transposed [time, batch], flattened to one
    dimension, has `outer` = `time` of them.
    """

    dim: int
    outer: int = 1


@dataclass(frozen=True)
class Alike:
    """The same in every microbatch, and along some dimensions: an expanded weight, which fits rows there.

    `periods` are other dimensions, and after how many places it repeats along them: a mask for each window of a
    picture, once for each sample.
    """

    dims: frozenset[int]
    periods: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class Lost:
    """Nothing is known of the value: why, in words, and the name of the node where it was lost."""

    why: str
    node: str


Known = Share | Rows | Alike | Lost


class BackwardCalls:
    """The backward calls of every forward call, by autograd's number; and what `depends` on what is trained."""

    def __init__(self, program: Program) -> None:
        placeholders = program.placeholders
        self.depends = {placeholders[p.node] for p in program.parameters if p.trained}
        self.forward: dict[Any, list[fx.Node]] = {}
        self.backward: dict[Any, list[fx.Node]] = {}
        for node in program:
            number = node.meta.get("seq_nr")
            if computes_nothing(node):
                if any(n in self.depends for n in node.all_input_nodes):
                    self.depends.add(node)
            elif info(node).phase == "B":
                self.backward.setdefault(number, []).append(node)
            elif any(n in self.depends for n in node.all_input_nodes):
                self.depends.add(node)
                if not is_getitem(node):
                    self.forward.setdefault(number, []).append(node)

    def of(self, node: fx.Node) -> list[fx.Node] | None:
        """The backward calls that may use a forward call's numbers; None if unknown, or perhaps of another call."""
        if node not in self.depends:
            return []
        calls = self.backward.get(node.meta.get("seq_nr"), [])
        if not all(isinstance(whole_call(n), WholeCall) for n in calls):
            return None
        if any(changed_numbers(n) for n in calls) and not self.alone(node):
            return None
        return calls

    def alone(self, node: fx.Node) -> bool:
        """Whether the backward calls with a forward call's number are its own, or those of the call it is a part of."""
        number = node.meta.get("seq_nr")
        return len(self.forward.get(number, [])) == 1 and bool(self.backward.get(number))


@dataclass
class Microbatches:
    """What is known about a program that was captured on one microbatch; `microbatches.py` derives it.

    `totals` are sums and means over the batch that are not only added up: the whole minibatch's value must replace
    them, and is then the same in every microbatch. `likelihoods` are means of negative log-likelihoods, which divide by
    the weights of one microbatch's targets.
    """

    program: Program
    batch: int  # how many samples the microbatch has
    backward: BackwardCalls
    parts: int = 0  # how many times as large the whole batch is; 0 if the program does not say (`whole_call.py`)
    changing: frozenset[str] = frozenset()  # the placeholders of buffers that the step updates
    known: dict[fx.Node, Any] = field(default_factory=dict)  # a tuple for an operator whose results differ
    alone: set[fx.Node] = field(default_factory=set)  # computed from the batch and constants: without gradients
    totals: dict[fx.Node, Share] = field(default_factory=dict)
    likelihoods: list[fx.Node] = field(default_factory=list)
    # For calls with numbers that depend on how many samples there are, by place: those of the whole minibatch. `kept`:
    # calls whose number depends on it, too, and is correct already: it makes a mean of a sum.
    numbers: dict[fx.Node, dict[int | str, Any]] = field(default_factory=dict)
    kept: set[fx.Node] = field(default_factory=set)
    factors: dict[fx.Node, fx.Node] = field(default_factory=dict)  # by quotient or product: to scale, for a mean
    # For an addition of a sum and another value, the values that are sums, too, once divided by the number of
    # microbatches, each with the call that reads it.
    divided: dict[fx.Node, list[tuple[fx.Node, fx.Node]]] = field(default_factory=dict)
    batch_norms: list[fx.Node] = field(default_factory=list)  # normalisations over the samples of a microbatch
    passed_over: frozenset[fx.Node] = frozenset()  # calls for metrics, for which nothing is derived

    @property
    def loss(self) -> Known:
        """What is known about the loss of one microbatch."""
        node = self.program.loss_node
        assert node is not None
        return self.known[node]


def allows(share: Known, shape: Sequence[int], whole: Sequence[int], parts: int) -> bool:
    """Whether a value of which this is known can have that shape in the whole batch."""
    if share is Share.UNIFORM or isinstance(share, Lost):
        return True
    if len(shape) != len(whole):
        return False
    if isinstance(share, Rows):
        return list(whole) == [n * parts if d == share.dim else n for d, n in enumerate(shape)]
    if not isinstance(share, Alike):
        return list(shape) == list(whole)
    periods = dict(share.periods)
    return all(
        mine == theirs or d in share.dims or (d in periods and theirs % periods[d] == 0)
        for d, (mine, theirs) in enumerate(zip(shape, whole, strict=True))
    )


def after_view(
    rows: Rows,
    before: Sequence[int],
    after: Sequence[int],
    batch: int,
    may_be: Callable[[Rows], bool],
    groups: bool = False,
) -> Rows | None:
    """The rows of a tensor viewed in another shape; None if the batch is divided.

    `may_be` says whether the result's shape on the whole batch allows them. With `groups`, a row may be several whole
    samples: the rewards of each prompt's answers. Only the shape on the whole batch distinguishes these from samples in
    two dimensions.
    """
    outer = prod(before[: rows.dim]) * rows.outer
    block = prod(before) // max(outer, 1)
    candidates: list[Rows] = []
    grouped: list[Rows] = []
    for dim, size in enumerate(after):
        above, below = prod(after[:dim]), prod(after[dim + 1 :])
        if not above or not below or outer % above or block % below:
            continue
        if size == outer // above * (block // below) and may_be(candidate := Rows(dim, outer // above)):
            (grouped if block // below % batch else candidates).append(candidate)
    if not candidates and groups:
        return grouped[0] if len(grouped) == 1 else None
    # More than one fits if some are of size 1: take only the batch.
    alone = [r for r in candidates if after[r.dim] == batch and r.outer == 1]
    return next(iter(alone or candidates), None)
