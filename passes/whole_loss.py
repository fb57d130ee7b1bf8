"""whole_loss: the microbatches' losses become the whole minibatch's loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from fxpipe.errors import listed
from fxpipe.ir.program import CORRECTS, INFO, ONE_DRAW, BatchInput, Level, NodeInfo, Output, Program, info, value
from fxpipe.ir.transform import Pass
from fxpipe.passes.analysis.beside_loss import changed_buffers, with_metrics
from fxpipe.passes.analysis.microbatches import microbatches_of
from fxpipe.passes.analysis.share import BackwardCalls, Lost, Share
from fxpipe.passes.analysis.share_rules.call import fills, operator_of
from fxpipe.passes.analysis.share_rules.sameness import drawn_once
from fxpipe.passes.analysis.whole_call import Place, WholeCall, changed_numbers, whole_call
from fxpipe.passes.fold import remove_dead
from fxpipe.plan.spec import LOSS_WEIGHT, LeafSpec
from fxpipe.task.batch import tensor_spec

aten = torch.ops.aten
UNPROVED = "that the microbatches give the whole batch's loss is "
CHECKED = "checked on the first batch, and not proved for others"
UNCHECKED = "neither proved nor checked"
OWN = "{} may treat a microbatch's gradients differently from the whole batch's"
UNTRIED = "loss_weight(batch) was not tried on microbatches of different weights"


BY_ITSELF = (
    "batch norm normalises each microbatch by itself ({}): this trains differently from a loop over whole batches, and "
    "--verify compares with eager PyTorch's batch norm on microbatches; --microbatches 1, without replicas, trains "
    "like that loop"
)
"""The warning that batch norm sees microbatches."""


@dataclass(frozen=True)
class WholeLoss(Pass):
    """Take numbers by which the loss divides, such as the count of valid tokens, from the whole minibatch.

    The mean over the microbatches is then the whole minibatch's loss, and likewise the gradients. Random numbers that
    do not belong to samples, such as whether a layer is skipped, are the same in all microbatches. Worker 0 adds up
    what the program `totals` computes of each microbatch; the sums are leaves of the batch, like all others. What
    cannot be derived stays unchanged: compile compares with the whole batch in any case.

    Fields:
        microbatches: how many a minibatch has.
        weighted: if the loss cannot be derived, the hook `loss_weight` says how much each microbatch counts: a leaf of
            the batch multiplies its loss.
        checked: on one batch, whose microbatches count differently if weighted, the program and the whole batch have
            the same loss and gradients.
        accepted: the loss may differ from the whole batch's: the user accepts it.
        unlike: warnings for metrics that differ from the whole batch's.

    Before:                                     After (2 microbatches):
        count = sum(ne(target, -100))               half = div(total_0, 2)
        loss = div(sum(errors), count)              loss = div(sum(errors), half)
        d_errors = div(d_loss, count)               d_errors = div(d_loss, half)
    """

    name: ClassVar[str] = "whole_loss"
    requires: ClassVar[Level] = Level.FOLDED
    provides: ClassVar[Level] = Level.FOLDED

    microbatches: int
    weighted: bool = False
    checked: bool = False
    accepted: bool = False
    unlike: tuple[str, ...] = ()

    def __call__(self, program: Program) -> Program:
        program = program.copy()
        facts = with_metrics(microbatches_of(program))
        for node in program:
            if drawn_once(facts, node):
                node.meta[ONE_DRAW] = True
        if facts.batch_norms:
            names = dict.fromkeys(info(n).module or info(n).source or n.name for n in facts.batch_norms)
            norms = listed(list(names), 6)
            program = replace(program, batch_norm=norms, warnings=(*program.warnings, BY_ITSELF.format(norms)))
        if changed := changed_buffers(facts):
            program = replace(program, warnings=(*program.warnings, _often(changed, self.microbatches)))
        loss = facts.loss
        program = replace(program, warnings=(*program.warnings, *self.unlike))
        if isinstance(loss, Lost) and self.weighted:
            notes = () if self.checked else (f"{UNPROVED}{UNCHECKED}: {UNTRIED}",)
            return replace(_weighted(program), warnings=(*program.warnings, *notes))
        why = OWN.format(program.own_backward) if program.own_backward else ""
        if why := loss.why if isinstance(loss, Lost) else why:
            if self.accepted:
                return replace(program, differs_from_whole=f"it was accepted that {why}")
            notes = (f"{UNPROVED}{CHECKED if self.checked else UNCHECKED}: {why}",)
            program = replace(program, warnings=(*program.warnings, *notes))
        if isinstance(loss, Lost):
            return program
        program = _with_whole_numbers(program, facts.numbers)
        change = _Substitution(program, self.microbatches)
        for node in [n for n in program if n in facts.totals or n in facts.likelihoods]:  # none reads a later one
            if node in facts.totals:
                change.total(node, facts.totals[node])
            else:
                change.likelihood(node)
        for node, factor in facts.factors.items():
            change.factor(node, factor)
        for divided in facts.divided.values():
            for node, reader in divided:
                change.divide(node, reader)
        summed = tuple(name for name, node in program.metrics().items() if facts.known.get(node) is Share.SUM)
        program = change.program()
        remove_dead(program.graph)
        how: Literal["mean", "sum"] = "sum" if loss is Share.SUM else "mean"
        whole_numbers = program.whole_numbers or bool(facts.divided)
        return replace(program, loss_of_microbatches=how, whole_numbers=whole_numbers, summed_metrics=summed)


def _often(buffers: Sequence[str], microbatches: int) -> str:
    them = "it" if len(buffers) == 1 else "them"
    return (
        f"every microbatch changes {listed(buffers, 4)}, {microbatches} times in a step: eager PyTorch changes {them} "
        "once, with the whole batch"
    )


def _with_whole_numbers(program: Program, numbers: Mapping[fx.Node, Mapping[Place, Any]]) -> Program:
    """Give calls the numbers of the whole minibatch where they need them, and likewise their backward calls.

    The same for constants that are computed from such numbers.
    """
    backward = BackwardCalls(program)
    for node, new_numbers in numbers.items():
        calls, whole = backward.of(node), changed_numbers(node)
        assert calls is not None
        scaled = {whole[place]: number for place, number in new_numbers.items() if place in whole}
        for call in calls:
            _update(call, {p: scaled.get(number, number) for p, number in changed_numbers(call).items()})
        _update(node, new_numbers)
    there = {name: whole_call(node) for name, node in program.placeholders.items()}
    values = {n: c.value for n, c in there.items() if isinstance(c, WholeCall) and c.value is not None}
    return replace(program, values={**program.values, **values}, whole_numbers=bool(numbers or values))


def _update(node: fx.Node, numbers: Mapping[Place, Any]) -> None:
    for place, number in numbers.items():
        if isinstance(place, int):
            node.update_arg(place, number)
        else:
            node.update_kwarg(place, number)


def _weighted(program: Program) -> Program:
    """Multiply the loss, and the gradient that backward begins with, by a leaf of the batch."""
    loss = program.loss_node
    assert loss is not None
    program, leaf = with_leaf(program, LOSS_WEIGHT, LOSS_WEIGHT, value(loss).new_empty((), dtype=torch.float32))
    weighed = times(loss, leaf)
    weighed.meta[CORRECTS] = True
    outputs = zip(program.output_nodes, program.outputs, strict=True)
    program.graph.output_node().args = (tuple(weighed if o.kind == "loss" else node for node, o in outputs),)
    for begin in begins_of(program):
        read_instead(begin, times(begin, leaf))
    return program


def with_leaf(program: Program, node: str, name: str, shown: torch.Tensor) -> tuple[Program, fx.Node]:
    """The program with a leaf of the batch that the user's batches do not have, and the leaf's node."""
    with program.graph.inserting_after([n for n in program.graph.nodes if n.op == "placeholder"][-1]):
        leaf = program.graph.placeholder(node)
    leaf.meta["val"] = shown
    real = torch.ones(shown.shape, dtype=shown.dtype, device=program.device)
    row = BatchInput(leaf.name, LeafSpec(name, tensor_spec(real)))
    return replace(program, batch=(*program.batch, row), example={**program.example, leaf.name: real}), leaf


def times(node: fx.Node, leaf: fx.Node) -> fx.Node:
    """A value times a leaf of the batch, right after it and in its own dtype."""
    graph = node.graph
    with graph.inserting_before(node.next):
        if value(node).dtype != value(leaf).dtype:
            leaf = call(graph, aten._to_copy.default, (leaf,), {"dtype": value(node).dtype}, node)
        return call(graph, aten.mul.Tensor, (node, leaf), {}, node)


def begins_of(program: Program) -> list[fx.Node]:
    """The gradients of the loss with which the backward begins."""
    return [n for n in program if info(n).phase == "B" and n.name == "d_loss"]


def read_instead(node: fx.Node, result: fx.Node) -> None:
    """Let all readers of a node read `result`, which is computed from it."""
    node.replace_all_uses_with(result, delete_user_cb=lambda user: user is not result)


class _Substitution:
    """A program under change: the totals that it takes from outside, and the program that computes them."""

    def __init__(self, program: Program, microbatches: int) -> None:
        self.source = program
        self.graph = program.graph
        self.microbatches = microbatches
        self.addends = _Addends(program)
        self.replaced: dict[fx.Node, fx.Node] = {}

    def program(self) -> Program:
        return replace(self.source, totals=self.addends.program(self.source) if self.addends.outputs else None)

    def total(self, node: fx.Node, share: Share) -> None:
        """Put the whole minibatch's value in place of a sum or a mean over the batch."""
        current = self.replaced.get(node, node)
        whole = self._leaf(self.addends.copy(current))
        if share is Share.MEAN:
            whole = self._call(current, aten.div.Scalar, (whole, self.microbatches))
        current.replace_all_uses_with(whole)
        self.replaced[node] = whole

    def factor(self, node: fx.Node, factor: fx.Node) -> None:
        """Scale the factor or divisor of a sum, forward and backward, so that the result is a mean."""
        factor = self.replaced.get(factor, factor)
        scale = aten.div.Scalar if node.target is aten.div.Tensor else aten.mul.Scalar
        scaled = self._call(node, scale, (factor, self.microbatches))
        for reader in (node, *self._backward_of(node)):
            reader.replace_input_with(factor, scaled)

    def divide(self, node: fx.Node, reader: fx.Node) -> None:
        """Divide a value that one call reads by the number of microbatches, and likewise its gradient."""
        current = self.replaced.get(node, node)
        scaled = self._call(current.next, aten.div.Scalar, (current, self.microbatches), like=node)
        scaled.meta[CORRECTS] = True
        reader.replace_input_with(current, scaled)
        backward = self._backward_of(node)
        for call in backward:
            for gradient in [n for n in call.all_input_nodes if n.op == "call_function" and info(n).phase == "B"]:
                if gradient not in backward:
                    divided = self._call(call, aten.div.Scalar, (gradient, self.microbatches))
                    call.replace_input_with(gradient, divided)

    def _backward_of(self, node: fx.Node) -> list[fx.Node]:
        number = node.meta.get("seq_nr")
        return [n for n in self.source if info(n).phase == "B" and n.meta.get("seq_nr") == number]

    def likelihood(self, node: fx.Node) -> None:
        """Make a mean over the targets' weights a sum divided by the whole minibatch's weights."""
        scores, target, weight, _, ignored = node.args
        assert isinstance(scores, fx.Node)
        assert isinstance(target, fx.Node)
        loss, weights = ([n for n in node.users if n.args[1] == i] for i in (0, 1))
        total = self._leaf(self.addends.weight_of(target, weight, ignored))
        divisor = self._call(node, aten.div.Scalar, (total, self.microbatches))
        if value(divisor).dtype != value(scores).dtype:
            divisor = self._call(node, aten._to_copy.default, (divisor,), {"dtype": value(scores).dtype})
        node.update_arg(3, 2)
        for result in loss:
            after = result.next
            quotient = self._call(after, aten.div.Tensor, (result, divisor), like=result)
            quotient.meta[CORRECTS] = True
            read_instead(result, quotient)
            self.replaced[result] = quotient
        for result in weights:
            result.replace_all_uses_with(divisor)

    def _leaf(self, addend: fx.Node) -> fx.Node:
        """A new leaf of the batch: the sum of `addend` over the microbatches."""
        index = len(self.addends.outputs) - 1
        self.source, leaf = with_leaf(self.source, f"total_{index}", f"total.{index}", value(addend))
        self.addends.take(leaf)
        return leaf

    def _call(
        self,
        before: fx.Node,
        target: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        like: fx.Node | None = None,
    ) -> fx.Node:
        """A new forward call before `before`, in the same module."""
        with self.graph.inserting_before(before):
            return call(self.graph, target, args, kwargs or {}, like or before)


def call(graph: fx.Graph, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], like: fx.Node) -> fx.Node:
    """A new call where the graph inserts, with its fake value; module, line and autograd number as `like`."""
    node = graph.call_function(target, tuple(args), dict(kwargs))
    fake = next(value(n) for n in node.all_input_nodes)
    fakes = fx.node.map_arg((node.args, node.kwargs), value)
    with fake.fake_mode:
        node.meta["val"] = target(*fakes[0], **fakes[1])
    record: NodeInfo = like.meta[INFO].copy() if INFO in like.meta else NodeInfo("F")
    node.meta[INFO] = record
    node.meta["seq_nr"] = like.meta.get("seq_nr")
    return node


class _Addends:
    """The program that computes, from one microbatch's leaves and constants, what is added up over the minibatch.

    A total may depend on earlier totals, which are then leaves of this program's batch, too.
    """

    def __init__(self, program: Program) -> None:
        self.source = program
        self.graph = fx.Graph()
        self.mapped: dict[fx.Node, fx.Node] = {}
        self.outputs: list[fx.Node] = []
        for placeholder in program.placeholders.values():
            self.take(placeholder)

    def take(self, node: fx.Node) -> None:
        """From now on, this program can read a placeholder of the original."""
        last = next((n for n in reversed(self.graph.nodes) if n.op == "placeholder"), None)
        with self.graph.inserting_after(last):
            placeholder = self.graph.placeholder(node.name)
        placeholder.target = placeholder.name
        placeholder.meta["val"] = value(node)
        self.mapped[node] = placeholder

    def copy(self, node: fx.Node) -> fx.Node:
        """Compute a value of the program here, too, and add it up."""
        addend = self._copied(node)
        self.outputs.append(addend)
        return addend

    def weight_of(self, target: fx.Node, weight: Any, ignored: Any) -> fx.Node:
        """Add up the weights of the targets that are not ignored; without class weights, their number."""
        like, classes = target, self._copied(target)

        def do(operator: Any, *args: Any) -> fx.Node:
            return call(self.graph, operator, args, {}, like)

        if weight is None:
            total = do(aten.sum.default, do(aten.ne.Scalar, classes, ignored))
        else:
            left_out = do(aten.eq.Scalar, classes, ignored)
            flat = do(aten.view.default, do(aten.masked_fill.Scalar, classes, left_out, 0), [-1])
            weights = do(aten.index_select.default, self._copied(weight), 0, flat)
            flags = do(aten.view.default, left_out, [-1])
            total = do(aten.sum.default, do(aten.masked_fill.Scalar, weights, flags, 0))
        self.outputs.append(total)
        return total

    def _copied(self, node: fx.Node) -> fx.Node:
        """A node's copy, after the copies of its inputs."""
        stack = [node]
        while stack:
            at = stack[-1]
            missing = [n for n in at.all_input_nodes if n not in self.mapped and not fills(at)]
            if at in self.mapped or not missing:
                stack.pop()
            stack += missing
            if at not in self.mapped and not missing:
                copied = self._filled(at) if fills(at) else self.graph.node_copy(at, self.mapped.__getitem__)
                copied.meta["val"] = value(at)
                copied.meta[INFO] = at.meta[INFO].copy()
                self.mapped[at] = copied
        return self.mapped[node]

    def _filled(self, node: fx.Node) -> fx.Node:
        """A value that fills the shape of a tensor, which need not be in the batch."""
        shown = value(node)
        number = node.args[-1] if "full" in operator_of(node) else int("ones" in operator_of(node))
        return self.graph.call_function(
            aten.full.default, (list(shown.shape), number), {"dtype": shown.dtype, "device": shown.device}
        )

    def program(self, source: Program) -> Program:
        """The program; totals that nothing here uses are left out."""
        names = {n.name for n in self.graph.nodes if n.op == "placeholder" and n.users}
        placeholders = names | {b.node for b in self.source.batch}
        for node in list(self.graph.nodes):
            if node.op == "placeholder" and node.name not in placeholders:
                self.graph.erase_node(node)
        output = self.graph.output(tuple(self.outputs))
        output.meta["val"] = tuple(value(n) for n in self.outputs)
        return replace(
            source,
            graph=self.graph,
            level=Level.CAPTURED,
            parameters=(),
            batch=tuple(b for b in source.batch if b.node in placeholders or not b.node),
            buffers=tuple(b for b in source.buffers if b.node in names),
            outputs=tuple(Output("metric", f"total.{i}") for i in range(len(self.outputs))),
            values={n: v for n, v in source.values.items() if n in names},
            warnings=(),
        )
