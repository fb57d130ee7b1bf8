"""Nested values with tensors in them, as JSON beside a file of tensors; what comes back is the same, to the bit.

    write: {"step": tensor(3.), "betas": (0.9, 0.99)}
      →    {"step": {"tensor": "0"}, "betas": {"tuple": [0.9, 0.99]}}   and the tensors {"0": tensor(3.)}

JSON has no tuples, no keys but strings, and no infinity; objects with one of the tags below stand for these. A tensor
keeps its strides where they are dense: operators choose the layout of their results by them.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fxpipe.plan.packing import is_dense

Read = Callable[[str], Tensor]
"""The tensor of a key, contiguous, in memory of its own."""

SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
MAPPINGS: dict[str, type] = {"pairs": dict, "counter": Counter, "ordered": OrderedDict}
TAGS = {*SEQUENCES, *MAPPINGS, "tensor", "number", "complex", "dtype", "device"}


class Unwritable(ValueError):
    """A value that has no form in JSON; says which, and where in the tree it is."""


def said(error: Exception) -> str:
    """What an error of writing says; with its kind, where that is unforeseen."""
    text = getattr(error, "strerror", None) or str(error)
    return text if isinstance(error, (OSError, Unwritable)) else f"{type(error).__name__}: {text}"


class Encoder:
    """Makes JSON of values, and collects their tensors.

    Attributes:
        tensors: by key, the place in the tree; as they are, without a copy. One that occurs twice is there once.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._keys: dict[int, str] = {}
        self._seen: list[Tensor] = []  # kept, so that no other tensor gets the same id

    def __call__(self, value: Any, place: str = "") -> Any:
        """The JSON of a value.

        Raises:
            Unwritable: it holds something else than numbers, texts, containers and tensors.
        """
        if value is None or type(value) in (bool, int, str):
            return value
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"number": repr(float(value))}
        if isinstance(value, Tensor):
            return self._tensor(value, place)
        if type(value) is list:
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
    """Makes values of the JSON that an `Encoder` wrote."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._tensors: dict[str, Tensor] = {}

    def __call__(self, body: Any) -> Any:
        """The value.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: an `Encoder` wrote no such thing.
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
        if tag in SEQUENCES:
            return SEQUENCES[tag](self(each) for each in held)
        if tag in MAPPINGS:
            return MAPPINGS[tag]({self(key): self(each) for key, each in held})
        if tag == "number":
            return float(held)
        if tag == "complex":
            return complex(held)
        return getattr(torch, held) if tag == "dtype" else torch.device(held)

    def _tensor(self, key: str, stride: list[int] | None) -> Tensor:
        if key not in self._tensors:
            value = self._read(key)
            if stride is not None:
                laid_out = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device)
                value = laid_out.copy_(value)
            self._tensors[key] = value
        return self._tensors[key]
