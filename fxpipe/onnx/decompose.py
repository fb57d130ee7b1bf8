"""A graph in operators that ONNX has, or a refusal that names each operator that ONNX lacks, and where it is called."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from fxpipe.errors import ExportError, first_line
from fxpipe.ir.recurrent_layer import is_left
from fxpipe.onnx import decompositions
from fxpipe.stages.random_inputs import PLACE
from fxpipe.torch_private import (
    Decompositions,
    FakeTensorMode,
    OpOverload,
    make_fx_with_constants,
    onnx_operators,
    pytree,
    schema_of,
    torch_decompositions,
)

aten = torch.ops.aten
_ORIGIN = "fxpipe_origin"  # the operator that a node decomposes
OTHER_OPERATORS = "write that part of the model with other operators, or keep its stage on PyTorch"
_LIMIT = 12  # places named for one operator


def decompose(module: fx.GraphModule, examples: Sequence[torch.Tensor], table: Decompositions) -> fx.GraphModule:
    """The module in operators that ONNX has; each node keeps the place of the call it comes from."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        inputs = [torch.empty_strided(e.shape, e.stride(), dtype=e.dtype, device="cpu") for e in examples]
    with torch.no_grad():
        traced = make_fx(_OnCpu(module).run, decomposition_table=dict(table), tracing_mode="fake")(*inputs)
        if any(isinstance(n.target, OpOverload) and schema_of(n.target).is_mutable for n in traced.graph.nodes):
            # Some of torch's decompositions write in place.
            pure = functionalize(_OnCpu(traced).run, remove="mutations")
            trace = make_fx_with_constants(pure, decomposition_table=dict(table), tracing_mode="fake")
            traced = trace(*inputs)
    _make_constants(traced.graph)
    placeholders = {n for n in traced.graph.nodes if n.op == "placeholder"}
    traced.graph.eliminate_dead_code(is_impure_node=lambda n: n in placeholders or n.op == "output")
    traced.recompile()
    return traced


def _make_constants(graph: fx.Graph) -> None:
    """Fill tensors that torch.onnx would not make: those without entries, such as the statistics of a batch norm in
    eval mode, for which it has some other tensor, and what the kernel of a recurrent layer leaves, which nothing reads.
    """
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op == "call_function" and node.users and isinstance(value, Tensor):
            if value.numel() and not is_left(node):
                continue
            with graph.inserting_before(node):
                filled = graph.call_function(aten.full.default, (list(value.shape), 0), {"dtype": value.dtype})
            filled.meta = dict(node.meta)
            node.replace_all_uses_with(filled)


class _OnCpu(fx.Interpreter):
    """Runs a module on the CPU, whatever device it names, without strides, and passes places on to what is traced."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self._last: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        try:
            return super().run_node(n)
        except ExportError:
            raise
        except Exception as error:
            raise ExportError(
                f"{_name(n.target)} cannot be exported: {first_line(error)}",
                where=n.meta.get(PLACE),
                hint=OTHER_OPERATORS,
            ) from error
        finally:
            self._mark(n)

    def _mark(self, made_for: fx.Node) -> None:
        notes = {PLACE: made_for.meta.get(PLACE), _ORIGIN: made_for.meta.get(_ORIGIN, _name(made_for.target))}
        mode = get_proxy_mode()
        if mode is None:
            return
        graph = mode.tracer.graph
        last = newest = next(iter(reversed(graph.nodes)), None)
        while newest is not None and newest is not self._last and newest.op != "root":
            newest.meta.update({k: v for k, v in notes.items() if v is not None})
            newest = newest.prev
        self._last = last

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
        kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
        if target in (aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default):
            return aten.reshape.default(args[0], args[1])
        if target is aten.as_strided.default:
            return _plain_view(*args, **kwargs)
        if target is aten.clone.default:
            return aten.clone.default(args[0])
        return super().call_function(target, args, kwargs)


def _plain_view(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
    """`as_strided` of a tensor that is its whole storage, in order, by permuting, slicing and expanding: ONNX's tensors
    have no strides.
    """
    if any(s == 0 for s in size):
        return x.new_zeros(size)
    held = x.stride()
    order = sorted(range(x.ndim), key=lambda d: (-held[d], d))
    expected = 1
    for d in reversed(order):
        if x.shape[d] != 1 and held[d] != expected:
            raise NotImplementedError("as_strided of a tensor that is itself a view with gaps")
        expected *= x.shape[d]
    flat = x.permute(order).reshape(-1)
    offset = (storage_offset or 0) - (x.storage_offset() if storage_offset is not None else 0)
    # Each axis from the outermost: a row of the remainder, taken in steps.
    axes = sorted((d for d in range(len(size)) if size[d] > 1 and stride[d] > 0), key=lambda d: -stride[d])
    reach = sum((size[d] - 1) * stride[d] for d in axes) + 1
    for outer, inner in itertools.pairwise(axes):
        if stride[outer] % stride[inner] or stride[outer] < size[inner] * stride[inner]:
            raise NotImplementedError("as_strided that is not a slice or permutation")
    part = flat[offset : offset + reach]
    if part.shape[0] != reach:
        raise NotImplementedError("as_strided beyond the tensor")
    for d in axes:
        # Pad to whole steps, and keep the start of each.
        count, step = size[d], stride[d]
        inner = 1 + sum((size[e] - 1) * stride[e] for e in axes if stride[e] < step)
        width = part.shape[-1]
        if count * step > width:
            part = torch.cat([part, part.new_zeros((*part.shape[:-1], count * step - width))], -1)
        part = part.reshape(*part.shape[:-1], count, step)[..., :inner]
    part = part.reshape([size[d] for d in axes])
    part = part.permute([axes.index(d) for d in sorted(axes)])
    full = part.reshape([size[d] if d in axes else 1 for d in range(len(size))])
    return full.expand(list(size))


def decomposition_table() -> Decompositions:
    """Torch's decompositions of what torch.onnx lacks; ours take precedence."""
    return _torch_decompositions() | decompositions.table()


@functools.cache
def _torch_decompositions() -> Decompositions:
    table: Decompositions = {}
    for overload, function in [*torch.export.default_decompositions().items(), *torch_decompositions.items()]:
        if isinstance(overload, OpOverload) and overload not in onnx_operators() and not schema_of(overload).is_mutable:
            table.setdefault(overload, function)
    return table


def check_operators(module: fx.GraphModule) -> None:
    places: dict[str, list[str]] = {}
    for node in module.graph.nodes:
        exempt = (operator.getitem, decompositions.recurrent.LAYER)
        if node.op != "call_function" or node.target in onnx_operators() or node.target in exempt:
            continue
        if isinstance(node.target, OpOverload) and node.target.namespace != "onnx_symbolic" and _tensors(node):
            name, place = _name(node.target), node.meta.get(PLACE)
            origin = node.meta.get(_ORIGIN, name)
            needed = name if origin == name else f"{origin} (needs {name})"
            places.setdefault(needed, []).extend([place] if place else [])
    if places:
        lines = []
        for name, uses in sorted(places.items()):
            distinct = list(dict.fromkeys(uses))
            lines.append("\n  ".join([name + (":" if distinct else ""), *(f"  {p}" for p in distinct[:_LIMIT])]))
            if len(distinct) > _LIMIT:
                lines[-1] += f"\n    and {len(distinct) - _LIMIT} more"
        raise ExportError("ONNX has nothing for these operators:\n  " + "\n  ".join(lines), hint=OTHER_OPERATORS)


_NODE = re.compile(r"%(\w+) : .*\btarget=torch\.ops\.([\w.]+)\]")
"""How torch writes the call at which it failed."""


@contextlib.contextmanager
def refused(graph: fx.Graph) -> Iterator[None]:
    """Inside, errors of torch's work on a graph name the operator and its place."""
    try:
        yield
    except ExportError:
        raise
    except Exception as error:
        root, named = error, _NODE.search(str(error))
        while isinstance(root.__cause__, Exception):
            root = root.__cause__
            named = _NODE.search(str(root)) or named
        what, where = "a call", None
        if named is not None:
            what = named[2]
            same = [n for n in graph.nodes if str(n.target) == what]
            metas = [n.meta for n in same if n.name == named[1]] or [n.meta for n in same]
            where = "; ".join(dict.fromkeys(meta[PLACE] for meta in metas if meta.get(PLACE))) or None
            origin = next((meta[_ORIGIN] for meta in metas if meta.get(_ORIGIN, what) != what), None)
            what = what if origin is None else f"{origin} (as {what})"
        raise ExportError(
            f"PyTorch cannot convert {what} to ONNX: {first_line(root)}", where=where, hint=OTHER_OPERATORS
        ) from error


def _tensors(node: fx.Node) -> bool:
    """Whether the node makes tensors: torch.onnx handles arithmetic on sizes itself."""
    return any(isinstance(v, torch.Tensor) for v in pytree.tree_leaves(node.meta.get("val")))


def _name(target: Any) -> str:
    return str(target) if isinstance(target, OpOverload) else getattr(target, "__name__", str(target))
