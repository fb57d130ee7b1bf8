"""Finds, while a step is traced, which numbers and strings of its batch it reads.

A number is traced as a tensor without dimensions that promotes types as a Python number does. A string becomes an
object that notes every use. If the step asks for the value of one, it is traced again with that one as a constant.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch

from fxpipe.device_copies import widest
from fxpipe.errors import CaptureError
from fxpipe.task.batch import Batch
from fxpipe.torch_private import UNKNOWN
from fxpipe.tracing.known_values import mapped, tensors_in
from fxpipe.user_lines import outwards, place, stacked, user_frame

Made = TypeVar("Made")

_SHOWN = ("__repr__", "__format__")
_DIVISIONS = ("div", "true_divide", "divide", "__truediv__", "__rtruediv__")
_TENSORS = (torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor)
_HALF = (torch.float16, torch.bfloat16)


class _TracedNumber(NamedTuple):
    """A tensor in place of a number, kept alive so that its id stays unique, and the leaves that it was made of."""

    tensor: torch.Tensor
    leaves: frozenset[str]


class BatchReads:
    """The numbers and strings of a batch in one trace of a step; and by name, the `places` that read their values."""

    def __init__(self) -> None:
        self.places: dict[str, str | None] = {}
        self._numbers: dict[int, _TracedNumber] = {}

    def number(self, leaf: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, which from now on counts as a number."""
        return self._keep(tensor, frozenset([leaf]))

    def text(self, leaf: str, value: Any) -> Any:
        """A placeholder for a string, or a list of them, until the step uses it."""
        return _kind_of(type(value))(value, lambda: self._read([leaf]))

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any, traced: Callable[..., Any]) -> Any:
        """What a torch call returns; `traced` makes it."""
        tensors = list(tensors_in((args, kwargs)))
        numbers = [self._numbers[id(t)] for t in tensors if id(t) in self._numbers]
        if not numbers:
            return traced(args, kwargs)
        leaves, name = frozenset().union(*(n.leaves for n in numbers)), getattr(function, "__name__", "")
        if name in _SHOWN:
            self._read(leaves)
        if function in _TENSORS:
            result = traced(args, kwargs)
            wide = kwargs.get("dtype") is None and result.dtype == torch.float64
            return result.to(torch.get_default_dtype()) if wide else result  # the type that torch gives a number
        alone = len(numbers) == len(tensors)
        others = [t for t in tensors if id(t) not in self._numbers]

        def typed(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in self._numbers:
                return tensor
            if not alone:
                return tensor.to(_as_python(tensor, others))
            return tensor.to(widest(tensor.device)) if name in _DIVISIONS else tensor

        try:
            result = traced(mapped(args, typed), mapped(kwargs, typed))
        except UNKNOWN:
            self._read(leaves)
            raise
        return self._keep(result, leaves) if alone and isinstance(result, torch.Tensor) and not result.dim() else result

    def _keep(self, tensor: torch.Tensor, leaves: frozenset[str]) -> torch.Tensor:
        self._numbers[id(tensor)] = _TracedNumber(tensor, leaves)
        return tensor

    def _read(self, leaves: Sequence[str] | frozenset[str]) -> None:
        frame = user_frame(sys._getframe(1))
        where = None if frame is None else stacked(outwards(frame)) or place(frame.f_code.co_filename, frame.f_lineno)
        for leaf in leaves:
            self.places.setdefault(leaf, where)


def _as_python(number: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.dtype:
    """The type of a number next to other tensors that gives the result the type a Python number would give."""
    kind = {torch.int64: 1, torch.bool: True}.get(number.dtype, 1.0)
    wide = max(others, key=lambda t: (t.is_complex(), t.is_floating_point(), t.dtype != torch.bool, t.dim()))
    if wide.dim() and ((wide.is_floating_point() and number.dtype == torch.int64) or wide.dtype in _HALF):
        return number.dtype  # kernels compute with such a number as with Python's; it may be an index
    return torch.result_type(wide, kind)


_KINDS: dict[type, type] = {}
_NOT_READS = {"__class__", "__new__", "__init__", "__getattribute__", "__setattr__", "__delattr__", "__init_subclass__"}


def _kind_of(of: type) -> type:
    """A class of objects that act as objects of another class, and call a function before each use."""
    if of in _KINDS:
        return _KINDS[of]

    def forward(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            self._fxpipe_read()
            return getattr(self._fxpipe_value, name)(*args, **kwargs)

        return method

    def begin(self: Any, value: Any, read: Callable[[], None]) -> None:
        object.__setattr__(self, "_fxpipe_value", value)
        object.__setattr__(self, "_fxpipe_read", read)

    def attribute(self: Any, name: str) -> Any:
        self._fxpipe_read()
        return getattr(self._fxpipe_value, name)

    members = {name: forward(name) for name in dir(of) if name.startswith("__") and name not in _NOT_READS}
    members |= {"__init__": begin, "__getattr__": attribute, "__bool__": lambda self: self.__len__() > 0}
    members["__class__"] = property(lambda self: of)  # type: ignore[assignment]
    _KINDS[of] = type(f"unread {of.__name__}", (), members)
    return _KINDS[of]


def of_what_is_read(batch: Batch, trace: Callable[[Batch, BatchReads], Made]) -> tuple[Made, Mapping[str, str | None]]:
    """Trace a step with only those numbers and strings as constants whose values it reads.

    Returns what `trace` returns, and by the name of each constant the line that reads it.
    """
    places: dict[str, str | None] = {}
    while True:
        reads = BatchReads()
        try:
            traced = trace(batch, reads)
            if not reads.places:
                return traced, places
        except CaptureError:
            if not batch.plain:
                raise
            if not reads.places:  # maybe a call failed that takes no tensor as a number
                reads.places = dict.fromkeys(batch.plain)
        places |= reads.places
        batch = replace(batch, constants=(*batch.constants, *reads.places))
