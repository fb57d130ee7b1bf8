"""A message over NCCL begins when both ends are ready for it, and those of a line keep their order."""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpipe.runtime.wires.processes import Meeting, NcclLine

CPU = torch.device("cpu")


class Done:
    """A call that is over, or that waits for something first."""

    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        self.wait = wait


class Group:
    """One of two processes of a group; what both begin stands in one log."""

    def __init__(self, own: int, letters: dict[Any, queue.SimpleQueue[Tensor]], log: list[tuple[str, int]]) -> None:
        self.own, self.letters, self.log = own, letters, log

    def send(self, data: list[Tensor], to: int, tag: int) -> Done:
        self.log.append(("send", len(data[0])))
        self.letters[self.own, to, tag].put(data[0].clone())
        return Done()

    def recv(self, data: list[Tensor], source: int, tag: int) -> Done:
        self.log.append(("receive", len(data[0])))
        letters = self.letters[source, self.own, tag]
        return Done(lambda: data[0].copy_(letters.get(timeout=10)))


class Ends:
    """The two ends of a line."""

    def __init__(self) -> None:
        letters: Any = defaultdict(queue.SimpleQueue)
        self.log: list[tuple[str, int]] = []
        notes: Any = defaultdict(queue.SimpleQueue)
        groups = [Group(own, letters, self.log) for own in range(2)]
        told = [Group(own, notes, []) for own in range(2)]
        self.source, self.target = (NcclLine(groups[own], 1 - own, told[own], 1 - own, 7, CPU) for own in range(2))


def settled(ends: Ends) -> list[tuple[str, int]]:
    """What has begun, once nothing more begins."""
    time.sleep(0.1)
    return list(ends.log)


@pytest.mark.parametrize("first", ["sender", "receiver"])
def test_neither_end_begins_alone(first: str) -> None:
    ends, data, memory = Ends(), torch.arange(5, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8)
    begin: list[Callable[[], Meeting]] = [lambda: ends.source.send(data), lambda: ends.target.receive(memory)]
    meetings = [begin.pop(0 if first == "sender" else 1)()]
    assert settled(ends) == []
    meetings.append(begin.pop()())
    for meeting in meetings:
        meeting.wait()
    assert sorted(ends.log) == [("receive", 5), ("send", 5)]
    assert memory.tolist() == [0, 1, 2, 3, 4]


def test_messages_keep_their_order() -> None:
    ends = Ends()
    sent = [torch.full((size,), size, dtype=torch.uint8) for size in (3, 1, 2)]
    memory = [torch.zeros_like(one) for one in sent]
    meetings = [ends.source.send(one) for one in sent] + [ends.target.receive(one) for one in memory]
    for meeting in meetings:
        meeting.wait()
    assert [size for way, size in ends.log if way == "send"] == [3, 1, 2]
    assert all(torch.equal(a, b) for a, b in zip(sent, memory, strict=True))


def test_an_error_is_met_by_who_waits() -> None:
    ends = Ends()

    def lost(*given: object) -> Done:
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")

    ends.source._notes.recv = lost
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        ends.source.send(torch.zeros(1, dtype=torch.uint8)).wait()


def test_threads_end_with_their_lines() -> None:
    before = set(threading.enumerate())
    ends = Ends()
    mine = set(threading.enumerate()) - before
    assert len(mine) == 2
    del ends
    gc.collect()
    for thread in mine:
        thread.join(30)
    assert not any(thread.is_alive() for thread in mine)
