"""next_to: each call of a microbatch's step knows what it is in the step on the whole batch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxpipe.ir.aten import is_getitem
from fxpipe.ir.program import Level, Output, Program, info, value
from fxpipe.ir.transform import Pass
from fxpipe.passes.analysis.metric_nodes import metric_nodes
from fxpipe.passes.analysis.whole_call import VIEWS, WHOLE, WholeCall, arguments_of, computes_nothing, shapes_of
from fxpipe.plan.spec import Phase
from fxpipe.torch_private import operator_name, pytree

aten = torch.ops.aten

NEAR = 12
"""How many calls ahead to look for a partner: the order in which torch makes views depends on their layout."""


@dataclass(frozen=True)
class NextTo(Pass):
    """Put the graph of a microbatch's step next to that of the whole batch's (`Program.whole`), call by call.

    A graph holds sizes as numbers: `x.sum() / len(x)` and `x.sum() / 8` are one graph, and `x[:4]` of four samples is
    no call at all. A number that differs in the partner of a call depends on how many samples there are. Each call gets
    a mark, which `whole_loss` reads (`passes/analysis/whole_call.py`); the graph itself stays unchanged.

    Calls are paired in order; those that compute nothing are skipped. A backward call knows its partner if both forward
    calls have the same backward calls. Without `Program.whole` there are no marks.

    Before:  count = div(total, 4)               After:  count = div(total, 4)  # in the whole batch's step: 8
    """

    name: ClassVar[str] = "next_to"
    requires: ClassVar[Level] = Level.CAPTURED
    provides: ClassVar[Level] = Level.CAPTURED

    def __call__(self, program: Program) -> Program:
        whole, program = program.whole, program.copy(whole=None)
        if isinstance(whole, str):
            for node in program.placeholders.values():
                node.meta[WHOLE] = whole
        elif whole is not None:
            _put_next_to(program, whole)
        return program


def _put_next_to(program: Program, whole: Program) -> None:
    pairs = _inputs(program, whole)
    extra, its_extra = metric_nodes(program), metric_nodes(whole)
    mine, theirs = _forward(program, extra), _forward(whole, its_extra)
    first = _pair(mine, theirs, pairs)
    _pair(extra, its_extra, pairs)
    for node in extra:
        if not computes_nothing(node):
            node.meta.setdefault(WHOLE, "the step on the whole batch has other metrics")
    if first is not None:
        place = f" ({info(first).source})" if info(first).source else ""
        for node in mine[mine.index(first) :]:
            node.meta[WHOLE] = f"the step on the whole batch differs from here on{place}"
    loss, its = program.loss_node, whole.loss_node
    assert loss is not None
    assert its is not None
    if _partner(loss, pairs) is not _computed(its):
        loss.meta[WHOLE] = "the step on the whole batch has another loss"
        return
    forward = dict(pairs)
    unlike = _pair(_phase(program, "B"), _phase(whole, "B"), pairs)
    if unlike is not None or not _same_outputs(program, whole, pairs):
        _backward(program, whole, forward)
        if not _has_one_sample(pairs) or _without_shapes(program) != _without_shapes(whole):
            loss.meta[WHOLE] = "the step on the whole batch computes its gradient differently"


def partners(program: Program, whole: Program) -> dict[str, str]:
    """By the name of a forward value, the name of its partner in the step on the whole batch."""
    program = program.copy()
    pairs = _inputs(program, whole)
    _pair(_forward(program, metric_nodes(program)), _forward(whole, metric_nodes(whole)), pairs)
    return {mine.name: theirs.name for mine, theirs in pairs.items()}


def _forward(program: Program, left_out: Collection[fx.Node]) -> list[fx.Node]:
    left_out = set(left_out)
    return [n for n in _phase(program, "F") if n not in left_out]


def _phase(program: Program, phase: Phase) -> list[fx.Node]:
    return [n for n in program if info(n).phase == phase]


def _same_outputs(program: Program, whole: Program, pairs: dict[fx.Node, fx.Node]) -> bool:
    """Whether all parameters get their gradients from partner calls."""
    here, there = _outputs(program), _outputs(whole)
    if list(here) != list(there):
        return False
    return all(_partner(mine, pairs) is _computed(there[what]) for what, mine in here.items())


def _outputs(program: Program) -> dict[Output, fx.Node]:
    """All outputs but the metrics."""
    return {o: n for n, o in zip(program.output_nodes, program.outputs, strict=True) if o.kind != "metric"}


def _has_one_sample(pairs: dict[fx.Node, fx.Node]) -> bool:
    both = [(value(n).shape, value(o).shape) for n, o in pairs.items() if n.op == "placeholder"]
    return any(mine == 1 < its for shape, whole in both for mine, its in zip(shape, whole, strict=False))


def _without_shapes(program: Program) -> Counter[Any]:
    """The calls of backward, without those for shapes: for one sample, it expands nothing and adds nothing up."""
    calls = (n for n in _phase(program, "B") if not computes_nothing(n))
    return Counter(_operator(n) for n in calls if operator_name(n.target) not in _OF_SHAPES)


def _pair(mine: Sequence[fx.Node], theirs: Sequence[fx.Node], pairs: dict[fx.Node, fx.Node]) -> fx.Node | None:
    """Find the partners of calls, nearly in order, until one has none; that one is returned.

    A partner is the same operator, called with partners.
    """
    biases: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}  # their products without the bias that this call has added
    left = list(reversed(theirs))
    for one in mine:
        near = left[: -NEAR - 1 : -1]
        for other in near:
            if _adds_bias(other, biases, pairs):
                pairs[biases[other.all_input_nodes[0]][0]] = other
        partner = next((n for n in near if _alike(one, n, pairs) or _without_bias(one, n, pairs)), None)
        if partner is not None:
            pairs[one] = partner
            one.meta[WHOLE] = _call(partner)
            if one.target is aten.addmm.default and partner.target is aten.mm.default:
                biases[partner] = one, one.all_input_nodes[0]
            elif partner.target in _RESHAPED and partner.all_input_nodes[0] in biases:
                biases[partner] = one, biases[partner.all_input_nodes[0]][1]
            before = near[: near.index(partner)]
            left[-len(before) - 1 :] = reversed([n for n in before if not computes_nothing(n)])
        elif not computes_nothing(one):
            return one
    return None


def _without_bias(one: fx.Node, other: fx.Node, pairs: dict[fx.Node, fx.Node]) -> bool:
    """Whether a linear layer's product and bias are one call here, and two calls there.

    Rows of one sample are contiguous in any order of dimensions; then torch adds the bias in the same call.
    """
    if one.target is not aten.addmm.default or other.target is not aten.mm.default or one.kwargs:
        return False
    return [_partner(n, pairs) for n in one.args[1:]] == [_computed(n) for n in other.all_input_nodes]  # type: ignore[arg-type]


def _adds_bias(other: fx.Node, biases: dict[fx.Node, tuple[fx.Node, fx.Node]], pairs: dict[fx.Node, fx.Node]) -> bool:
    if other.target is not aten.add.Tensor or other.kwargs or len(other.all_input_nodes) != 2:
        return False
    product, bias = other.all_input_nodes
    return product in biases and _partner(biases[product][1], pairs) is _computed(bias)


def _inputs(program: Program, whole: Program) -> dict[fx.Node, fx.Node]:
    """The partners of placeholders."""
    theirs, nodes, other_nodes = _by_role(whole), program.placeholders, whole.placeholders
    pairs = {}
    for role, name in _by_role(program).items():
        node, other = nodes[name], other_nodes.get(theirs.get(role, ""))
        if other is None:
            node.meta[WHOLE] = "the step on the whole batch does not use it"
            continue
        pairs[node] = other
        node.meta[WHOLE] = call = _call(other)
        if value(node).dtype != value(other).dtype:
            node.meta[WHOLE] = "it has another dtype on the whole batch"
        elif role[0] == "constant" and not _same_value(program.values[name], whole.values[other.name]):
            node.meta[WHOLE] = replace(call, value=whole.values[other.name])
    return pairs


def _by_role(program: Program) -> dict[tuple[str, str], str]:
    """The names of placeholders by role: a tensor of the model, of the batch, or a constant by its number."""
    names = {("model", p.names[0]): p.node for p in program.parameters}
    names |= {("model", b.names[0]): b.node for b in program.buffers if not b.constant}
    names |= {("batch", b.leaf.name): b.node for b in program.batch if b.node}
    constants = [b.node for b in program.buffers if b.constant]
    return names | {("constant", str(i)): node for i, node in enumerate(constants)}


def _same_value(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.is_meta or other.is_meta:
        return True  # the shapes decide, or they have no values
    return one.data_ptr() == other.data_ptr() or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _call(node: fx.Node) -> WholeCall:
    return WholeCall(shapes_of(value(node)), arguments_of(node))


_RESHAPED = {aten.view.default, *VIEWS}
_OF_SHAPES = {"expand", "sum", "view", "_unsafe_view", "squeeze", "unsqueeze", "clone", "t", "transpose", "permute"}


def _computed(node: fx.Node) -> fx.Node:
    """The value behind calls that compute nothing."""
    while node.op == "call_function" and computes_nothing(node):
        node = node.all_input_nodes[0]
    return node


def _partner(node: fx.Node, pairs: dict[fx.Node, fx.Node]) -> fx.Node | None:
    """The computed value that is the partner of a value."""
    while node not in pairs and node.op == "call_function" and computes_nothing(node):
        node = node.all_input_nodes[0]
    return _computed(pairs[node]) if node in pairs else None


def _operator(node: fx.Node) -> Any:
    return VIEWS.get(node.target, node.target)  # type: ignore[call-overload]


def _alike(one: fx.Node, other: fx.Node, pairs: dict[fx.Node, fx.Node]) -> bool:
    """Whether two calls are equal except for numbers."""
    if _operator(one) is not _operator(other) or set(one.kwargs) != set(other.kwargs):
        return False
    if is_getitem(one) and one.args[1] != other.args[1]:
        return False
    mine, theirs = (pytree.tree_leaves((n.args, sorted(n.kwargs.items()))) for n in (one, other))
    return len(mine) == len(theirs) and all(
        isinstance(b, fx.Node) and _partner(a, pairs) is _computed(b)
        if isinstance(a, fx.Node)
        else not isinstance(b, fx.Node) and (a is None) == (b is None)
        for a, b in zip(mine, theirs, strict=True)
    )


def _backward(program: Program, whole: Program, pairs: dict[fx.Node, fx.Node]) -> None:
    """Let backward calls know what they are, if both forward calls have the same backward calls."""
    mine, theirs = _by_number(program), _by_number(whole)
    numbers: dict[Any, set[Any]] = defaultdict(set)
    for one, other in pairs.items():
        numbers[one.meta.get("seq_nr")].add(other.meta.get("seq_nr"))
    for number, its_numbers in numbers.items():
        calls = mine.get(number, [])
        others = theirs.get(next(iter(its_numbers)), []) if len(its_numbers) == 1 else []
        if [_operator(n) for n in calls] == [_operator(n) for n in others]:
            for one, other in zip(calls, others, strict=True):
                one.meta[WHOLE] = _call(other)


def _by_number(program: Program) -> dict[Any, list[fx.Node]]:
    """The backward calls of each forward call, by autograd's number."""
    calls = defaultdict(list)
    for node in program:
        if info(node).phase == "B" and node.meta.get("seq_nr") is not None and not computes_nothing(node):
            calls[node.meta["seq_nr"]].append(node)
    return calls
