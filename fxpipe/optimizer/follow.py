"""Follows values through the step of an optimizer: whose they are, and where they leave torch.

What an optimizer does with tensors is seen operator by operator. A number that it reads (`item()`, `if tensor`) is out
of sight from then on: Python may compare it, or add it to others. So a step can be played with other numbers read, for
one worker's values alone: what changes for another worker then depends on them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxpipe.optimizer.equal_draws import EqualDraws
from fxpipe.optimizer.mixing import spread, tensors
from fxpipe.optimizer.number_of import NumberOf
from fxpipe.optimizer.whose import Whose, Workers, several

aten = torch.ops.aten

_READS = {aten._local_scalar_dense.default, aten.equal.default, aten.allclose.default}
"""Operators that give Python a number."""

_TORCH, _HERE = str(Path(torch.__file__).parent), str(Path(__file__).parent)

Number = Any
"""A bool, int, float or complex."""


@dataclass(frozen=True)
class OtherNumbers:
    """What numbers are read instead of those that are.

    Args:
        of: numbers that are made of values of these workers, perhaps among others.
        changes: by step, what makes the other number; none is made in other steps.
        line: only there; None for everywhere.
    """

    of: Workers
    changes: Mapping[int, Callable[[Number], Number]]
    line: str | None = None


@dataclass
class Seen:
    """What was seen of all steps.

    Attributes:
        flowed: the parameter that came to be made of another worker's values, whose they are, and where values of
            several came together.
        read: where numbers left torch, and of whose values they were made.
        together: of these, where one number was made of several workers' values.
        kept: where values of several came together that are kept, though no parameter is made of them yet.
    """

    flowed: list[tuple[int, Workers, str]] = field(default_factory=list)
    read: dict[str, Workers] = field(default_factory=dict)
    together: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


class Follow(EqualDraws):
    """Sees every operator of an optimizer's steps; enter it, and play the steps.

    Args:
        own: the worker of each of the parameters that are played with, a bit.
        other: numbers to read instead of those that are.
        most: as for `EqualDraws`.
    """

    def __init__(
        self, device: str, own: Sequence[Workers], other: OtherNumbers | None = None, most: int | None = None
    ) -> None:
        super().__init__(device, most)
        self.seen = Seen()
        self._own = own
        self._other = other
        self._step = -1
        self._whose = Whose()
        self._numbers = _Numbers(self)

    def __enter__(self) -> Any:
        self._numbers.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._numbers.__exit__(*error)

    def begin(self, step: int, parameters: Sequence[Tensor]) -> None:
        """A step begins, or with -1 the optimizer is made: the parameters' values and gradients are their workers'."""
        self._step = step
        for parameter, worker in zip(parameters, self._own, strict=True):
            if step < 0:
                self._whose.put(parameter, worker)
            if parameter.grad is not None:
                self._whose.put(parameter.grad, worker)

    def end(self, parameters: Sequence[Tensor]) -> None:
        """The step is over."""
        for place, (parameter, worker) in enumerate(zip(parameters, self._own, strict=True)):
            workers = self._whose.of(parameter)
            if workers & ~worker and all(place != known for known, _, _ in self.seen.flowed):
                self.seen.flowed.append((place, workers, self._whose.at([parameter])))
        self._whose.forget_the_dead()

    def finish(self) -> None:
        """All steps are over."""
        self.seen.kept = self._whose.kept()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            workers = 0
            for tensor in tensors(args):
                workers |= self._whose.of(tensor)
            return self.number(func(*args, **kwargs or {}), workers)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        spread(self._whose, func, args, kwargs or {}, result, _here)
        if torch.Tag.dynamic_output_shape in func.tags:
            self.left(tensors(args))
        return result

    def number(self, value: Number, workers: Workers) -> Number:
        """The number that Python gets to see."""
        if not workers:
            return value
        here = _here()
        self.seen.read[here] = self.seen.read.get(here, 0) | workers
        if several(workers):
            self.met()
        other = self._other
        if other is None or self._step not in other.changes or not workers & other.of or other.line not in (None, here):
            return value
        return other.changes[self._step](value)

    def numbers(self, values: Any, workers: Any) -> Any:
        """The same of lists of numbers."""
        if isinstance(values, list):
            return [self.numbers(*each) for each in zip(values, workers, strict=True)]
        return self.number(values, workers)

    def told(self, value: Number, tensor: Tensor) -> Number:
        """The number of a tensor, which goes on telling whose values it is made of."""
        workers = self._whose.of(tensor)
        return NumberOf(value, workers, self.met) if type(value) is float and workers else value

    def met(self) -> None:
        """Python makes one number of several workers' values."""
        here = _here()
        if here not in self.seen.together:
            self.seen.together.append(here)

    def left(self, gone: Sequence[Tensor]) -> None:
        """Python gets to see these tensors as something that is not known here, as numpy arrays."""
        for tensor in gone:
            for workers in set(self._whose.elements(tensor).flatten().tolist()):
                self.number(0, workers)

    def listed(self, tensor: Tensor) -> Any:
        """What tolist() gives."""
        return self.numbers(tensor.tolist(), self._whose.elements(tensor).tolist())


class _Numbers(TorchFunctionMode):
    """Sees what gives Python numbers without an operator."""

    def __init__(self, follow: Follow) -> None:
        super().__init__()
        self._follow = follow

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist:
            return self._follow.listed(args[0])
        if func in (Tensor.numpy, Tensor.__array__, Tensor.__dlpack__):
            self._follow.left(args[:1])
        result = func(*args, **kwargs or {})
        return self._follow.told(result, args[0]) if func is Tensor.item else result


def _here() -> str:
    """The line of the optimizer's code that is running: the user's or a library's; torch's own if there is no other."""
    frame: FrameType | None = sys._getframe(1)
    torchs: FrameType | None = None
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_HERE) and frame.f_code.co_name == "play":
            break
        if not name.startswith((_TORCH, _HERE, "<")) and "contextlib" not in name:
            return _line(frame)
        if torchs is None and name.startswith(_TORCH) and ("optim" in name or "nn" in name):
            torchs = frame
        frame = frame.f_back
    return _line(torchs) if torchs is not None else "step()"


def _line(frame: FrameType) -> str:
    name, number = frame.f_code.co_filename, frame.f_lineno
    path = Path(name)
    shown = path.name if len(path.parts) < 3 else str(Path(*path.parts[-2:]))
    return f"{shown}:{number}, `{getline(name, number).strip()}`"


def _much(value: Number) -> Number:
    return True if isinstance(value, bool) else value + 1 if isinstance(value, int) else abs(value) * 1e15 + 1e15


def _nothing(value: Number) -> Number:
    return type(value)(0)


def _not_so(value: Number) -> Number:
    return not value if isinstance(value, bool) else math.nan if isinstance(value, float) else value - 1


CHANGES: tuple[Callable[[Number], Number], ...] = (_much, _nothing, _not_so)
"""What other numbers may be: yes, or a number that is far larger; no, or 0; the contrary, or not a number."""
