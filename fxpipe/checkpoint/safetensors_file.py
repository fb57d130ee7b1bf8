"""Safetensors files, written whole, or tensor by tensor with only one in memory and with digests inside.

The metadata of the header have a digest of every tensor and of the header. Every reader of safetensors accepts such a
file, since metadata are texts by name. A reader can check a single tensor without reading the rest of the file.

    "__metadata__": {"format": "pt", "sha256": "<of the header, with zeros in this place>", "sha256:weight": "<of the bytes>"}
"""  # noqa: E501

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fxpipe.checkpoint.manifest import OTHER, FileEntry
from fxpipe.errors import BuildError, CheckpointError
from fxpipe.files import replaced
from fxpipe.plan.spec import TensorSpec
from fxpipe.typed_json import Malformed, convert, parse

HEADER = "sha256"
OF_TENSOR = f"{HEADER}:"
"""Before the name of a tensor, the metadata's name for its digest."""

ZEROS = "0" * 64
MOST_HEADER = 100_000_000
"""Bytes, as the format has it."""
_HINT = "copy the file again from where it was written, or use another"

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes as the file has them."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def digest(tensor: Tensor) -> str:
    """The digest of a tensor's bytes as the file has them."""
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


@dataclass(frozen=True)
class TensorDigests:
    """The digests in a file."""

    path: Path
    of: Mapping[str, str]

    def check(self, name: str, tensor: Tensor) -> None:
        """Check a tensor that was read; does nothing if the file has no digests."""
        if name in self.of and digest(tensor) != self.of[name]:
            raise BuildError(
                f"{name} in {self.path.name} was changed after it was written", where=str(self.path), hint=_HINT
            )


def read_digests(path: Path) -> TensorDigests:
    """The digests in a safetensors file, after checking its header; none if another program wrote the file."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            text = file.read(size) if size <= MOST_HEADER else b""
        body = parse(text.decode(), finite=False)
        metadata = convert(body.get("__metadata__") or {}, dict[str, str]) if isinstance(body, dict) else {}
    except (OSError, UnicodeDecodeError, Malformed):
        return TensorDigests(path, {})  # opening the file will fail with a message
    of = {name.removeprefix(OF_TENSOR): value for name, value in metadata.items() if name.startswith(OF_TENSOR)}
    recorded = metadata.get(HEADER)
    if recorded is None and not of:
        return TensorDigests(path, {})
    if recorded is None or hashlib.sha256(text.replace(recorded.encode(), ZEROS.encode(), 1)).hexdigest() != recorded:
        raise BuildError(f"the header of {path.name} was changed after it was written", where=str(path), hint=_HINT)
    return TensorDigests(path, of)


class SafetensorsWriter:
    """Writes the tensors of a safetensors file, known beforehand, in their order (see `safetensors_writer`)."""

    def __init__(self, file: BinaryIO, tensors: Sequence[tuple[str, TensorSpec]]) -> None:
        self.left = deque(tensors)
        self.digests: dict[str, str] = {}
        self.file = file

    def write(self, tensor: Tensor) -> None:
        """Append the next tensor; any device, any strides."""
        name, spec = self.left.popleft()
        assert tuple(tensor.shape) == spec.shape, f"{name} is {tuple(tensor.shape)}, not {spec.shape}"
        assert tensor.dtype == getattr(torch, spec.dtype), f"{name} is {tensor.dtype}, not {spec.dtype}"
        data = bytes_of(tensor)
        self.file.write(data)
        self.digests[name] = hashlib.sha256(data).hexdigest()


@contextmanager
def safetensors_writer(path: str | Path, tensors: Sequence[tuple[str, TensorSpec]]) -> Iterator[SafetensorsWriter]:
    """Inside, a safetensors file is written, tensor by tensor.

        with safetensors_writer(path, [("weight", spec), ("bias", spec)]) as file:
            file.write(weight)
            file.write(bias)

    The file appears under its name, complete, when the block ends; after an error it does not appear.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as file:
        writer = SafetensorsWriter(file, tensors)
        file.write(header(tensors, dict.fromkeys((name for name, _ in tensors), ZEROS)))  # as long as the last one
        yield writer
        assert not writer.left, f"{len(writer.left)} of {len(tensors)} tensors are not written"
        file.seek(0)
        file.write(header(tensors, writer.digests))


def header(tensors: Sequence[tuple[str, TensorSpec]], digests: Mapping[str, str] | None = None) -> bytes:
    """A safetensors header: its length in 8 bytes, then JSON padded with spaces to a multiple of 8."""
    if digests is None:
        return _header(tensors, {})
    more = {HEADER: ZEROS, **{OF_TENSOR + name: value for name, value in digests.items()}}
    own_digest = hashlib.sha256(_header(tensors, more)[8:]).hexdigest()
    return _header(tensors, {**more, HEADER: own_digest})


def _header(tensors: Sequence[tuple[str, TensorSpec]], metadata: Mapping[str, str]) -> bytes:
    body: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, spec in tensors:
        size = math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize
        body[name] = {"dtype": DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """Write tensors under their names; returns when they are on the disk."""
    specs = [(name, TensorSpec(tuple(t.shape), t.stride(), str(t.dtype)[6:])) for name, t in tensors.items()]
    return write_bytes(path, header(specs), *map(bytes_of, tensors.values()))


def write_bytes(path: Path, *parts: bytes | memoryview) -> FileEntry:
    """Write a file; returns when it is on the disk."""
    with ThreadPoolExecutor(1) as beside, path.open("wb") as file:
        sha256 = beside.submit(_digest_of, parts)
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(sha256.result(), sum(map(len, parts)))


def _digest_of(parts: Sequence[bytes | memoryview]) -> str:
    sha256 = hashlib.sha256()
    for part in parts:
        sha256.update(part)
    return sha256.hexdigest()


class TensorFile:
    """Reads single tensors of a safetensors file, each into its own memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = safe_open(str(path), framework="pt")
            self.names = frozenset(self._file.keys())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path.name} cannot be read: {error}", where=str(path), hint=OTHER) from error

    def __call__(self, name: str) -> Tensor:
        """A tensor."""
        if name not in self.names:
            raise CheckpointError(f"{self.path.name} has no tensor {name!r}", where=str(self.path), hint=OTHER)
        view: Tensor = self._file.get_tensor(name)
        return torch.empty(view.shape, dtype=view.dtype).copy_(view)
