"""Checks that the step is the same at every call: capture would freeze what Python draws, counts or reads from a clock.

Tracing calls the step at least twice: to learn about its outputs, then to record it. The torch calls of both are
compared one by one, with their numbers, the identity of their tensors, and the values of constants. Where they differ,
the graph would freeze what the second call happened to do. A difference is allowed only if it concerns the first call
alone, and all later calls are like the second.
"""

from __future__ import annotations

import ctypes
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from fxpipe.errors import CaptureError

Place = tuple[str, int]
Call = tuple[str, Any, Any]  # of a torch function: its name, and tokens for its arguments

_MARK = "_fxpipe_made"  # on a tensor: which run of the step computed it, and which torch call in that run
_PLAIN = (torch.Tensor, nn.Parameter)
_READ = 1 << 14  # bytes of a constant that are compared
_TENSORS = ("given", "made", "constant", "tensor")  # the first item of the tokens of tensors
_LONG = 64  # arguments beyond which a list is compared by its hash
_RUNS = itertools.count(1)


class Repeats:
    """The torch calls of a step, compared between its runs.

    Attributes:
        runs: how often the step has been called.
        difference: the error that says where a later call differed from the first; None as long as all are equal.
        outside: by id, tensors that require a gradient and that the step neither was given nor made, with the line.
        long: how many arguments of a list are compared one by one; longer lists by their hash.
    """

    long = _LONG

    def __init__(self) -> None:
        self.runs = 0
        self.difference: CaptureError | None = None
        self.outside: dict[int, tuple[torch.Tensor, str | None]] = {}
        self._run = 0
        self._first: list[tuple[Place, Call]] = []
        self._calls: list[tuple[Place, Call]] = []  # of this run
        self._known: dict[int, int] = {}
        self._fed: set[int] = set()  # the calls whose results depend on the arguments of the step
        self._reads = False  # whether the current call does
        self._outside: list[torch.Tensor] = []  # what the current call reads of `outside`
        self._settled = self._ended = False

    def begin(self, given: Sequence[torch.Tensor]) -> None:
        """The step is being called, with tensors that are the same at every call."""
        self.runs += 1
        self._run = next(_RUNS)
        self._calls = []
        self._fed = set()
        self._known = {id(tensor): i for i, tensor in enumerate(given)}

    def end(self, where: Callable[[Place], str | None]) -> None:
        """The step has returned.

        Raises:
            CaptureError: it did not do what it did the first time.
        """
        if self.runs == 1:
            self._first = self._calls
        elif self.difference is None and len(self._calls) < len(self._first):
            place, call = self._first[len(self._calls)]
            self.difference = _differs(where(place), call, None)
        if self.difference is not None:
            self._ended = True
            raise self.difference

    def settle(self) -> bool:
        """Whether to trace once more, because only the first call may have differed: it filled a cache.

        From now on the step must repeat its last call.
        """
        if self.difference is None or self._settled or not self._ended:
            return False
        self._settled, self.difference, self._first = True, None, self._calls
        return True

    def call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], where: Callable[[], str | None]) -> Call:
        """The token of a torch call that is about to be made.

        Raises:
            CaptureError: one of the tensors was computed by an earlier call of the step.
        """
        self._reads, self._outside = False, []
        try:
            return (name, self._token(args), self._token(kwargs) if kwargs else None)
        except _Stale:
            raise CaptureError(
                "the step uses a tensor that an earlier call of the step computed and kept where fxpipe does not "
                "look: in a package's own globals, a SimpleQueue",
                where=where(),
                hint="keep it in a buffer of the model (register_buffer); or fill a cache of constants before capture, "
                "by calling the model once in model()",
                page="kept-tensors",
            ) from None

    def made(
        self,
        call: Call,
        result: Any,
        place: Place,
        where: Callable[[], str | None],
        lines: Callable[[Place], str | None],
    ) -> None:
        """A torch call has returned `result`.

        Args:
            where: returns the line of this call, and the user's line that led to it.
            lines: returns the same for a place.
        """
        for tensor in self._outside:
            self.outside.setdefault(id(tensor), (tensor, where()))
        if not self._marked(result) and call[0] not in ("lift_fresh.default", "__setitem__"):
            return  # a size, a flag: its effect shows in later calls
        count = len(self._calls)
        if self._reads:
            self._fed.add(count)
        self._calls.append((place, call))
        if self.runs > 1 and self.difference is None:
            old, before = self._first[count] if count < len(self._first) else (place, None)
            if before != call:
                left_out = old != place and any(later == place for later, _ in self._first[count + 1 :])
                self.difference = _differs(lines(old) if left_out else where(), before, call)
        if isinstance(result, torch.Tensor) and result.layout != torch.strided and result.requires_grad:
            raise CaptureError(
                "the step makes a sparse tensor on the way to a gradient, which would be lost",
                where=where(),
                hint="use dense tensors where a gradient is needed",
                page="tensor-kinds",
            )

    def is_fed(self, tensor: torch.Tensor) -> bool:
        """Whether the step's last call computed a tensor from its arguments: such a tensor is not a constant."""
        run, number = getattr(tensor, _MARK, (0, None))
        return run == self._run and number in self._fed

    def _marked(self, result: Any) -> bool:
        """Mark the tensors of a result as made by this call; return whether there are any."""
        if isinstance(result, FunctionalTensor):
            setattr(result, _MARK, (self._run, len(self._calls)))
            return True
        if isinstance(result, (tuple, list)):
            return any([self._marked(part) for part in result])
        return False

    def _token(self, value: Any) -> Any:
        """The token of an argument: equal if and only if the call would be the same."""
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if isinstance(value, float):
            return value if value == value else "nan"
        if value is None or isinstance(value, (bool, int, str, complex, torch.dtype, torch.device, torch.layout)):
            return value
        if isinstance(value, (tuple, list)):
            tokens = tuple(map(self._token, value))
            return tokens if len(tokens) <= self.long else (len(tokens), hash(tokens))
        if isinstance(value, dict):
            return tuple((key, self._token(v)) for key, v in value.items())
        if isinstance(value, slice):
            return ("slice", self._token(value.start), self._token(value.stop), self._token(value.step))
        if type(value).__module__ == "numpy":
            return _of_numpy(value)
        return type(value).__qualname__

    def _of_tensor(self, tensor: torch.Tensor) -> Any:
        if id(tensor) in self._known:
            self._reads = True
            return ("given", self._known[id(tensor)])
        run, number = getattr(tensor, _MARK, (self._run, None))
        if run != self._run:
            raise _Stale
        if number is not None:
            self._reads |= number in self._fed
            return ("made", number)
        if is_outside(tensor):
            self._outside.append(tensor)
        return ("constant", checksum(tensor)) if _is_readable(tensor) else ("tensor", tensor.dtype)


class _Stale(Exception):
    """A tensor of an earlier call of the step."""


def is_outside(tensor: torch.Tensor) -> bool:
    """Whether a tensor that the step was not given, and did not make, requires a gradient."""
    return (
        tensor.requires_grad
        and not isinstance(tensor, (FunctionalTensor, FakeTensor))
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def _is_readable(tensor: torch.Tensor) -> bool:
    """Whether a tensor consists of plain values in this process's memory."""
    return (
        type(tensor) in _PLAIN
        and not torch._is_functional_tensor(tensor)
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not tensor.is_nested
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and tensor.data_ptr() != 0
    )


def checksum(tensor: torch.Tensor) -> str:
    """A checksum of a tensor's first bytes, read from memory, so that no torch mode sees it."""
    held = int(tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size())
    return hex(zlib.crc32(ctypes.string_at(tensor.data_ptr(), min(held, _READ))))


def _of_numpy(value: Any) -> Any:
    if getattr(value, "ndim", 0) == 0 and hasattr(value, "item"):
        found = value.item()
        return found if found == found else "nan"
    if hasattr(value, "flat"):
        return (str(value.dtype), tuple(value.shape), hex(zlib.crc32(repr(value.flat[:1024].tolist()).encode())))
    return type(value).__qualname__


def _differs(where: str | None, before: Call | None, now: Call | None) -> CaptureError:
    what = "the step is not the same twice: called again, it does something else from here on"
    if before and now and before[0] == now[0]:
        old, new = next(_unequal(before[1:], now[1:]), (None, None))
        if isinstance(old, (bool, int, float)) and isinstance(new, (bool, int, float)):
            what += f" ({before[0]} with {old!r}, then with {new!r})"
    return CaptureError(
        f"{what}: capture would freeze what Python drew (random, numpy.random), counted or read from the clock",
        where=where,
        hint="draw with torch (torch.rand, F.dropout, torch.where over a drawn mask), or draw in train_data() and "
        "pass it in the batch",
        page="randomness",
    )


def _unequal(old: Any, new: Any) -> Any:
    """Pairs of items that differ, from the first on; a tensor is one item."""
    parts = isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new)
    if parts and not (old and old[0] in _TENSORS):
        for a, b in zip(old, new, strict=True):
            yield from _unequal(a, b)
    elif old != new:
        yield old, new
