"""What the user's code hangs on parameters, attributes and a class of its own, as text: so every worker's have it.

    self.bias._no_weight_decay = True               # in model(): optimizer(named_parameters) groups by it
    class Scaled(nn.Parameter): ...                 # or by this

Plain values are written as Python writes them, all others pickled. What cannot be either is replaced by a value that
refuses to be used.
"""

from __future__ import annotations

import ast
import base64
import io
import math
import operator
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import cloudpickle
from torch import Tensor, nn

from fxpipe.errors import BuildError, first_line
from fxpipe.task.one_optimizer import OptimizerRefused
from fxpipe.torch_private import memory_of, pytree

CLASS = "class"
"""Stands for the parameter's class; no attribute has this name."""

MOST_BYTES = 1 << 20
"""The most that an attribute may take, as a plan is text that every process reads."""

_PICKLED, _ABSENT = "pickled ", "absent: "


def attributes_of(model: nn.Module) -> dict[str, dict[str, str]]:
    """What hangs on the parameters of a model that require gradients; those without anything are left out."""
    held = {memory for tensor in (*model.parameters(), *model.buffers()) if (memory := _memory(tensor)) is not None}
    attributes = {}
    for name, parameter in model.named_parameters():
        kind = type(parameter)
        if parameter.requires_grad and issubclass(kind, nn.Parameter):
            values = {**vars(parameter), **({} if kind is nn.Parameter else {CLASS: kind})}
            attributes[name] = {key: _text(value, held) for key, value in values.items()}
    return {name: values for name, values in attributes.items() if values}


def hang(parameter: nn.Parameter, name: str, attributes: Mapping[str, str]) -> nn.Parameter:
    """Give a parameter what `attributes_of` has found on the one with this name; returns it."""
    for key, text in attributes.items():
        try:
            value = _value(text)
            if key == CLASS:
                parameter.__class__ = value
        except Exception as error:  # as its classes are missing here
            why = first_line(error)
            if key == CLASS:
                raise BuildError(
                    f"the class of parameter {name} cannot be given to it: {why}",
                    hint="define it, without __slots__, at the top of the model file or of one that it imports",
                ) from error
            value = Absent(name, key, why)
        if key != CLASS:
            vars(parameter)[key] = value
    return parameter


class Absent:
    """In place of an attribute that no worker has: every use is refused."""

    def __init__(self, name: str, key: str, why: str) -> None:
        vars(self).update(what=f"optimizer() reads {key} of parameter {name}, which does not reach workers: {why}")

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise OptimizerRefused(
            vars(self)["what"],
            hint="let the attribute be plain Python, or keep the value in a module, and take it from the second "
            "argument of optimizer(named_parameters, model)",
        )

    __class__ = property(_refuse)
    __getattr__ = __setattr__ = __call__ = __bool__ = __len__ = __iter__ = __getitem__ = __contains__ = _refuse
    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __float__ = __int__ = __index__ = __neg__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = _refuse
    __hash__ = _refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return next(one for one in pytree.tree_leaves((args, kwargs)) if is_absent(one))._refuse()


def is_absent(value: Any) -> bool:
    """Whether it is what replaces an attribute."""
    return type(value) is Absent


def _text(value: Any, held: set[int]) -> str:
    if _is_plain(value):
        return repr(value)
    try:
        pickled = _PICKLED + _pickle(value, held)
    except Exception as error:  # an object that cannot be pickled may raise anything
        return f"{_ABSENT}{first_line(error)}"
    return f"{pickled} {value.__module__}:{value.__qualname__}" if isinstance(value, type) else pickled


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    if isinstance(value, dict):
        return type(value) is dict and all(_is_plain(part) for pair in value.items() for part in pair)
    return type(value) in (type(None), bool, int, str, bytes) or (type(value) is float and math.isfinite(value))


def _pickle(value: Any, held: set[int]) -> str:
    file = io.BytesIO()
    _Pickler(file, held).dump(value)
    if file.tell() > MOST_BYTES:
        raise ValueError(f"it takes {file.tell():,} bytes, and at most {MOST_BYTES:,} are kept")
    return base64.b64encode(file.getvalue()).decode()


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, held: set[int]) -> None:
        super().__init__(file)
        self._held = held

    def persistent_id(self, value: Any) -> None:
        if isinstance(value, nn.Module):
            raise ValueError("it holds a module")
        if isinstance(value, Tensor) and (value.is_meta or _memory(value) in (None, *self._held)):
            raise ValueError("it holds a tensor of the model, or one without values")


def _memory(tensor: Tensor) -> int | None:
    with suppress(Exception):  # one that wraps others has no memory
        return memory_of(tensor)
    return None


def _value(text: str) -> Any:
    """What a text stands for; a class is looked for under its name first: hooks may mean a script's own."""
    if text.startswith(_ABSENT):
        raise ValueError(text.removeprefix(_ABSENT))
    if not text.startswith(_PICKLED):
        return ast.literal_eval(text)
    _, pickled, *place = text.split(" ")
    if place:
        module, _, path = place[0].partition(":")
        with suppress(AttributeError):
            return operator.attrgetter(path)(sys.modules.get(module))
    return cloudpickle.loads(base64.b64decode(pickled))
