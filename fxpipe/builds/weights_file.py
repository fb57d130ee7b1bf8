"""The bytes of a build's weights: a safetensors file, which allows no shared memory and not all dtypes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import save

from fxpipe.errors import BuildError, listed


def weights_bytes(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The content of the file."""
    _check_dtypes(tensors)
    return save({name: t.contiguous() for name, t in _unshared(tensors).items()})


def _check_dtypes(tensors: Mapping[str, torch.Tensor]) -> None:
    names: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(tensor.dtype, []).append(name)
    unfit = []
    for dtype, of_dtype in names.items():
        try:
            save({"empty": torch.empty(0, dtype=dtype)})
        except (KeyError, SafetensorError):
            unfit.append(f"{listed(of_dtype)} ({str(dtype).removeprefix('torch.')})")
    if unfit:
        raise BuildError(
            f"a safetensors file cannot hold {' and '.join(unfit)}",
            hint="use complex64 for complex128, or keep real and imaginary parts and join them with torch.complex",
        )


def _unshared(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, with copies of those that share another's memory: the file format does not allow sharing."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        pointer = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if pointer in seen and tensor.numel() else tensor
        seen.add(pointer)
    return separate
