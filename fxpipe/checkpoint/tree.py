"""Nested values with tensors, as JSON and a file of tensors; they are read back with the same bits.

    write: {"step": tensor(3.), "betas": (0.9, 0.99)}
      →    {"step": {"tensor": "0"}, "betas": {"tuple": [0.9, 0.99]}}   and the tensors {"0": tensor(3.)}

JSON has no tuples, no infinity, and only strings as keys; objects with one of the tags below represent these. A dense
tensor keeps its strides, from which operators choose the layout of their results.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import CheckpointError
from fxpipe.plan.packing import is_dense
from fxpipe.task.wrapped_tensors import wraps

Read = Callable[[str], Tensor]
"""Returns the tensor of a key, contiguous, in its own memory."""

SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
MAPPINGS: dict[str, type] = {"pairs": dict, "counter": Counter, "ordered": OrderedDict}
DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
TAGS = {*SEQUENCES, *MAPPINGS, "tensor", "wrapper", "number", "complex", "dtype", "device"}


class Unwritable(ValueError):
    """A value that cannot be written as JSON; names the value and its place in the tree."""


def said(error: Exception) -> str:
    """The text of an error of writing, with its type if it is unexpected."""
    text = getattr(error, "strerror", None) or str(error)
    return text if isinstance(error, (OSError, Unwritable, CheckpointError)) else f"{type(error).__name__}: {text}"


class Encoder:
    """Makes JSON of values, and collects their tensors.

    Attributes:
        tensors: by key, the place in the tree; not copied. A tensor that occurs twice is there once.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._keys: dict[int, str] = {}
        self._seen: list[Tensor] = []  # kept, so that no other tensor gets the same id

    def __call__(self, value: Any, place: str = "") -> Any:
        """The JSON of a value.

        Raises:
            Unwritable: it has something other than numbers, texts, containers and tensors.
        """
        if value is None or type(value) in (bool, int, str):
            return value
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"number": repr(float(value))}
        if isinstance(value, Tensor):
            return self._wrapper(value, place) if wraps(value) else self._tensor(value, place)
        if type(value) in (list, torch.Size):
            return [self(each, f"{place}[{i}]") for i, each in enumerate(value)]
        if isinstance(value, Mapping):
            return self._mapping(value, place)
        tag = next((tag for tag, kind in SEQUENCES.items() if type(value) is kind), None)
        if tag is None:
            return self._scalar(value, place)
        items = sorted(value, key=repr) if tag in ("set", "frozenset") else list(value)
        return {tag: [self(each, f"{place}[{i}]") for i, each in enumerate(items)]}

    def _mapping(self, value: Mapping[Any, Any], place: str) -> Any:
        kind = type(value)
        if kind is dict and all(type(key) is str for key in value) and not TAGS & set(value):
            return {key: self(each, f"{place}.{key}" if place else key) for key, each in value.items()}
        tag = next((tag for tag, of_tag in MAPPINGS.items() if of_tag is kind), None)
        if tag is None:
            raise Unwritable(f"{place or 'it'} is a {kind.__name__}")
        return {tag: [[self(key, place), self(each, f"{place}[{key!r}]")] for key, each in value.items()]}

    def _tensor(self, value: Tensor, place: str) -> dict[str, Any]:
        key = self._keys.get(id(value))
        if key is None:
            key = place or "value"
            while key in self.tensors:
                key += "'"
            self._keys[id(value)] = key
            self._seen.append(value)
            self.tensors[key] = value.detach()
        body: dict[str, Any] = {"tensor": key}
        if not value.is_contiguous() and is_dense(tuple(value.shape), value.stride()):
            body["stride"] = list(value.stride())
        return body

    def _wrapper(self, value: Any, place: str) -> dict[str, Any]:
        names, context = value.__tensor_flatten__()
        body = {
            "class": f"{type(value).__module__}.{type(value).__qualname__}",
            "context": self(context, f"{place} (a {type(value).__name__})"),
            "shape": list(value.shape),
            "stride": list(value.stride()),
            "tensors": {name: self(getattr(value, name), f"{place}.{name}") for name in names},
        }
        return {"wrapper": body}

    def _scalar(self, value: Any, place: str) -> Any:
        if isinstance(value, complex):
            return {"complex": repr(complex(value))}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:  # a number
            return self(value.item(), place)
        raise Unwritable(f"{place or 'it'} is a {type(value).__name__}")


class Decoder:
    """Makes values from the JSON that an `Encoder` wrote."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._tensors: dict[str, Tensor] = {}

    def __call__(self, body: Any) -> Any:
        """The value.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: it was not written by an `Encoder`.
        """
        if isinstance(body, list):
            return [self(each) for each in body]
        if not isinstance(body, dict):
            return body
        tag = next(iter(body), "")
        if tag not in TAGS:
            return {key: self(each) for key, each in body.items()}
        if body.keys() - {tag, "stride"} or ("stride" in body and tag != "tensor"):
            raise ValueError(f"more than {tag!r} in {str(body)[:40]}")
        held = body[tag]
        if tag == "tensor":
            return self._tensor(held, body.get("stride"))
        if tag == "wrapper":
            return self._wrapper(held)
        if tag in SEQUENCES:
            return SEQUENCES[tag](self(each) for each in held)
        if tag in MAPPINGS:
            return MAPPINGS[tag]({self(key): self(each) for key, each in held})
        if tag == "number":
            return float(held)
        if tag == "complex":
            return complex(held)
        if tag == "device":
            return torch.device(held)
        if held not in DTYPES:
            raise ValueError(f"{held!r} is not a dtype")
        return DTYPES[held]

    def _wrapper(self, body: dict[str, Any]) -> Tensor:
        """Make a wrapper of a class that is already imported: a checkpoint imports nothing, a lazy package neither."""
        module, _, name = body["class"].rpartition(".")
        kind = vars(sys.modules[module]).get(name) if module in sys.modules else None
        if not (isinstance(kind, type) and issubclass(kind, Tensor) and hasattr(kind, "__tensor_unflatten__")):
            raise ValueError(f"{body['class']!r} is no class of tensors that is imported")
        inner = {name: self(each) for name, each in body["tensors"].items()}
        shape, stride = torch.Size(body["shape"]), tuple(body["stride"])
        wrapper: Tensor = kind.__tensor_unflatten__(inner, self(body["context"]), shape, stride)
        return wrapper

    def _tensor(self, key: str, stride: list[int] | None) -> Tensor:
        if key not in self._tensors:
            value = self._read(key)
            if stride is not None:
                laid_out = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device)
                value = laid_out.copy_(value)
            self._tensors[key] = value
        return self._tensors[key]
