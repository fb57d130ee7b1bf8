"""Files of tensors: safetensors, written completely to the disk, with a digest of all bytes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fxpipe.checkpoint.manifest import OTHER, FileEntry
from fxpipe.checkpoint.safetensors_file import bytes_of, header
from fxpipe.errors import CheckpointError
from fxpipe.plan.spec import TensorSpec


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """Write tensors under their names; returns when they are on the disk."""
    specs = [(name, TensorSpec(tuple(t.shape), t.stride(), str(t.dtype)[6:])) for name, t in tensors.items()]
    return write_bytes(path, header(specs), *map(bytes_of, tensors.values()))


def write_bytes(path: Path, *parts: bytes | memoryview) -> FileEntry:
    """Write a file; returns when it is on the disk."""
    with ThreadPoolExecutor(1) as beside, path.open("wb") as file:
        digest = beside.submit(_digest, parts)
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(digest.result(), sum(map(len, parts)))


def _digest(parts: Sequence[bytes | memoryview]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


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
