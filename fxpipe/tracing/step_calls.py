"""Compares the torch calls of a step between its runs, because a graph repeats one run.

A call is compared with its numbers, the identity of its tensors, and the values of constants. This is done twice:

- Tracing calls the step at least twice, from the same Python state: to learn about its outputs, then to record it. All
  calls must be the same: capture would freeze what Python draws, counts or reads from a clock. Only the first run may
  differ: it may have filled a cache.
- `lasting_state` runs it on fake tensors, keeping its state as in eager training; and then with counters far ahead.
  Only calls that the results depend on are compared: logging may differ. A tensor that was made without the step's
  arguments, such as a table of positions, is identified by how it was made, so it does not matter which run put it into
  a cache. One that an earlier run computed from the step's arguments is state of the step.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fxpipe.errors import CaptureError
from fxpipe.torch_private import (
    FakeTensor,
    FakeTensorMode,
    FunctionalTensor,
    is_functional_tensor,
    is_functorch_wrapped_tensor,
)
from fxpipe.user_lines import is_within_users

Place = tuple[str, int]
Call = tuple[str, Any, Any]
"""The name of a torch function, and tokens for its arguments."""

_MARK = "_fxpipe_made"
"""An attribute of a tensor: the run of the step that made it, and its token."""

_PLAIN = (torch.Tensor, nn.Parameter)
_TRACED = (FakeTensor, FunctionalTensor)
_READ = 1 << 14
"""Bytes of a constant that are compared."""

_RUNS = itertools.count(1)
_RANDOM = re.compile(r"rand|normal|bernoulli|uniform|dropout|exponential|multinomial|poisson|cauchy|geometric")
_IN_PLACE = re.compile(r"[a-z0-9]_$|__i[a-z]+__$|__setitem__$")


class _Token(NamedTuple):
    """The token of a tensor that a call of this run has made."""

    call: int
    part: int


class Departure(NamedTuple):
    """Where a run computes something else than the first: the line, and both calls; None if a run makes no more."""

    place: Place
    before: Call | None = None
    now: Call | None = None
    stale: tuple[torch.Tensor, ...] = ()  # the tensors of earlier runs that it reads, if they are the cause


class StepCalls:
    """The torch calls of each run of a step.

    They are compared: `every` one, or only those that the results depend on, and those of the backward: hooks and
    functions of the user's.
    """

    def __init__(self, *, every: bool) -> None:
        self.runs = 0
        self.departs: Departure | None = None  # how the last run departs from the first
        # By id, tensors that require a gradient and that the step neither was given nor made, with the line.
        self.outside: dict[int, tuple[torch.Tensor, str | None]] = {}
        self.hooks = False  # whether a run has asked for gradients of tensors, for its hooks or to keep them
        self._every = every
        self._run = 0
        self._expected: list[tuple[Place, Call]] = []
        self._calls: list[tuple[Place, Call]] = []  # of this run
        self._known: dict[int, int] = {}
        self._stale: dict[int, list[torch.Tensor]] = {}  # by call, what it reads of earlier runs
        self._backward = sys.maxsize  # the first call of the backward
        self._settled = False
        # Of the current call: whether it depends on the step's arguments, what it reads from elsewhere and of earlier
        # runs, and what it changes in place.
        self._reads = False
        self._outside: list[torch.Tensor] = []
        self._reading: list[torch.Tensor] = []
        self._changed: Any = None

    def know_constants(self, mode: FakeTensorMode) -> None:
        """From now on, identify what the mode makes of a tensor with values by them: no call has those of
        `torch.from_numpy(array)`."""
        converter: Any = mode.fake_tensor_converter
        convert = converter.from_real_tensor

        def marked(mode: FakeTensorMode, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> FakeTensor:
            fake: FakeTensor = convert(mode, tensor, *args, **kwargs)
            setattr(fake, _MARK, (0, ("constant", checksum(tensor))))
            return fake

        converter.from_real_tensor = marked

    def begin(self, arguments: Sequence[torch.Tensor]) -> None:
        """The step is being called, with tensors that are the same at every call."""
        self.runs += 1
        self._run = next(_RUNS)
        self._calls, self._stale, self._backward, self.departs = [], {}, sys.maxsize, None
        self._known = {id(tensor): i for i, tensor in enumerate(arguments)}

    def call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], where: Callable[[], str | None]) -> Call:
        """The token of a torch call that is about to be made; refused if it reads a tensor of an earlier trace."""
        self._reads, self._outside, self._reading = False, [], []
        self._changed = args[0] if args and _IN_PLACE.search(name) else None
        self.hooks |= name in ("register_hook", "retain_grad")
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

    def made(self, call: Call, result: Any, place: Place, where: Callable[[], str | None]) -> None:
        """A torch call has returned `result`; `where` returns its line, and the user's line that led to it."""
        if self._backward <= len(self._calls) and not is_within_users(sys._getframe(1)):
            return  # torch predicts what its own kernels return
        for tensor in self._outside:
            self.outside.setdefault(id(tensor), (tensor, where()))
        results = list(_traced(result))
        if isinstance(self._changed, _TRACED) and not any(part is self._changed for part in results):
            results.append(self._changed)
        if not results and self._changed is None and call[0] != "lift_fresh.default":
            return  # a size, a flag: its effect shows in later calls
        if not self._every:
            call = (*call[:2], (call[2], torch.is_grad_enabled()))
        number, run = len(self._calls), self._run
        constant = not (self._every or self._reads or _RANDOM.search(call[0]))
        for part, tensor in enumerate(results):
            setattr(tensor, _MARK, (run, ("constant", hash((call, part))) if constant else _Token(number, part)))
        if constant:
            return
        self._calls.append((place, call))
        if self._reading:
            self._stale[number] = self._reading
        if isinstance(result, torch.Tensor) and result.layout != torch.strided and result.requires_grad:
            raise CaptureError(
                "the step makes a sparse tensor on the way to a gradient, which would be lost",
                where=where(),
                hint="use dense tensors where a gradient is needed",
                page="tensor-kinds",
            )

    def backward(self) -> None:
        """The forward is over: from now on autograd calls what the user has written, and all of it counts."""
        self._backward = len(self._calls)

    def returned(self, results: Sequence[Any], gradients: Sequence[torch.Tensor | None] = ()) -> None:
        """The run is over; compare the calls that decide its results with the first run's."""
        place = self._calls[-1][0] if self._calls else ("", 0)
        self._calls.append((place, ("gradients", tuple(g is None for g in gradients), None)))
        calls, numbers = self._deciding(results)
        stale = next((n for n in numbers if n in self._stale), None)
        if stale is not None:
            self.departs = Departure(self._calls[stale][0], stale=tuple(self._stale[stale]))
        else:
            self._compare(calls)

    def repeat(self, where: Callable[[Place], str | None], *, failed: bool = False) -> None:
        """The run is over, perhaps by an error; refuse calls that differ from the first run's."""
        if not self._every:
            return  # `returned` says it
        self._compare(self._calls, failed)
        if self.departs is not None:
            raise _differs(where(self.departs.place), self.departs.before, self.departs.now)

    def settle(self) -> bool:
        """Whether to trace once more, because only the first call may have differed: it filled a cache.

        From now on the step must repeat its last call.
        """
        if not self._every or self.departs is None or self._settled:
            return False
        self._settled, self._expected = True, self._calls
        return True

    def _compare(self, calls: list[tuple[Place, Call]], partly: bool = False) -> None:
        if self.runs == 1:
            self._expected = calls
            return
        expected = self._expected[: len(calls)] if partly else self._expected
        for i, (old, new) in enumerate(itertools.zip_longest(expected, calls)):
            if old and new and old[1] == new[1]:
                continue
            left_out = new is None or (
                old is not None and old[0] != new[0] and any(place == new[0] for place, _ in expected[i + 1 :])
            )
            self.departs = Departure((old if left_out else new)[0], old and old[1], new and new[1])
            return

    def _token(self, value: Any) -> Any:
        """The token of an argument: equal if and only if the call would be the same."""
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if isinstance(value, float):
            return value if value == value else "nan"
        if value is None or isinstance(value, (bool, int, str, complex, torch.dtype, torch.device, torch.layout)):
            return value
        if isinstance(value, (tuple, list)):
            return tuple(map(self._token, value))
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
        run, token = getattr(tensor, _MARK, (None, None))
        if run not in (None, self._run) and isinstance(tensor, FunctionalTensor):
            raise _Stale
        if token is not None and token[0] == "constant":
            return token
        if token is not None or isinstance(tensor, _TRACED):
            self._reads = True
            if run == self._run:
                return token
            if run is None:
                return ("unknown", tensor.dtype)
            self._reading.append(tensor)
            return ("earlier", tensor.dtype)
        if is_outside(tensor):
            self._outside.append(tensor)
        return ("constant", checksum(tensor)) if _is_readable(tensor) else ("tensor", tensor.dtype)

    def _deciding(self, results: Sequence[Any]) -> tuple[list[tuple[Place, Call]], list[int]]:
        """The calls that results and changes in place depend on, renumbered, and their former numbers."""
        roots = [self._of_tensor(result) for result in results if isinstance(result, torch.Tensor)]
        needed = {token.call for root in roots for token in _tokens(root)}
        every = any(root[0] == "unknown" for root in roots)
        numbers = []
        for number in reversed(range(len(self._calls))):
            name, *tokens = self._calls[number][1]
            if not (every or number in needed or number >= self._backward or _IN_PLACE.search(name)):
                continue
            numbers.append(number)
            needed |= {token.call for token in _tokens(tokens)}
            # Of a property such as x.T: whatever came before may count. In the backward, it is what autograd has made.
            every |= number < self._backward and _is_unknown(tokens)
        numbers.reverse()
        order = {number: i for i, number in enumerate(numbers)}
        renumbered: list[tuple[Place, Call]] = []
        for number in numbers:
            place, (name, args, kwargs) = self._calls[number]
            renumbered.append((place, (name, _renumbered(args, order), _renumbered(kwargs, order))))
        return renumbered, numbers


class _Stale(Exception):
    """A tensor of an earlier call of the step."""


def is_outside(tensor: torch.Tensor) -> bool:
    """Whether a tensor that the step was not given, and did not make, requires a gradient."""
    return tensor.requires_grad and not isinstance(tensor, _TRACED) and not is_functorch_wrapped_tensor(tensor)


def checksum(tensor: torch.Tensor) -> str:
    """A checksum of a tensor's first bytes, read from memory, so that no torch mode sees it."""
    held = int(tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size())
    return hex(zlib.crc32(ctypes.string_at(tensor.data_ptr(), min(held, _READ))))


def _is_readable(tensor: torch.Tensor) -> bool:
    """Whether a tensor consists of plain values in this process's memory."""
    return (
        type(tensor) in _PLAIN
        and not is_functional_tensor(tensor)
        and not is_functorch_wrapped_tensor(tensor)
        and not tensor.is_nested
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and tensor.data_ptr() != 0
    )


def _traced(result: Any) -> Iterator[torch.Tensor]:
    """The tensors of a result that the step computes with."""
    if isinstance(result, _TRACED):
        yield result
    elif _is_list(result):
        for part in result:
            yield from _traced(part)


def _of_numpy(value: Any) -> Any:
    if getattr(value, "ndim", 0) == 0 and hasattr(value, "item"):
        number = value.item()
        return number if number == number else "nan"
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


def _unequal(old: Any, new: Any) -> Iterator[tuple[Any, Any]]:
    """Pairs of items that differ, from the first on; a tensor is one item."""
    parts = type(old) is type(new) is tuple and len(old) == len(new)
    if parts and not (old and old[0] in ("given", "constant", "earlier", "unknown", "tensor")):
        for a, b in zip(old, new, strict=True):
            yield from _unequal(a, b)
    elif old != new:
        yield old, new


def _is_list(value: Any) -> bool:
    return isinstance(value, (tuple, list))


def _tokens(value: Any) -> Iterator[_Token]:
    if isinstance(value, _Token):
        yield value
    elif _is_list(value):
        for member in value:
            yield from _tokens(member)


def _is_unknown(value: Any) -> bool:
    return _is_list(value) and (value[:1] == ("unknown",) or any(map(_is_unknown, value)))


def _renumbered(value: Any, order: dict[int, int]) -> Any:
    if isinstance(value, _Token):
        return _Token(order[value.call], value.part)
    return tuple(_renumbered(member, order) for member in value) if type(value) is tuple else value
