"""Tensors whose values a step may read while it is traced: constants of the batch, and what is made of numbers.

What a step computes from constants alone is known, too: it is computed with values as well. Numbers, lists, branches
and shapes that follow from it are fixed at capture; whoever takes a later batch checks that it has equal constants
(`fxpipe.task.batch`). Small tensors that a step makes of numbers (`torch.tensor(x.shape)`) are known until something
unknown is written into them.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch

from fxpipe.torch_private import UNKNOWN, FunctionalTensor, LightDispatchMode, disable_current_modes, held_by, memory_of

_FACTORIES = {
    torch.arange,
    torch.as_tensor,
    torch.eye,
    torch.full,
    torch.linspace,
    torch.ones,
    torch.tensor,
    torch.zeros,
}
_SHOW = {"__repr__", "__format__", "__array__", "numpy"}  # traced, they would show a tensor without values
_SMALL = 4096  # elements of a tensor made of numbers that is followed

Traced = Callable[..., Any]


class _Known(NamedTuple):
    """A tensor as the step has it, and its value: the same object if it is a constant of the graph."""

    tensor: torch.Tensor
    value: torch.Tensor


class KnownValues:
    """The tensors of one call of a step that have values while it is traced."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}  # by id of the step's tensor, kept alive so that ids stay unique

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A constant with the same values, which the step may read and write."""
        constant: torch.Tensor = _computed(torch.clone, [tensor], {})
        self._keep(constant, constant)
        return constant

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], traced: Traced) -> Any:
        """What a torch call returns.

        `traced` makes the traced call with the arguments that it is given; a third argument is compared between runs of
        the step instead of these.
        """
        tensors = list(tensors_in((args, kwargs)))
        if any(id(tensor) not in self._known for tensor in tensors):
            return self._call_mixed(function, args, kwargs, traced)
        if not tensors and function not in _FACTORIES:
            return traced(args, kwargs)
        result: Any
        if any(map(self._is_constant, tensors)):
            value = self._computed(function, args, kwargs)
            if next(tensors_in(value), None) is None:  # a number, a shape; or t[0] = 1
                return value if value is not None or self._is_constant(tensors[0]) else traced(args, kwargs)
            result = value
            wrote = any(tensor is value for tensor in tensors)  # into a constant, which `_computed` has done
            if not all(map(self._is_constant, tensors)) and not wrote:
                with contextlib.suppress(*UNKNOWN):
                    result = _listed(traced(args, kwargs))
            self._keep(result, value)
        else:
            result = self._call_numbers(function, args, kwargs, traced)
        return iter(result) if function is torch.Tensor.__iter__ else result

    @contextlib.contextmanager
    def lists(self) -> Iterator[None]:
        """Inside, `.tolist()` of a traced tensor is looked up here: torch makes it without a call that modes see."""
        original = FunctionalTensor.tolist
        constants = self._known

        def tolist(tensor: FunctionalTensor) -> Any:
            if id(tensor) in constants:
                return _computed(torch.Tensor.tolist, [constants[id(tensor)].value], {})
            return original(tensor)

        with mock.patch.object(FunctionalTensor, "tolist", tolist):
            yield

    def _call_numbers(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], traced: Traced
    ) -> Any:
        """A call on what is made of numbers: traced as if nothing were known, and computed as well if it is small."""
        name = getattr(function, "__name__", "")
        if name not in _SHOW:
            try:
                result = _listed(traced(args, kwargs))
                if all(tensor.numel() <= _SMALL for tensor in tensors_in(result)):
                    with contextlib.suppress(Exception):  # it draws random numbers, say: nothing of it is known
                        self._keep(result, self._computed(function, args, kwargs))
                        return result
                for tensor in tensors_in((args, kwargs)):
                    self._forget(tensor)  # it may be what the call has written into
                return result
            except UNKNOWN:
                if _writes(name):
                    raise
        value = self._computed(function, args, kwargs)
        self._keep(value, value)
        return value

    def _call_mixed(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], traced: Traced
    ) -> Any:
        name = getattr(function, "__name__", "")
        written = [kwargs["out"]] if "out" in kwargs else []
        if _writes(name):
            written += list(tensors_in((args, kwargs)))[:1]
        for tensor in tensors_in(written):
            self._forget(tensor)
        numbers = self._numbers(args), self._numbers(kwargs)
        before = [(tensor, _held(tensor)) for tensor in tensors_in((args, kwargs)) if id(tensor) in self._known]
        try:
            result = traced(args, kwargs, numbers)
            for tensor, held in before:
                if _held(tensor) is not held:  # written by a call whose name does not say so, such as batch_norm
                    self._forget(tensor)
            return result
        except UNKNOWN:
            if len(list(tensors_in(numbers))) == len(list(tensors_in((args, kwargs)))):
                raise
        return traced(*numbers)  # a size, an index

    def _keep(self, result: Any, value: Any) -> None:
        for tensor, constant in zip(tensors_in(result), tensors_in(value), strict=True):
            self._known[id(tensor)] = _Known(tensor, constant)

    def _forget(self, tensor: torch.Tensor) -> None:
        """Forget the values of a tensor that something unknown is written into, and of those that share its memory."""
        if id(tensor) not in self._known:
            return
        memory = memory_of(self._known[id(tensor)].value)
        shared = [i for i, constant in self._known.items() if memory_of(constant.value) == memory]
        for i in shared:
            del self._known[i]

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        return self._known[id(tensor)].value is tensor

    def _computed(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a call returns for the values of its tensors, which are all known."""

        def values(arguments: Any) -> Any:
            return mapped(arguments, lambda tensor: self._known[id(tensor)].value)

        return _computed(function, values(args), values(kwargs))

    def _numbers(self, value: Any) -> Any:
        """With numbers in place of known tensors of no dimension."""

        def number(tensor: torch.Tensor) -> Any:
            constant = self._known.get(id(tensor))
            if constant is None or constant.value.dim():
                return tensor
            return _computed(torch.Tensor.item, [constant.value], {})

        return mapped(value, number)


def _writes(name: str) -> bool:
    """Whether a torch function of this name writes into its first tensor."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _held(tensor: torch.Tensor) -> torch.Tensor:
    """What a traced tensor holds now: another object after a write."""
    return held_by(tensor) if isinstance(tensor, FunctionalTensor) else tensor


class _NoDraws(LightDispatchMode):
    """Inside, what draws random numbers is an error: no value of it is known."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotImplementedError(func)
        return func(*args, **(kwargs or {}))


def _computed(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with disable_current_modes(), torch.no_grad(), _NoDraws():
        return _listed(function(*args, **kwargs))


def _listed(result: Any) -> Any:
    """A loop over a tensor as a list."""
    return list(result) if isinstance(result, Iterator) else result


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in the arguments of a torch call."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for member in value:
            yield from tensors_in(member)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, slice):
        yield from tensors_in([value.start, value.stop, value.step])


def mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Arguments of a torch call with each tensor changed; a list in which nothing changes stays the same object."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        members = [mapped(member, change) for member in value]
        return value if all(map(operator.is_, members, value)) else type(value)(members)
    if isinstance(value, dict):
        return {key: mapped(member, change) for key, member in value.items()}
    if isinstance(value, slice):
        return slice(*(mapped(part, change) for part in (value.start, value.stop, value.step)))
    return value
