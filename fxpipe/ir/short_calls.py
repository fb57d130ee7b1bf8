"""Calls as users of PyTorch write them: `x.view(8, 64)` for `aten.view.default(x, [8, 64])`.

They are easier to read, and calling an operator object takes up to four times as long as torch's own bindings. A call
is written short only where torch was seen to dispatch it to the same overload with the same arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.torch_private import OpOverload, TorchDispatchMode, schema_of

_INFIX = {
    "add": ("+", operator.add),
    "sub": ("-", operator.sub),
    "mul": ("*", operator.mul),
    "div": ("/", operator.truediv),
}

Spelling = Callable[[Sequence[str], Sequence[str]], str]
"""Puts positional and keyword arguments, as texts, into a call."""

_known: dict[Any, Spelling | None] = {}


def short_call(node: fx.Node) -> Spelling | None:
    """How the call of a node is written in short; None if only the operator object does the same."""
    target, args, kwargs = node.target, node.args, node.kwargs
    if not isinstance(target, OpOverload) or target.namespace != "aten" or target.overloadpacket.__name__[0] == "_":
        return None
    if not args or not isinstance(args[0], (fx.Node, list)):
        return None  # such as a factory, which default devices may change
    key = (target, repr(_kinds(args)), repr(_kinds(dict(kwargs))))
    if key not in _known:
        _known[key] = next((text for text, call in _candidates(target, args) if _same(node, call)), None)
    return _known[key]


def _candidates(target: OpOverload, args: Sequence[Any]) -> Iterator[tuple[Spelling, Callable[..., Any]]]:
    """Short forms and what they call, the best first."""
    name = target.overloadpacket.__name__
    if name in _INFIX and len(args) == 2:
        sign, infix = _INFIX[name]
        yield lambda texts, more: f"{texts[0]} {sign} {texts[1]}", infix
    method = operator.methodcaller
    function = getattr(torch, name, None)
    views = any(returned.alias_info is not None for returned in schema_of(target).returns)
    if views and len(args) == 2 and isinstance(args[1], (list, tuple)):
        yield (
            lambda texts, more: f"{texts[0]}.{name}({', '.join([texts[1][1:-1], *more])})",
            lambda x, sizes, **kwargs: method(name, *sizes, **kwargs)(x),
        )
    forms = [
        (
            lambda texts, more: f"{texts[0]}.{name}({', '.join([*texts[1:], *more])})",
            lambda x, *args, **kwargs: method(name, *args, **kwargs)(x),
        )
    ]
    if function is not None:
        forms.append((lambda texts, more: f"torch.{name}({', '.join([*texts, *more])})", function))
    yield from forms if views else reversed(forms)


def _same(node: fx.Node, call: Callable[..., Any]) -> bool:
    """Whether a call, with the node's arguments, dispatches to the node's operator with these arguments, once."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with _Seen() as seen, torch.no_grad():
        try:
            call(*args, **kwargs)
        except Exception:
            return False
    expected = (node.target, *_complete(node.target, args, kwargs))
    return len(seen.calls) == 1 and _equal(seen.calls[0], expected)


class _Seen(TorchDispatchMode):
    """Notes what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim":  # such as a question for a fake tensor's device
            self.calls.append((func, *_complete(func, args, kwargs or {})))
        return func(*args, **kwargs or {})


def _complete(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    """All arguments in the schema's order, with defaults."""
    for place, argument in enumerate(schema_of(target).arguments):
        yield args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other) and bool(one == other or one != one)


def _kinds(value: Any) -> Any:
    """An argument as far as torch chooses an overload by it."""
    if isinstance(value, fx.Node):
        val = value.meta["val"]
        return (val.dtype, val.dim() == 0, val.device.type) if isinstance(val, Tensor) else type(val)
    if isinstance(value, (list, tuple)):
        return [_kinds(item) for item in value]
    if isinstance(value, dict):
        return {name: _kinds(item) for name, item in value.items()}
    return value if isinstance(value, bool) or value is None else type(value)
