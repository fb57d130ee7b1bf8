"""What stages save until the backward of a microbatch: on the device, or meanwhile in the CPU's memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.schedule.action import Action

LEAST_BYTES = 1 << 16
"""Smaller tensors stay on the device: starting a copy takes longer than the copy."""


def check_offload(device: torch.device | str) -> None:
    """Refuse to offload from a device that is not a CUDA device."""
    if torch.device(device).type != "cuda":
        raise RunError(
            "--offload moves saved values from a CUDA device to the CPU's memory, and this build runs on the CPU",
            where="--offload",
            hint="leave it out, or compile with --device cuda; --memory compiles a build that saves less",
        )


@dataclass(frozen=True)
class _View:
    """How a tensor views its memory."""

    memory: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class SavedValues:
    """What each part of a stage leaves for the next part of the same microbatch: values, saved or deferred, and the
    memory (storage addresses) of weights and sent values, which gradients must not overwrite.

    The code that takes the values empties their list.
    """

    def __init__(self) -> None:
        self._left: dict[tuple[int, int], tuple[Any, set[int]]] = {}

    def expect(self, action: Action) -> None:
        """The worker will run this action, some actions from now."""

    def leave_out(self, action: Action) -> None:
        """It will not."""

    def begins(self, action: Action) -> None:
        """It runs now."""

    def put(self, action: Action, values: list[Any], memory: set[int]) -> None:
        """An action leaves these."""
        self._left[action.minibatch, action.microbatch] = values, memory

    def take(self, action: Action) -> tuple[list[Any], set[int]]:
        """What the action before it of the same microbatch has left."""
        return self._left.pop((action.minibatch, action.microbatch))

    def clear(self) -> None:
        """Forget all."""
        self._left.clear()


class Away:
    """Saved values of one microbatch that are on their way to the CPU, there, or on their way back.

    Attributes:
        entries: the values in order; for those that moved, how they view their memory.
        kept: that memory, copied to the CPU.
        back: the same memory on the device again; empty until `bring`.
        ready: recorded when `back` has arrived.
    """

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.kept: list[Tensor] = []
        self.back: list[Tensor] = []
        self.ready: torch.cuda.Event | None = None


class Offload(SavedValues):
    """Moves what forwards save to the CPU and back, on its own stream, while the device computes.

    Memory that several values view moves once, and they view one memory again afterwards. It takes device memory from
    `bring` on. Small values and those that are not dense tensors stay.

    Args:
        device: where the values are made. A CPU has no streams: its values are copied at once, for tests.

    Attributes:
        next_actions: of the worker, in order.
    """

    def __init__(self, device: torch.device | str, least: int = LEAST_BYTES) -> None:
        super().__init__()
        self.device = torch.device(device)
        self.least = least
        self.next_actions: deque[Action] = deque()
        self._away: WeakValueDictionary[tuple[int, int], Away] = WeakValueDictionary()
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def expect(self, action: Action) -> None:
        self.next_actions.append(action)

    def leave_out(self, action: Action) -> None:
        if action in self.next_actions:
            self.next_actions.remove(action)

    def begins(self, action: Action) -> None:
        """Begin to move back what the action after this one reads."""
        self.leave_out(action)
        following = self.next_actions[0] if self.next_actions else None
        if following is not None and following.phase == "B":
            away = self._away.get((following.minibatch, following.microbatch))
            if away is not None:
                self.bring(away)

    def put(self, action: Action, values: list[Any], memory: set[int]) -> None:
        """Move what a forward has saved to the CPU, unless its backward is the next action."""
        super().put(action, values, memory)
        if action.phase != "F" or (self.next_actions and self.next_actions[0] == replace(action, phase="B")):
            return
        key = action.minibatch, action.microbatch
        away = self._away[key] = self.away(values)
        self._left[key] = away, memory

    def take(self, action: Action) -> tuple[list[Any], set[int]]:
        values, memory = super().take(action)
        return self.back(values) if isinstance(values, Away) else values, memory

    def clear(self) -> None:
        super().clear()
        self.next_actions.clear()

    def away(self, values: Sequence[Any]) -> Away:
        """Begin to move the values to the CPU; their device memory is free once nothing else holds it."""
        found = Away()
        places: dict[int, int] = {}
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._on_stream():
            for value in values:
                found.entries.append(self._entry(value, found, places))
        return found

    def bring(self, away: Away) -> None:
        """Begin to move the values back."""
        if away.back or not away.kept:
            return
        away.back = [torch.empty(kept.shape, dtype=kept.dtype, device=self.device) for kept in away.kept]
        if self._stream is not None:  # the computing stream may still read the old contents of that memory
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._on_stream():
            for memory, kept in zip(away.back, away.kept, strict=True):
                memory.copy_(kept, non_blocking=True)
        if self._stream is not None:
            away.ready = self._stream.record_event()

    def back(self, away: Away) -> list[Any]:
        """The values, for use on the computing stream; `away` is empty afterwards."""
        self.bring(away)
        if away.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(away.ready)
        values = [_shown(entry, away.back) if isinstance(entry, _View) else entry for entry in away.entries]
        away.entries, away.kept, away.back = [], [], []
        return values

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _entry(self, value: Any, found: Away, places: dict[int, int]) -> Any:
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.device.type != self.device.type:
            return value
        storage = value.untyped_storage()
        if storage.nbytes() < self.least:
            return value
        memory = places.get(storage.data_ptr())
        if memory is None:
            memory = places[storage.data_ptr()] = len(found.kept)
            whole = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
            kept = torch.empty(whole.shape, dtype=torch.uint8, pin_memory=self._stream is not None)
            found.kept.append(kept.copy_(whole, non_blocking=True))
            if self._stream is not None:
                whole.record_stream(self._stream)
        return _View(memory, value.dtype, tuple(value.shape), value.stride(), int(value.storage_offset()))


def _shown(view: _View, memories: Sequence[Tensor]) -> Tensor:
    """The tensor that a view describes."""
    empty = torch.empty(0, dtype=view.dtype, device=memories[view.memory].device)
    storage = memories[view.memory].untyped_storage()
    return empty.set_(storage, view.offset, view.shape, view.stride)
