"""What devices have, copies between the CPU's memory and a CUDA device, and marks: the CPU does not wait until the
device is idle.

Copies need page-locked memory; torch keeps it from reuse until the copy is over.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

WITHOUT_FLOAT64 = {"mps"}
"""Devices that have neither float64 nor complex128."""

LACKS_FLOAT64 = "numbers of 64 bits (float64, complex128), which {} devices do not have"


def is_here(kind: str) -> bool:
    """Whether torch sees a device of this kind: 'cpu', 'cuda', 'mps'."""
    return kind == "cpu" or bool(torch.get_device_module(kind).is_available())


def too_wide(value: object) -> bool:
    """Whether a tensor, real or fake, has numbers of 64 bits, floating-point or complex ones of two."""
    return isinstance(value, Tensor) and value.dtype in (torch.float64, torch.complex128)


def widest(device: torch.device | str) -> torch.dtype:
    """The real numbers with the most bits that a device has."""
    return torch.float32 if torch.device(device).type in WITHOUT_FLOAT64 else torch.float64


def widened(value: Tensor) -> Tensor:
    """A copy in float64 or complex128; in the CPU's memory if the device has no such numbers."""
    value = value.detach().cpu() if value.device.type in WITHOUT_FLOAT64 else value.detach()
    return value.to(torch.complex128 if value.is_complex() else torch.float64, copy=True)


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
        self._value, self._made = value if value.is_cuda else value.cpu(), None
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
