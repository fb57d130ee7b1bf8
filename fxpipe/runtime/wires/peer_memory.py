"""Messages between CUDA devices of one machine: the receiver copies from the sender's memory, and no kernel waits.

As in `shared_memory`, with blocks in the memory of the sender's device. Each has two events, *made* and *freed*:

    sender      its stream waits for *freed*, copies a message into a free block, then *made*    ─ line, offset, bytes →
    receiver    its stream waits for *made*, copies the message out, then *freed*                ← offset ─

A process writes to a pipe once all this is in its stream, before the device has done it. So a device waits only for
what was launched earlier, whatever else waits for the device. Kernels of NCCL do not keep that, and have an order of
their own (`nccl_lines`): since all streams may share one queue of the device, what waits for another process is put
there with the same lock. A block's page in the file says how to open its memory and *made*, and later *freed*, which
the receiver makes.
"""

from __future__ import annotations

import mmap
import pickle
from dataclasses import dataclass

import torch
from torch import Tensor

from fxpipe.runtime.wires.shared_memory import ALONE, PAGE, Handles, Launching, Receiver, Sender
from fxpipe.torch_private import opened_memory, shared_memory

_FREED = PAGE // 2
"""Where a block's page has *freed*."""


@dataclass
class _Block:
    memory: Tensor
    made: torch.cuda.Event
    freed: torch.cuda.Event | None = None


class PeerSender(Sender):
    """One end of a direction. RuntimeError at the first message if the device shares no memory."""

    def __init__(self, device: torch.device, launching: Launching = ALONE) -> None:
        super().__init__(device, launching)
        self._there: dict[int, _Block] = {}  # by offset

    def _made(self, size: int) -> int:
        offset = super()._made(PAGE)
        memory, opens = shared_memory(size, self._device)
        made = torch.cuda.Event(interprocess=True)
        text = pickle.dumps((opens, made.ipc_handle()))
        assert len(text) <= _FREED, "a page is too short for what opens a block"
        self._blocks[offset][: len(text)] = text
        self._there[offset] = _Block(memory, made)
        return offset

    def _fill(self, offset: int, flat: Tensor) -> None:
        block, page = self._there[offset], self._blocks[offset]
        if block.freed is None and page[_FREED]:  # not before the receiver has dropped it once
            block.freed = torch.cuda.Event.from_ipc_handle(self._device, pickle.loads(page[_FREED:]))
        stream = torch.cuda.current_stream(self._device)
        with self._launching:
            if block.freed is not None:
                stream.wait_event(block.freed)
            block.memory[: flat.nbytes].copy_(flat.view(torch.uint8))
            block.made.record(stream)

    def close(self) -> None:
        super().close()
        self._there.clear()
        torch.cuda.ipc_collect()  # in /dev/shm torch counts who has a block open; only this removes these files


class PeerReceiver(Receiver):
    """The other end. RuntimeError at the first message if this device does not reach the memory of the other one."""

    def __init__(self, given: Handles, device: torch.device, launching: Launching = ALONE) -> None:
        super().__init__(given, device, launching)
        self._there: dict[int, _Block] = {}
        self._copies = torch.cuda.Stream(device)  # which nothing that is computed here delays

    def has(self, message: tuple[int, int]) -> bool:
        """Never: a message that is launched may not be made."""
        return False

    def wait(self, message: tuple[int, int]) -> None:
        """Wait until a message is launched; the device waits until it is made."""
        super().wait(message)
        offset, size = self._here[message]
        if size:
            made = self._block(offset).made
            with self._launching:
                torch.cuda.current_stream(self._device).wait_event(made)

    def _used(self, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        block, computing = self._block(offset), torch.cuda.current_stream(self._device)
        assert block.freed is not None
        with self._launching:
            with torch.cuda.stream(self._copies):
                self._copies.wait_event(block.made)
                message = torch.empty(count, dtype=dtype, device=self._device)
                message.view(torch.uint8).copy_(block.memory[: message.nbytes])
                block.freed.record(self._copies)
            computing.wait_event(block.freed)
        message.record_stream(computing)
        self._drop(offset)
        return message

    def _block(self, offset: int) -> _Block:
        if offset not in self._there:
            self._there[offset] = self._opened(offset)
        return self._there[offset]

    def _opened(self, offset: int) -> _Block:
        page = mmap.mmap(self._file, PAGE, offset=offset)
        opens, handle = pickle.loads(page[:_FREED])
        made, freed = torch.cuda.Event.from_ipc_handle(self._device, handle), torch.cuda.Event(interprocess=True)
        text = pickle.dumps(freed.ipc_handle())
        page[_FREED : _FREED + len(text)] = text
        return _Block(opened_memory(opens, self._device), made, freed)

    def close(self) -> None:
        super().close()
        self._there.clear()
