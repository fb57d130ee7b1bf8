"""What each call of a microbatch's step is in the step on the whole batch: its numbers and shapes there.

A graph holds sizes as numbers: `x.sum() / len(x)` and `x.sum() / 8` are one graph, and `x[:4]` of four samples is no
call at all. So the step is captured on the whole batch, too, and `next_to` puts the two graphs next to each other, call
by call: a number that differs there depends on how many samples there are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from fxpipe.passes.analysis.metric_nodes import metric_nodes
from torch import Tensor, fx

from fxpipe.ir.aten import is_getitem
from fxpipe.ir.program import Output, Program, info, value
from fxpipe.plan.spec import Phase
from fxpipe.torch_private import OpOverload, operator_name, pytree, schema_of

aten = torch.ops.aten
WHOLE = "whole"
"""The key in `node.meta` of a `WholeCall`, or of the reason, in words, why the step on the whole batch has none."""

NEAR = 12
"""How many calls ahead to look for a partner: the order in which torch makes views depends on their layout."""

Place = int | str
"""The place of a call's argument: its position, or its name."""


@dataclass(frozen=True)
class WholeCall:
    """A call, or an input, of the step on the whole batch.

    Attributes:
        shapes: of its value, or of each value of a tuple; None for a value that is not a tensor.
        arguments: those that are not tensors: numbers, lists of numbers.
        value: of a constant whose value differs there.
    """

    shapes: tuple[tuple[int, ...] | None, ...]
    arguments: dict[Place, Any]
    value: Tensor | None = None


def whole_call(node: fx.Node) -> WholeCall | str | None:
    """What `next_to` found for a node: None if it was not called, or for a call that computes nothing."""
    return node.meta.get(WHOLE)


def shapes_of(shown: Any) -> tuple[tuple[int, ...] | None, ...]:
    """The shapes of a value, or of each value of a tuple."""
    several = shown if isinstance(shown, (tuple, list)) else (shown,)
    return tuple(tuple(v.shape) if isinstance(v, Tensor) else None for v in several)


def arguments_of(node: fx.Node) -> dict[Place, Any]:
    """The arguments of a call that are not tensors."""
    given: dict[Place, Any] = dict(enumerate(node.args))
    given.update(node.kwargs)
    return {
        place: a for place, a in given.items() if not any(isinstance(leaf, fx.Node) for leaf in pytree.tree_leaves(a))
    }


def changed_arguments(node: fx.Node) -> dict[Place, Any]:
    """The arguments that differ in the step on the whole batch, with their values there."""
    call = whole_call(node)
    if not isinstance(call, WholeCall):
        return {}
    own = arguments_of(node)
    return {place: a for place, a in call.arguments.items() if place in own and not _equal(own[place], a)}


def changed_numbers(node: fx.Node) -> dict[Place, Any]:
    """The numbers that differ in the step on the whole batch, with their values there, without sizes."""
    return {p: a for p, a in changed_arguments(node).items() if type_of(node, p) in ("number", "float", "Tensor")}


def type_of(node: fx.Node, place: Place) -> str:
    """The type of an argument by the operator's schema, where numbers may replace tensors."""
    if not isinstance(node.target, OpOverload):
        return ""
    schema = schema_of(node.target)
    known = schema.arguments[place] if isinstance(place, int) else next(a for a in schema.arguments if a.name == place)
    kind = str(known.type)
    return kind[len("Optional[") : -1] if kind.startswith("Optional[") else kind


def next_to(program: Program, whole: Program | str) -> Program:
    """The program, with each forward call knowing what it is in the step on the whole batch.

    Calls are paired in order; those that compute nothing are skipped. A backward call knows it if both forward calls
    have the same backward calls.

    Args:
        program: captured on a microbatch.
        whole: the same step, captured on the whole batch; or why it cannot be.
    """
    program = program.copy()
    if isinstance(whole, str):
        for node in program.placeholders.values():
            node.meta[WHOLE] = whole
        return program
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
        return program
    forward = dict(pairs)
    unlike = _pair(_phase(program, "B"), _phase(whole, "B"), pairs)
    if unlike is not None or not _same_outputs(program, whole, pairs):
        _backward(program, whole, forward)
        if not _has_one_sample(pairs) or _without_shapes(program) != _without_shapes(whole):
            loss.meta[WHOLE] = "the step on the whole batch computes its gradient differently"
    return program


def partners(program: Program, whole: Program) -> dict[str, str]:
    """By the name of a forward value, the name of its partner in the step on the whole batch; see `next_to`."""
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
    return any(mine == 1 < its for own, whole in both for mine, its in zip(own, whole, strict=False))


def _without_shapes(program: Program) -> Counter[Any]:
    """The calls of backward, without those for shapes: for one sample, it expands nothing and adds nothing up."""
    calls = (n for n in _phase(program, "B") if not computes_nothing(n))
    return Counter(_operator(n) for n in calls if operator_name(n.target) not in _OF_SHAPES)


def _pair(mine: Sequence[fx.Node], theirs: Sequence[fx.Node], pairs: dict[fx.Node, fx.Node]) -> fx.Node | None:
    """Find the partners of calls, nearly in order, until one has none; that one is returned.

    A partner is the same operator, called with partners.
    """
    biases: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}  # their products without the bias that this call has added
    rest = list(reversed(theirs))
    for one in mine:
        near = rest[: -NEAR - 1 : -1]
        for other in near:
            if _adds_bias(other, biases, pairs):
                pairs[biases[other.all_input_nodes[0]][0]] = other
        found = next((n for n in near if _alike(one, n, pairs) or _without_bias(one, n, pairs)), None)
        if found is not None:
            pairs[one] = found
            one.meta[WHOLE] = _call(found)
            if one.target is aten.addmm.default and found.target is aten.mm.default:
                biases[found] = one, one.all_input_nodes[0]
            elif found.target in _RESHAPED and found.all_input_nodes[0] in biases:
                biases[found] = one, biases[found.all_input_nodes[0]][1]
            before = near[: near.index(found)]
            rest[-len(before) - 1 :] = reversed([n for n in before if not computes_nothing(n)])
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
    found = {("model", p.names[0]): p.node for p in program.parameters}
    found |= {("model", b.names[0]): b.node for b in program.buffers if not b.constant}
    found |= {("batch", b.leaf.name): b.node for b in program.batch if b.node}
    constants = [b.node for b in program.buffers if b.constant]
    return found | {("constant", str(i)): node for i, node in enumerate(constants)}


def _same_value(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.is_meta or other.is_meta:
        return True  # the shapes decide, or they have no values
    return one.data_ptr() == other.data_ptr() or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _call(node: fx.Node) -> WholeCall:
    return WholeCall(shapes_of(value(node)), arguments_of(node))


_VIEWS = {aten._unsafe_view.default: aten.view.default, aten._reshape_alias.default: aten.view.default}
_RESHAPED = {aten.view.default, *_VIEWS}
_OF_SHAPES = {"expand", "sum", "view", "_unsafe_view", "squeeze", "unsqueeze", "clone", "t", "transpose", "permute"}
_NOTHING = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.clone.default}


def computes_nothing(node: fx.Node) -> bool:
    """Whether a call returns its input: it copies, or gives it the shape that it has."""
    if node.target in _NOTHING:
        return True
    if node.target in (aten.view.default, aten.expand.default, *_VIEWS):
        return bool(value(node).shape == value(node.all_input_nodes[0]).shape)
    return False


def whole_shape(node: fx.Node) -> tuple[int, ...] | None:
    """The shape of a value in the step on the whole batch, if known."""
    while whole_call(node) is None and node.op == "call_function" and computes_nothing(node):
        node = node.all_input_nodes[0]
    call = whole_call(node)
    return call.shapes[0] if isinstance(call, WholeCall) else None


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
    return _VIEWS.get(node.target, node.target)  # type: ignore[call-overload]


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


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))


def _backward(program: Program, whole: Program, pairs: dict[fx.Node, fx.Node]) -> None:
    """Let backward calls know what they are, if both forward calls have the same backward calls."""
    mine, theirs = _by_number(program), _by_number(whole)
    numbers: dict[Any, set[Any]] = defaultdict(set)
    for one, other in pairs.items():
        numbers[one.meta.get("seq_nr")].add(other.meta.get("seq_nr"))
    for number, found in numbers.items():
        calls = mine.get(number, [])
        others = theirs.get(next(iter(found)), []) if len(found) == 1 else []
        if [_operator(n) for n in calls] == [_operator(n) for n in others]:
            for one, other in zip(calls, others, strict=True):
                one.meta[WHOLE] = _call(other)


def _by_number(program: Program) -> dict[Any, list[fx.Node]]:
    """The backward calls of each forward call, by autograd's number."""
    found = defaultdict(list)
    for node in program:
        if info(node).phase == "B" and node.meta.get("seq_nr") is not None and not computes_nothing(node):
            found[node.meta["seq_nr"]].append(node)
    return found
