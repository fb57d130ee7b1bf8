"""units: number the smallest runs of nodes that a cut can separate."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from fxpipe.ir.aten import is_getitem, is_view
from fxpipe.ir.program import CORRECTS, Level, Program, info, is_call_of
from fxpipe.ir.transform import Pass
from fxpipe.passes.analysis.branches import branches_together
from fxpipe.passes.analysis.metric_nodes import loss_itself, metric_nodes, place_metrics
from fxpipe.passes.analysis.sources import sources_of

aten = torch.ops.aten
_SAME_NUMBERS = {aten._to_copy.default, aten.clone.default}


@dataclass(frozen=True)
class Units(Pass):
    """Give every node its unit.

    Forward: each node that computes opens a unit. Views, tuple elements and corrections stay with the node before them,
    and what is made only from parameters, constants or the batch (a transposed weight, a mask) joins its first reader.
    Backward: a node takes the unit of its forward node, by autograd's numbering (`seq_nr`). A sum of gradients, and any
    node with inputs from earlier units, takes the earliest unit among its inputs. So a backward edge never runs towards
    a later unit, and independent forward and backward cuts are safe. What makes only weight gradients is marked. What
    serves only metrics opens no unit: it stays with its inputs.
    """

    name: ClassVar[str] = "units"
    requires: ClassVar[Level] = Level.FOLDED
    provides: ClassVar[Level] = Level.NUMBERED

    def __call__(self, program: Program) -> Program:
        program = program.copy()
        nodes = list(program)
        placeholders = program.placeholders
        buffers = {new: placeholders[name] for name, new in program.updates().items()}
        loss = loss_itself(program)
        metrics = dict.fromkeys(metric_nodes(program) if loss is not None else ())
        counted = [n for n in nodes if n not in metrics]
        forward, sources = [n for n in counted if info(n).phase == "F"], sources_of(program)
        calls = [n for n in forward if n not in sources.cheap]
        if loss is not None:
            calls = branches_together(program, calls, sources)
        units = _forward(forward, calls, sources.cheap, buffers)
        if loss is not None:
            _backward([n for n in nodes if info(n).phase == "B"], counted, info(loss).unit)
            inputs = {p.node for p in program.parameters} | {b.node for b in program.buffers}
            place_metrics(metrics, {placeholders[name]: _last_reader(placeholders[name]) for name in inputs if metrics})
        for node in nodes:
            record = info(node)
            if record.phase == "B" and not record.module:
                record.module = units[record.unit]
        _mark_weight_gradients(program)
        return replace(program, level=self.provides, units=tuple(units))


def _forward(
    nodes: list[fx.Node], calls: list[fx.Node], sources: Set[fx.Node], buffers: dict[fx.Node, fx.Node]
) -> list[str]:
    units: list[str] = []
    for node in calls:
        if is_getitem(node) or node.meta.get(CORRECTS):
            info(node).unit = info(node.all_input_nodes[0]).unit
        elif is_view(node) and units:
            info(node).unit = len(units) - 1
        else:
            units.append(info(node).module)
            info(node).unit = len(units) - 1
    if not units:  # a step of only views and masks
        units.append("")
    for node in reversed(nodes):
        if node in sources:
            readers = [info(n).unit for n in node.users if is_call_of(n, "F")]
            info(node).unit = min((u for u in readers if u >= 0), default=-1)
    for node in nodes:
        if is_getitem(node):  # a tuple never crosses workers, its elements do
            info(node).unit = info(node.all_input_nodes[0]).unit
        if info(node).unit < 0:  # a source that no forward node reads: a buffer's new value stays with its readers
            near = [n for n in node.all_input_nodes if n.op == "call_function" or node not in buffers]
            near += [buffers[node]] if node in buffers else []
            read = [
                n for n in near if n.op == "call_function" or any(u.op == "call_function" for u in {*n.users} - {node})
            ]
            module = info(node).module  # if nothing else reads a counter, its module decides
            alone = units.index(module) if module in units else 0
            info(node).unit = max(map(_last_reader, read), default=alone)
    return units


def _last_reader(node: fx.Node) -> int:
    """The unit of a call; of a placeholder the last unit whose forward reads it."""
    if node.op == "call_function":
        return max(info(node).unit, 0)
    readers = [info(n).unit for n in node.users if is_call_of(n, "F")]
    return max([0, *readers])


def _backward(backward: list[fx.Node], nodes: list[fx.Node], last: int) -> None:
    unit_of: dict[int, int] = {}
    for node in nodes:
        number = node.meta.get("seq_nr")
        if info(node).phase == "F" and number is not None:
            unit_of.setdefault(number, info(node).unit)
    undecided = []
    for node in backward:
        inputs = [info(n).unit for n in node.all_input_nodes if is_call_of(n, "B")]
        inputs = [u for u in inputs if u >= 0]
        unit = None if node.meta.get("accumulates") else unit_of.get(node.meta.get("seq_nr", -1))
        if is_getitem(node):
            unit = inputs[0] if inputs else None
        if unit is None and not inputs:
            undecided.append(node)
            continue
        info(node).unit = min([*inputs, *([unit] if unit is not None else [])])
    for node in reversed(undecided):
        readers = [info(n).unit for n in node.users if n.op == "call_function"]
        info(node).unit = max(readers, default=last)
    for node in undecided:
        if is_getitem(node):
            info(node).unit = info(node.all_input_nodes[0]).unit


def _mark_weight_gradients(program: Program) -> None:
    """Set `weight` on the backward nodes of a program whose units are numbered; this changes its records.

    A node is W if nothing reads it except

    - W nodes of its own unit (in the end every backward node serves weights, but those of earlier units through the
      gradient that crosses to them, and that is B);
    - nodes that finish a weight's gradient: views, casts and autograd's sums over several uses, up to the output. So
      the gradients of a tied weight are W in each of their units, and so is their sum.

    An operator that makes an input's and weights' gradients in one call is B, its elements stay with it, and so do
    nodes that work only on those. A W node may read B nodes; no B node reads W.
    """
    outputs = list(zip(program.output_nodes, program.outputs, strict=True))
    gradients = {n for n, o in outputs if o.kind == "gradient"} - {n for n, o in outputs if o.kind != "gradient"}
    backward = [n for n in program if info(n).phase == "B"]
    finishing: set[fx.Node] = set()
    weight_nodes: set[fx.Node] = set()
    for node in reversed(backward):
        users = [n for n in node.users if n.op == "call_function"]
        if not users if node not in gradients else len(users) + 1 != len(node.users):
            continue  # nothing reads it, or only an output of another kind
        if _finishes(node) and finishing.issuperset(users):
            finishing.add(node)
        unit = info(node).unit
        if all(n in finishing or (n in weight_nodes and info(n).unit == unit) for n in users):
            weight_nodes.add(node)
    made_by_b: set[fx.Node] = set()  # weight gradients, or what they are made from
    for node in backward:
        sources = [n for n in node.all_input_nodes if is_call_of(n, "B")]
        if is_getitem(node) and sources[0] not in weight_nodes:
            stays = node in weight_nodes
        else:
            stays = node in weight_nodes and bool(sources) and made_by_b.issuperset(sources)
        if stays:
            made_by_b.add(node)
            weight_nodes.remove(node)
    for node in backward:
        info(node).weight = node in weight_nodes


def _finishes(node: fx.Node) -> bool:
    """Whether the value is, up to layout and dtype, its input, or autograd's sum of several such values."""
    return is_view(node) or node.target in _SAME_NUMBERS or bool(node.meta.get("accumulates"))
