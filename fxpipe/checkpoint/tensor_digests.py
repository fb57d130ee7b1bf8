"""Digests inside a safetensors file: of every tensor, and of the header, in the header's own metadata.

Every reader of safetensors takes such a file as it is: metadata are texts by name. Whoever reads a tensor can tell
whether it is what was written, without reading the rest of the file.

    "__metadata__": {"format": "pt", "sha256": "<of the header, with zeros in this place>", "sha256:weight": "<of the bytes>"}
"""  # noqa: E501

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fxpipe.errors import BuildError
from fxpipe.typed_json import Malformed, convert, parse

HEADER = "sha256"
ZEROS = "0" * 64
MOST_HEADER = 100_000_000
"""Bytes, as the format has it."""
_HINT = "copy the file again from where it was written, or take another"


def key(name: str) -> str:
    """The metadata's name for the digest of a tensor."""
    return f"{HEADER}:{name}"


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes as the file has them."""
    data: memoryview = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data


def digest(tensor: Tensor) -> str:
    """Of a tensor's bytes as the file has them."""
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


@dataclass(frozen=True)
class TensorDigests:
    """The digests in a file.

    Attributes:
        of: by the tensor's name.
    """

    path: Path
    of: Mapping[str, str]

    def check(self, name: str, tensor: Tensor) -> None:
        """Compare a tensor that was read with what was written; nothing where the file has no digests.

        Raises:
            BuildError: it is not what was written.
        """
        if name in self.of and digest(tensor) != self.of[name]:
            raise BuildError(
                f"{name} in {self.path.name} was changed after it was written", where=str(self.path), hint=_HINT
            )


def read_digests(path: Path) -> TensorDigests:
    """The digests in a safetensors file, after checking its header; none for a file that another program wrote.

    Raises:
        BuildError: the header is not what was written.
    """
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            text = file.read(size) if size <= MOST_HEADER else b""
        body = parse(text.decode(), finite=False)
        found = convert(body.get("__metadata__") or {}, dict[str, str]) if isinstance(body, dict) else {}
    except (OSError, UnicodeDecodeError, Malformed):
        return TensorDigests(path, {})  # who opens the file will say so
    of = {name.removeprefix(key("")): value for name, value in found.items() if name.startswith(key(""))}
    own = found.get(HEADER)
    if own is None and not of:
        return TensorDigests(path, {})
    if own is None or hashlib.sha256(text.replace(own.encode(), ZEROS.encode(), 1)).hexdigest() != own:
        raise BuildError(f"the header of {path.name} was changed after it was written", where=str(path), hint=_HINT)
    return TensorDigests(path, of)
