"""Calls of operators that captured programs make, made again on inputs that lie otherwise in memory."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fxpipe.ir.program import Program

PAIRS = 24  # of layouts that differ from one argument to another


@dataclass(frozen=True)
class Call:
    """An operator and its arguments."""

    operator: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        return [v for v in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(v, Tensor)]

    @property
    def kind(self) -> tuple[object, ...]:
        """Calls of one kind differ in sizes and numbers alone."""
        leaves = pytree.tree_leaves((self.args, self.kwargs), is_leaf=lambda v: v is None)
        return (self.operator, *(v.dim() if isinstance(v, Tensor) else (type(v), v is True) for v in leaves))

    def relaid(self) -> Iterator[Call]:
        """The call with all tensors laid out in one way, with one of them, and with two of them in different ways."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        ways = {i: layouts(v) for i, v in enumerate(leaves) if isinstance(v, Tensor)}
        names = dict.fromkeys(name for found in ways.values() for name in found)
        plans = [{i: name for i, found in ways.items() if name in found} for name in names]
        plans += [{i: name} for i, found in ways.items() for name in found]
        pairs = ({i: a, j: b} for i, j in itertools.permutations(ways, 2) for a in ways[i] for b in ways[j] if a != b)
        plans += itertools.islice(pairs, PAIRS)
        for plan in (dict(p) for p in dict.fromkeys(tuple(p.items()) for p in plans)):
            chosen = [ways[i][plan.get(i, "contiguous")] if i in ways else v for i, v in enumerate(leaves)]
            args, kwargs = pytree.tree_unflatten(chosen, spec)
            yield Call(self.operator, args, kwargs)

    def strides(self) -> list[tuple[int, ...]]:
        """Those of what the kernel makes; a kernel may refuse a layout that eager never gives it."""
        with torch.no_grad():
            return _strides(self.operator(*self.args, **self.kwargs))

    def predicted(self, mode: FakeTensorMode) -> list[tuple[int, ...]]:
        """Those of what fake tensors make."""
        args, kwargs = pytree.tree_map_only(Tensor, mode.from_tensor, (self.args, self.kwargs))
        with mode:
            return _strides(self.operator(*args, **kwargs))


def layouts(tensor: Tensor) -> dict[str, Tensor]:
    """The tensor in every kind of memory layout; expanded ones repeat a part of its values."""
    found = {"contiguous": tensor.contiguous()}
    if tensor.dim() < 2 or tensor.numel() < 2:
        return found
    for d in range(tensor.dim() - 1):
        found[f"transposed {d}"] = tensor.transpose(d, d + 1).contiguous().transpose(d, d + 1)
    for d in range(tensor.dim()):
        found[f"expanded {d}"] = tensor.narrow(d, 0, 1).expand(tensor.shape)
    found["reversed"] = (
        tensor.permute(*reversed(range(tensor.dim()))).contiguous().permute(*reversed(range(tensor.dim())))
    )
    found["sliced"] = torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]
    found["strided"] = torch.stack([tensor, tensor], -1)[..., 0]
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if last is not None:
        found["channels last"] = tensor.contiguous(memory_format=last)
    return found


def calls(program: Program) -> dict[tuple[object, ...], Call]:
    """By its kind, a call of every operator that takes tensors, with the values of the example batch."""
    found: dict[tuple[object, ...], Call] = {}

    class Recording(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            if n.op == "call_function" and isinstance(n.target, OpOverload):
                call = Call(n.target, *self.fetch_args_kwargs_from_env(n))
                if call.tensors and all(t.layout == torch.strided for t in call.tensors):
                    found.setdefault(call.kind, call)
            return super().run_node(n)

    feed = {**program.values, **program.example}
    with torch.no_grad():
        Recording(fx.GraphModule(nn.Module(), program.graph)).run(*(feed[name] for name in program.placeholders))
    return found


def pointwise_calls() -> Iterator[Call]:
    """Calls of every ATen operator that torch computes element by element: with tensors of one shape and of several."""
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if isinstance(packet, OpOverloadPacket) else ():
            operator = getattr(packet, overload)
            if torch.Tag.pointwise not in operator.tags or operator._schema.is_mutable or is_composite(operator):
                continue
            for shapes in SHAPES:
                made = (_made_up(operator, dtype, shapes) for dtype in (torch.float32, torch.int64, torch.bool))
                if (call := next((c for c in made if c is not None and _runs(c)), None)) is not None:
                    yield call


def is_composite(operator: OpOverload) -> bool:
    """Whether capture traces what it calls, and never the operator."""
    return operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


SHAPES = (((2, 3, 4, 5),), ((2, 3, 4, 1), (2, 3, 1, 5)))
_VALUES = {
    "Optional[str]": "floor",
    "Scalar": 1,
    "number": 1,
    "Optional[number]": 1,
    "float": 0.5,
    "int": 1,
    "bool": False,
}


def _made_up(operator: OpOverload, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]]) -> Call | None:
    """A call with made-up arguments; None where it needs others than tensors and numbers, or has too few tensors."""
    rest = list(shapes)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in operator._schema.arguments:
        kind = str(argument.type)
        if kind in ("Tensor", "Optional[Tensor]"):
            value: Any = (torch.rand(rest.pop(0) if len(rest) > 1 else rest[0]) * 0.8 + 0.1).to(dtype)
        elif argument.has_default_value():
            continue
        elif kind in _VALUES:
            value = _VALUES[kind]
        else:
            return None
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return Call(operator, tuple(args), kwargs) if len(rest) == 1 else None


def _runs(call: Call) -> bool:
    try:
        call.strides()
        call.predicted(FakeTensorMode())
    except (RuntimeError, NotImplementedError, torch._subclasses.fake_tensor.DataDependentOutputException):
        return False
    return True


def mispredicted(call: Call, mode: FakeTensorMode, among: Callable[[Call], bool] = lambda call: True) -> list[str]:
    """The layouts of its inputs for which the kernel gives other strides than fake tensors predict, in words.

    Args:
        among: which calls to make: some kernels write where they must not if they get a layout that eager never gives.
    """
    found = []
    for other in filter(among, call.relaid()):
        given = [tuple(t.stride()) for t in other.tensors]
        made = None
        with contextlib.suppress(RuntimeError):
            made = other.strides()
        if made is not None and made != (predicted := other.predicted(mode)):
            found.append(f"{call.operator} of {given} gives {made}, predicted are {predicted}")
    return found


def _strides(made: Any) -> list[tuple[int, ...]]:
    """Of every tensor, where they say anything: not of single elements."""
    tensors = [v for v in pytree.tree_leaves(made) if isinstance(v, Tensor) and v.numel()]
    return [tuple(step for step, size in zip(v.stride(), v.shape, strict=True) if size > 1) for v in tensors]
