"""Refuses that a hook writes to a parameter: workers train others, so the change would be lost without a word."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fxpipe.errors import TaskError
from fxpipe.torch_private import DisableTorchFunction

_WRITES = re.compile(r"[a-z0-9_]*[a-z0-9]_|__i[a-z]+__|__setitem__|__set__")
_OF_TENSORS: Any = Tensor  # its stubs have no setters and getters
_FREEZES = {Tensor.requires_grad_, _OF_TENSORS.requires_grad.__set__}
"""What `WhatTrains` refuses."""

_NO_WRITES = {*_FREEZES, _OF_TENSORS.grad.__set__, Tensor.__index__, Tensor.__invert__}
_SAME_VALUES = {_OF_TENSORS.data.__get__, Tensor.detach, Tensor.view, Tensor.__getitem__}


class _Guarded(Tensor):
    place: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        operands = args or tuple((kwargs or {}).values())
        first = operands[0] if operands and isinstance(operands[0], (list, tuple)) else operands[:1]
        changed = next((each for each in first if isinstance(each, _Guarded)), None)
        if changed is not None and _WRITES.fullmatch(name) and func not in _NO_WRITES:
            raise TaskError(
                f"a hook changes the parameter {changed.place} ({name}), which the workers of a run do not see",
                hint="let the optimizer do it: in its step(), or in optimizer(named_parameters) with "
                "register_step_post_hook, which gets the parameters that a worker trains",
            )
        with DisableTorchFunction():
            result = func(*args, **(kwargs or {}))
        if changed is not None and func in _SAME_VALUES:
            result = result.as_subclass(_Guarded)
            result.place = changed.place
        return result


class GuardedParameters:
    """From now on until `release`, writing to these parameters raises TaskError."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        places = {parameter: place for place, parameter in parameters.items()}
        self._before = [(p, type(p)) for p in places]
        for parameter, kind in self._before:
            parameter.__class__ = type(kind.__name__, (_Guarded, kind), {"place": places[parameter]})

    def release(self) -> None:
        for parameter, kind in self._before:
            parameter.__class__ = kind
        self._before = []
