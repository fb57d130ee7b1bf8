"""Copies between the CPU's memory and a CUDA device, and marks: the CPU does not wait until the device is idle.

Copies need page-locked memory; torch keeps it from reuse until the copy is over.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class ToDevice:
    """Copies tensors to a device, while it computes what it was given before; a CPU gets them as they are."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, value: Tensor) -> Tensor:
        """The value on the device, for use on its current stream; the caller's memory may change afterwards."""
        if self._device.type != "cuda" or value.device.type != "cpu":
            return value
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        locked = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True).copy_(value)
        with torch.cuda.stream(self._stream):
            moved = locked.to(self._device, non_blocking=True)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        moved.record_stream(computing)
        return moved


class ToCpu:
    """A tensor on its way to the CPU's memory: there once the device has made it, whatever follows on the device."""

    def __init__(self, value: Tensor) -> None:
        self._value, self._made = value, None
        if value.is_cuda:
            self._value = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._made = torch.cuda.current_stream(value.device).record_event()

    @property
    def here(self) -> bool:
        """Whether `read` does not wait."""
        return self._made is None or self._made.query()

    def read(self) -> Tensor:
        """The tensor in the CPU's memory, waiting for it."""
        if self._made is not None:
            self._made.synchronize()
        return self._value


def mark(device: torch.device) -> Callable[[], None]:
    """Returns a function that waits for what the calling thread has launched on the device so far."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event.synchronize
