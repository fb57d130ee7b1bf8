"""Which torch calls decide what a step returns, compared between runs in which its Python state goes on.

Unlike `Repeats`, which asks whether two calls of a step are the same from the same state, this lets state pass from run
to run, as it does in eager training. Only calls that the results depend on are compared, so that logging may do as it
likes. A tensor that was made without the step's arguments, such as a table of positions, goes by how it was made: a
cache of it is no difference, no matter which run filled it. One that an earlier run computed from the step's arguments
is state of the step.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fxpipe.tracing.repeatability import Call, Place, Repeats, checksum
from fxpipe.tracing.user_lines import is_within_users

_MARK = "_fxpipe_effect"
_RANDOM = re.compile(r"rand|normal|bernoulli|uniform|dropout|exponential|multinomial|poisson|cauchy|geometric")
_IN_PLACE = re.compile(r"[a-z0-9]_$|__i[a-z]+__$|__setitem__$")


class _Made(NamedTuple):
    """The token of a tensor that a call of this run has computed from the step's arguments."""

    call: int
    part: int


class Departure(NamedTuple):
    """Where a later run computes its results in another way than the first.

    Attributes:
        place: the line.
        stale: the tensors of earlier runs that it reads, if it is for them.
    """

    place: Place
    stale: tuple[torch.Tensor, ...] = ()


class Effects(Repeats):
    """The calls of each run that its results depend on, and those of its backward: hooks, and functions of the user's.

    Attributes:
        departs: how the last run departs from the first; None if it does not.
        hooks: whether a run has asked for gradients of tensors, for its hooks or to keep them.
    """

    long = sys.maxsize

    def __init__(self) -> None:
        super().__init__()
        self.departs: Departure | None = None
        self.hooks = False
        self._expected: list[tuple[Place, Call]] = []
        self._stale: dict[int, list[torch.Tensor]] = {}  # by call, what it reads of earlier runs
        self._reading: list[torch.Tensor] = []
        self._changed: Any = None  # what the current call changes in place
        self._backward = sys.maxsize  # the first call of the backward

    def know_constants(self, mode: FakeTensorMode) -> None:
        """From now on, what the mode makes of a tensor with values goes by them: no call tells those of
        `torch.from_numpy(array)`."""
        converter: Any = mode.fake_tensor_converter
        convert = converter.from_real_tensor

        def marked(mode: FakeTensorMode, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> FakeTensor:
            made: FakeTensor = convert(mode, tensor, *args, **kwargs)
            setattr(made, _MARK, ("constant", checksum(tensor)))
            return made

        converter.from_real_tensor = marked

    def begin(self, given: Sequence[torch.Tensor]) -> None:
        super().begin(given)
        self._stale = {}
        self._backward = sys.maxsize
        self.departs = None

    def call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], where: Callable[[], str | None]) -> Call:
        self._reading = []
        self.hooks |= name in ("register_hook", "retain_grad")
        self._changed = args[0] if args and _IN_PLACE.search(name) else None
        return super().call(name, args, kwargs, where)

    def made(
        self,
        call: Call,
        result: Any,
        place: Place,
        where: Callable[[], str | None],
        lines: Callable[[Place], str | None],
    ) -> None:
        if self._backward <= len(self._calls) and not is_within_users(sys._getframe(1)):
            return  # how torch foretells what its own kernels return
        call = (*call[:2], (call[2], torch.is_grad_enabled()))
        results = [result] if isinstance(result, torch.Tensor) else list(result) if _is_list(result) else []
        results = [part for part in results if isinstance(part, FakeTensor)]
        if isinstance(self._changed, FakeTensor) and not any(part is self._changed for part in results):
            results.append(self._changed)
        if not results and self._changed is None:
            return
        if not self._reads and not _RANDOM.search(call[0]):
            for part, tensor in enumerate(results):
                setattr(tensor, _MARK, ("constant", hash((call, part))))
            return
        number = len(self._calls)
        self._calls.append((place, call))
        self._fed.add(number)
        if self._reading:
            self._stale[number] = self._reading
        for part, tensor in enumerate(results):
            setattr(tensor, _MARK, (self._run, _Made(number, part)))

    def backward(self) -> None:
        """The forward is over: from now on autograd calls what the user has written, and all of it counts."""
        self._backward = len(self._calls)

    def returned(self, results: Sequence[Any], gradients: Sequence[torch.Tensor | None] = ()) -> None:
        """The run is over; compare it with the first.

        Args:
            gradients: None for a parameter without one.
        """
        place = self._calls[-1][0] if self._calls else ("", 0)
        self._calls.append((place, ("gradients", tuple(g is None for g in gradients), None)))
        calls, numbers = self._deciding(results)
        stale = next((n for n in numbers if n in self._stale), None)
        if stale is not None:
            self.departs = Departure(self._calls[stale][0], tuple(self._stale[stale]))
        elif self.runs == 1:
            self._expected = calls
        else:
            for i, (place, call) in enumerate(calls):
                if i >= len(self._expected) or self._expected[i][1] != call:
                    self.departs = Departure(place)
                    return
            if len(calls) < len(self._expected):
                self.departs = Departure(self._expected[len(calls)][0])

    def end(self, where: Callable[[Place], str | None]) -> None:
        """`returned` has said it all."""

    def _of_tensor(self, tensor: torch.Tensor) -> Any:
        if id(tensor) in self._known or not isinstance(tensor, FakeTensor):
            return super()._of_tensor(tensor)
        run, token = getattr(tensor, _MARK, (None, None))
        if run == "constant":
            return ("constant", token)
        self._reads = True
        if run == self._run:
            return token
        if run is None:
            return ("unknown", tensor.dtype)
        self._reading.append(tensor)
        return ("earlier", tensor.dtype)

    def _deciding(self, results: Sequence[Any]) -> tuple[list[tuple[Place, Call]], list[int]]:
        """The calls that results and changes in place depend on, numbered anew, and their former numbers."""
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


def _is_list(value: Any) -> bool:
    return isinstance(value, (tuple, list))


def _tokens(value: Any) -> Iterator[_Made]:
    if isinstance(value, _Made):
        yield value
    elif _is_list(value):
        for member in value:
            yield from _tokens(member)


def _is_unknown(value: Any) -> bool:
    return _is_list(value) and (value[:1] == ("unknown",) or any(map(_is_unknown, value)))


def _renumbered(value: Any, order: dict[int, int]) -> Any:
    if isinstance(value, _Made):
        return _Made(order[value.call], value.part)
    return tuple(_renumbered(member, order) for member in value) if type(value) is tuple else value
