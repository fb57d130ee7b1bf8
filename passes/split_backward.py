"""split_backward: an operator that makes input and weight gradients in one call is split into two calls."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxpipe.ir.program import INFO, Level, Program, info, value
from fxpipe.ir.transform import Pass

aten = torch.ops.aten
_INPUT, _WEIGHT, _MASK = 1, 2, 10  # arguments of convolution_backward


@dataclass(frozen=True)
class SplitBackward(Pass):
    """Split the backward of every convolution, so that its weight gradient can be placed separately (W).

    The two calls give the same bits as the one: PyTorch computes the two gradients with separate kernels anyway. A
    call reads only the layout of the tensor whose gradient it makes, so it gets an empty stand-in for it: the input's
    gradient must not depend on the saved input, nor the weight's gradient on the weight.

    Before:                                                     After:
        both = convolution_backward(dy, x, w, …, [True] * 3)        like_x = empty_strided([8, 3, 9, 9], …)
        dx = both[0]                                                one = convolution_backward(dy, like_x, w, …,
        dw = both[1]                                                                           [True, False, False])
                                                                    dx = one[0]
                                                                    like_w = empty_strided([4, 3, 3, 3], …)
                                                                    two = convolution_backward(dy, x, like_w, …,
                                                                                               [False, True, True])
                                                                    dw = two[1]
    """

    name: ClassVar[str] = "split_backward"
    requires: ClassVar[Level] = Level.FOLDED
    provides: ClassVar[Level] = Level.FOLDED

    def __call__(self, program: Program) -> Program:
        program = program.copy()
        for node in list(program):
            if node.target is aten.convolution_backward.default and info(node).phase == "B":
                _split(program.graph, node)
        return program


def _split(graph: fx.Graph, node: fx.Node) -> None:
    elements = [n for n in node.users if n.args[1] == 0], [n for n in node.users if n.args[1] != 0]
    if not all(elements):
        return  # it makes only one of them, like a model's first convolution
    halves = (
        _half(graph, node, "input", _INPUT, (True, False, False)),
        _half(graph, node, "weight", _WEIGHT, (False, True, True)),
    )
    for half, outputs in zip(halves, elements, strict=True):
        for element in reversed(outputs):
            element.replace_input_with(node, half)
            half.append(element)  # here, so that the input's gradient can go before the weight's is made
    graph.erase_node(node)


def _half(graph: fx.Graph, node: fx.Node, name: str, stands_in: int, makes: tuple[bool, bool, bool]) -> fx.Node:
    """One of the two calls, before `node`: an argument gets a stand-in, and only some gradients are made."""
    whole, mask = node.args[stands_in], node.args[_MASK]
    assert isinstance(whole, fx.Node)
    assert isinstance(mask, Sequence)
    like, new_mask = value(whole), [bool(m) and k for m, k in zip(mask, makes, strict=True)]
    layout = (list(like.shape), list(like.stride()))
    options = {"dtype": like.dtype, "device": torch.device(like.device.type)}
    with graph.inserting_before(node):
        empty = graph.create_node(
            "call_function", aten.empty_strided.default, layout, options, name=f"{node.name}_like_{name}"
        )
        half = graph.create_node("call_function", node.target, node.args, dict(node.kwargs), name=f"{node.name}_{name}")
    half.update_arg(stands_in, empty)
    half.update_arg(_MASK, new_mask)
    results = tuple(v if k else None for v, k in zip(value(node), new_mask, strict=True))
    for new, val in ((empty, like), (half, results)):
        new.meta = {**node.meta, "val": val, INFO: copy.copy(node.meta[INFO])}
    return half
