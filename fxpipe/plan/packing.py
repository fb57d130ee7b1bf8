"""The form in which tensors travel: dense, flat, and the same on every transport, so that all give the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxpipe.errors import RunError
from fxpipe.plan.spec import TensorSpec

ALIGNMENT = 64
"""Bytes. Kernels may sum unaligned memory in another order: every received value starts aligned."""


class Layout:
    """The layout in which tensors of one spec travel: with the spec's own strides if these are dense.

    Else without gaps, with the same order of dimensions in memory: operators choose the layout of results by it.
    """

    __slots__ = ("bytes", "count", "dtype", "name", "shape", "stride")

    def __init__(self, spec: TensorSpec, name: str = "") -> None:
        self.name = name
        self.shape = torch.Size(spec.shape)
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.count = self.shape.numel()
        self.stride = spec.stride if is_dense(spec.shape, spec.stride) else _without_gaps(spec)
        self.bytes = self.count * self.dtype.itemsize

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` itself if it has this layout and is aligned, else a copy that has and is.

        Raises:
            RunError: its shape or dtype differs from the plan's.
        """
        tensor = tensor.resolve_conj().resolve_neg()  # lazy views of complex numbers are not plain memory
        if tensor.shape != self.shape or tensor.dtype != self.dtype:
            raise RunError(
                f"{self.name} is {tensor.dtype}{list(tensor.shape)}, but the plan says {self.dtype}{list(self.shape)}",
                hint="if the stage was edited, keep the shapes and dtypes of what it sends",
            )
        if tensor.stride() == self.stride and tensor.data_ptr() % ALIGNMENT == 0:
            return tensor
        return self.empty(tensor.device).copy_(tensor)

    def empty(self, device: torch.device | str) -> torch.Tensor:
        """Uninitialised memory for one value."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill one block of memory without gaps or overlaps."""
    if 0 in shape:
        return tuple(stride) == contiguous_stride(shape)
    expected = 1
    for step, size in sorted((st, si) for si, st in zip(shape, stride, strict=True) if si != 1):
        if step != expected:
            return False
        expected *= size
    return True


def _without_gaps(spec: TensorSpec) -> tuple[int, ...]:
    """The strides that torch's operators give a result like such a tensor."""
    return torch.empty_like(torch.empty_strided(spec.shape, spec.stride, device="meta")).stride()


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, as torch counts them."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


class Pack:
    """Several tensors as one message: one flat block of bytes, every tensor aligned in it."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.layouts = [Layout(spec) for spec in specs]
        self.offsets: list[int] = []
        end = 0
        for layout in self.layouts:
            self.offsets.append(end)
            end += -(-layout.bytes // ALIGNMENT) * ALIGNMENT
        self.bytes = end

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """A new block with copies of `tensors`: later in-place updates of them do not change it."""
        device = tensors[0].device if tensors else torch.device("cpu")
        block = torch.empty(self.bytes, dtype=torch.uint8, device=device)
        for view, tensor in zip(self.unpack(block), tensors, strict=True):
            view.copy_(tensor)
        return block

    def unpack(self, block: torch.Tensor) -> list[torch.Tensor]:
        """The tensors as views of a block."""
        views = []
        for layout, offset in zip(self.layouts, self.offsets, strict=True):
            flat = block[offset : offset + layout.bytes].view(layout.dtype)
            views.append(flat.as_strided(layout.shape, layout.stride))
        return views
