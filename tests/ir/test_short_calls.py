"""Short calls do what operator objects do; where torch's own call would do something else, there is none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from fxpipe.ir.printer import call_text
from fxpipe.torch_private import FakeTensorMode, OpOverload, pytree

aten = torch.ops.aten


def call(target: OpOverload, *args: object, **kwargs: object) -> str:
    """The text of a call; tensors among the arguments become nodes `a`, `b`, …"""
    graph = fx.Graph()
    with FakeTensorMode() as mode:
        fake = pytree.tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
        nodes: list[fx.Node] = []

        def node_of(tensor: Tensor) -> fx.Node:
            nodes.append(graph.placeholder("abc"[len(nodes)]))
            nodes[-1].meta["val"] = tensor
            return nodes[-1]

        shown = pytree.tree_map_only(Tensor, node_of, fake)
        node = graph.call_function(target, *shown)
        node.meta["val"] = target(*fake[0], **fake[1])
    return call_text(node, str, short=True)


X, Y, SCALAR = torch.ones(4, 4), torch.ones(4, 4), torch.tensor(2.0)


@pytest.mark.parametrize(
    ("target", "args", "text"),
    [
        (aten.mm.default, (X, Y), "torch.mm(a, b)"),
        (aten.add.Tensor, (X, Y), "a + b"),
        (aten.add.Tensor, (X, 2.5), "a + 2.5"),
        (aten.div.Tensor, (X, SCALAR), "a / b"),
        (aten.view.default, (X, [2, -1]), "a.view(2, -1)"),
        (aten.permute.default, (X, [1, 0]), "a.permute(1, 0)"),
        (aten.transpose.int, (X, 0, 1), "a.transpose(0, 1)"),
        (aten.unbind.int, (X,), "a.unbind()"),
        (aten.sum.dim_IntList, (X, [0], True), "torch.sum(a, [0], True)"),
        (aten.cat.default, ([X, Y], 1), "torch.cat([a, b], 1)"),
        (aten.native_dropout.default, (X, 0.5, True), "torch.native_dropout(a, 0.5, True)"),
    ],
)
def test_torchs_own_call_is_written_where_it_is_the_same(
    target: OpOverload, args: tuple[object, ...], text: str
) -> None:
    assert call(target, *args) == text


def test_keywords_stay() -> None:
    assert call(aten.add.Tensor, X, Y, alpha=2) == "torch.add(a, b, alpha=2)"


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten._unsafe_view.default, (X, [2, 8])),  # a private name
        (aten.ones.default, ([4],)),  # a default device would change it
        (aten.add.Scalar, (X, 2.5)),  # torch.add takes the overload for tensors
        (aten.matmul.default, (X, Y)),  # torch.matmul calls mm
        (aten.native_dropout_backward.default, (X, X, 2.0)),  # torch has no such function
    ],
)
def test_where_torch_would_call_something_else_the_operator_is_named(
    target: OpOverload, args: tuple[object, ...]
) -> None:
    assert call(target, *args).startswith(f"{target}(")
