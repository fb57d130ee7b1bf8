"""Functions that replace an emitted one: computed by an engine, or in float64; and one that sorts stably."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.codecs import codec
from fxpipe.ir.program import copy_graph
from fxpipe.plan.packing import Layout
from fxpipe.stages.part_call import Function
from fxpipe.stages.pure_part import PurePart
from fxpipe.torch_private import LightDispatchMode, TorchDispatchMode, pytree

aten = torch.ops.aten

Compute = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Computes a part's outputs from its inputs, both in the part's order."""

Steps = Callable[[list[Any]], Iterable[Iterable[tuple[int, Tensor]]]]
"""Computes a part's outputs from its inputs in one or more steps: in each some outputs, with their places."""


class PureFunction:
    """Called like the emitted function: `(weights, buffers, batch or saved or deferred, comm)`.

    It receives everything before it computes, and sends and adds up what a step has made after that step.
    """

    def __init__(self, part: PurePart, steps: Steps) -> None:
        self.part = part
        self._steps = steps
        self._receives = [row.name for row in part.inputs if row.kind == "received"]
        self._sends = [(i, row.name) for i, row in enumerate(part.outputs) if row.kind == "sent"]
        self._loss = sum(row.kind == "loss" for row in part.outputs)
        self._updates = sum(row.kind == "update" for row in part.outputs)

    def __call__(self, weights: Sequence[Any], buffers: Sequence[Any], third: Any, comm: Any) -> Any:
        received = [receive(self.part, name, comm) for name in self._receives]
        drawn = [draw(self.part.device, comm.one_draw) for draw in self.part.draws]
        inputs = [*weights, *buffers, *third, *received, *drawn]
        if self.part.phase != "F":
            third.clear()
        del received, drawn
        values: dict[int, Tensor] = {}
        sends, handed = deque(self._sends), deque(self.part.handed)
        for some in self._steps(inputs):
            values.update(some)
            while sends and sends[0][0] in values:
                place, name = sends.popleft()
                send(self.part, name, values[place], comm)
            while handed and all(i is None or i in values for i in handed[0].outputs):
                handed.popleft().to(comm, values)
        outputs = tuple(values[i] for i in range(len(values)))
        count = len(outputs) - len(self._sends)
        if self.part.phase != "F":
            return list(outputs[:count])
        saved = self._loss + self._updates
        loss = outputs[0] if self._loss else None
        return loss, outputs[self._loss : saved], list(outputs[saved:count])


def receive(part: PurePart, name: str, comm: Any) -> Tensor:
    """A value that the part receives, unpacked."""
    value: Tensor = comm.recv(name)
    if (edge := part.edges.get(name)) is None:
        return value
    tensor, layout = edge.tensor, Layout(edge.tensor)
    return codec(edge.codec).unpack(value, tensor.shape, getattr(torch, tensor.dtype), layout.stride)


def send(part: PurePart, name: str, value: Tensor, comm: Any) -> None:
    """Pack a value of the part, and send it."""
    if edge := part.edges.get(name):
        coder = codec(edge.codec)
        value = coder.pack(value, comm.state(name) if coder.keeps_state(edge.kind) else None)
    comm.send(name, value)


NARROW = (torch.float32, torch.bfloat16, torch.float16)


def in_float64(part: PurePart) -> PureFunction:
    """The part computed in float64, with rounding errors a billion times smaller and the same masks."""
    graph = copy_graph(part.graph.graph)
    module = fx.GraphModule(part.graph, graph)
    for node in graph.nodes:
        if node.op == "get_attr":
            setattr(module, node.target, wide(getattr(module, node.target)))

    def compute(inputs: list[Any]) -> Iterator[Iterable[tuple[int, Tensor]]]:
        with all_float64():
            results: tuple[Tensor, ...] = module(*map(wide, inputs))
        yield enumerate(results)

    return PureFunction(part, compute)


def wide(value: Any) -> Any:
    """In float64, if it is a tensor of a narrower floating-point type."""
    return value.double() if isinstance(value, Tensor) and value.dtype in NARROW else value


class _Wide(TorchDispatchMode):
    """Makes float64 where a call asks for a narrower floating-point type.

    An operator of a library on codes of 8 bits reads scales in the type that it has written: it computes in float32.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = (args, kwargs or {})
        codes = func.namespace != "aten" and any(
            isinstance(leaf, Tensor) and leaf.dtype in (torch.uint8, torch.int8) for leaf in pytree.tree_leaves(call)
        )
        args, kwargs = pytree.tree_map_only(torch.dtype, _single_type if codes else _wide_type, call)
        if codes:
            args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to(_single_type(t.dtype)), (args, kwargs))
        result = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, wide, result) if codes else result


def _single_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point and dtype.itemsize > 1 else dtype


def _wide_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in NARROW else dtype


@contextmanager
def all_float64() -> Iterator[None]:
    """Inside, steps whose tensors are float64 keep that type: casts, factories and autocast do not narrow it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(before)


def in_stable_order(function: Function) -> Function:
    """The function with a stable `sort` and `topk`: equal elements, such as tokens with one expert, keep their order.

    ONNX promises that, and PyTorch does not.
    """

    def call(weights: Any, buffers: Any, third: Any, comm: Any) -> Any:
        with _StableOrder():
            return function(weights, buffers, third, comm)

    return call


class _StableOrder(LightDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.sort.default:
            return _sort(*args, **kwargs)
        if func is aten.topk.default:
            return _topk(*args, **kwargs)
        return func(*args, **kwargs)


def _sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    values, indices = aten.sort.stable(x, stable=True, dim=dim, descending=descending)
    return values, indices


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    values, indices = _sort(x, dim, largest)
    return values.narrow(dim, 0, k).contiguous(), indices.narrow(dim, 0, k).contiguous()
