"""Random numbers as inputs: dropout masks and others are drawn outside a pure part, so that all engines get the same.

They are drawn in the order in which the emitted code draws them, by the same operators: with the same seed, eager
PyTorch and every engine see masks with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.errors import BackendError
from fxpipe.ir.aten import is_getitem, is_random
from fxpipe.ir.program import ONE_DRAW
from fxpipe.plan.spec import TensorSpec
from fxpipe.stages.part_call import OneDraw
from fxpipe.task.batch import tensor_spec
from fxpipe.torch_private import pytree

aten = torch.ops.aten

PLACE = "fxpipe_place"
"""Key of a node's `meta`: the line of the stage's file that it comes from, and the user's module and line."""

# Random operators that read the shapes of their tensors, never the values.
_VALUE_FREE = {
    aten.bernoulli.p,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten.uniform.default,
    aten.normal_functional.default,
    aten.exponential.default,
}


@dataclass(frozen=True)
class Draw:
    """One draw: an operator and its arguments; a `TensorSpec` means any tensor of that shape.

    Attributes:
        name: under which all microbatches draw the same numbers; '' if each draws its own.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tensor: TensorSpec
    name: str = ""

    def __call__(self, device: torch.device | str, one_draw: OneDraw = nullcontext) -> Tensor:
        """Draw from torch's generator of `device`."""
        with one_draw(self.name) if self.name else nullcontext():
            if self.target is aten.native_dropout.default:
                return self._mask(device)
            args, kwargs = pytree.tree_map_only(
                TensorSpec,
                lambda spec: blank(spec, device),
                (self.args, dict(self.kwargs)),
                is_leaf=lambda value: isinstance(value, TensorSpec),
            )
            result: Tensor = self.target(*args, **kwargs)
            return result

    def _mask(self, device: torch.device | str) -> Tensor:
        """The mask of a dropout: True for the elements that it keeps."""
        example, p, _ = self.args
        if torch.device(device).type == "cpu":  # as native_dropout does on a CPU, without the product
            return blank(self.tensor, device).bernoulli_(1.0 - p)
        mask: Tensor = aten.native_dropout.default(blank(example, device).fill_(1), p, True)[1]
        return mask


def hoist_draws(graph: fx.Graph) -> tuple[Draw, ...]:
    """Replace every random call by a new placeholder after the others; return the draws that fill them.

    Raises:
        BackendError: an operator's random numbers may depend on computed values.
    """
    hoist = _Hoist(graph)
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_random(node):
            continue
        if node.target is aten.native_dropout.default:
            hoist.dropout(node)
            continue
        if node.all_input_nodes and node.target not in _VALUE_FREE:
            raise BackendError(
                f"{node.target} draws random numbers that may depend on computed values, which only eager supports",
                where=node.meta.get(PLACE),
                hint="compile with --backend auto, which runs such a part with eager, or use an operator whose random "
                "numbers do not depend on values, such as dropout or rand_like",
            )
        node.replace_all_uses_with(hoist.holder(node, node.meta["val"]))
        graph.erase_node(node)
    return tuple(hoist.draws)


class _Hoist:
    """Replaces the random calls of a graph by placeholders."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.draws: list[Draw] = []
        self._last = next((n for n in reversed(graph.nodes) if n.op == "placeholder"), None)

    def holder(self, node: fx.Node, value: Tensor) -> fx.Node:
        """A placeholder after the others for the random numbers of `node`."""
        graph = self.graph
        place = graph.inserting_after(self._last) if self._last else graph.inserting_before(next(iter(graph.nodes)))
        with place:
            self._last = graph.placeholder(f"mask_{len(self.draws)}")
        self._last.meta["val"] = value
        arguments = (node.args, dict(node.kwargs))
        args, kwargs = pytree.tree_map_only(fx.Node, lambda n: tensor_spec(n.meta["val"]), arguments)
        self.draws.append(Draw(node.target, args, kwargs, tensor_spec(value), node.meta.get(ONE_DRAW, "")))
        return self._last

    def dropout(self, node: fx.Node) -> None:
        """Replace native_dropout; kept elements are scaled by the same products."""
        graph = self.graph
        x, p, train = node.args
        assert isinstance(p, float | int)
        value, mask_value = node.meta["val"]
        place = {k: v for k, v in node.meta.items() if k == PLACE}
        with graph.inserting_before(node):
            if train is False:
                out = graph.call_function(aten.clone.default, (x,))
                mask = graph.call_function(
                    aten.ones.default, (list(mask_value.shape),), {"dtype": torch.bool, "device": mask_value.device}
                )
                mask.meta.update(place, val=mask_value)
            else:
                mask = self.holder(node, mask_value)
                masked = graph.call_function(aten.mul.Tensor, (x, mask))
                masked.meta.update(place, val=value)
                out = graph.call_function(aten.mul.Tensor, (masked, 0.0 if p == 1 else 1.0 / (1.0 - p)))
            out.meta.update(place, val=value)
        for user in list(node.users):
            assert is_getitem(user)
            user.replace_all_uses_with(out if user.args[1] == 0 else mask)
            graph.erase_node(user)
        graph.erase_node(node)


def blank(spec: TensorSpec, device: torch.device | str) -> Tensor:
    """A tensor of that form, whatever is in it."""
    return torch.empty_strided(spec.shape, spec.stride, dtype=getattr(torch, spec.dtype), device=device)
