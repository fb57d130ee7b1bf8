"""Writes a safetensors file tensor by tensor: never more than one of them in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch

from fxpipe.files import replaced
from fxpipe.plan.spec import TensorSpec

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


class SafetensorsWriter:
    """A safetensors file whose tensors are known beforehand and come in that order.

        with SafetensorsWriter(path, [("weight", spec), ("bias", spec)]) as file:
            file.write(weight)
            file.write(bias)

    The file appears under its name, complete, when the block ends; after an error it does not appear.
    """

    def __init__(self, path: str | Path, tensors: Sequence[tuple[str, TensorSpec]]) -> None:
        self.path = Path(path)
        self.tensors = list(tensors)
        self._target = ExitStack()
        self._file: BinaryIO | None = None
        self._written = 0

    def __enter__(self) -> SafetensorsWriter:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as target:
            self._file = target.enter_context(replaced(self.path))
            self._file.write(header(self.tensors))
            self._target = target.pop_all()
        return self

    def write(self, tensor: torch.Tensor) -> None:
        """Append the next tensor; any device, any strides."""
        assert self._file is not None
        name, spec = self.tensors[self._written]
        assert tuple(tensor.shape) == spec.shape, f"{name} is {tuple(tensor.shape)}, not {spec.shape}"
        assert tensor.dtype == getattr(torch, spec.dtype), f"{name} is {tensor.dtype}, not {spec.dtype}"
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self._file.write(flat.numpy().data)
        self._written += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._written < len(self.tensors):
            error = AssertionError(f"{self._written} of {len(self.tensors)} tensors written")
            self._target.__exit__(AssertionError, error, None)
            raise error
        self._target.__exit__(kind, error, trace)


def header(tensors: Sequence[tuple[str, TensorSpec]]) -> bytes:
    """A safetensors header: its length in 8 bytes, then JSON padded with spaces to a multiple of 8."""
    body: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, spec in tensors:
        size = math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize
        body[name] = {
            "dtype": DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
