"""A message over NCCL begins when both ends are ready for it, and those of a line keep their order."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpipe.runtime.wires.nccl_lines import Communicator, Meeting, NcclLine

CPU = torch.device("cpu")
LOCK = threading.Lock()


class Done:
    """A call that is over, or that waits for something first."""

    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        self.wait = wait


class Group:
    """One of two processes of a group; what both begin is in one log. Messages arrive in the order of sending."""

    def __init__(self, own: int, letters: dict[Any, list[Future[Tensor]]], log: list[tuple[str, int]]) -> None:
        self.own, self.letters, self.log = own, letters, log
        self.begun: Counter[Any] = Counter()

    def send(self, data: list[Tensor], to: int, tag: int) -> Done:
        self.log.append(("send", len(data[0])))
        self.letter("sent", (self.own, to, tag)).set_result(data[0].clone())
        return Done()

    def recv(self, data: list[Tensor], source: int, tag: int) -> Done:
        self.log.append(("receive", len(data[0])))
        letter = self.letter("received", (source, self.own, tag))
        return Done(lambda: data[0].copy_(letter.result(timeout=10)))

    def letter(self, way: str, line: Any) -> Future[Tensor]:
        self.begun[way, line] += 1
        with LOCK:
            while len(self.letters[line]) < self.begun[way, line]:
                self.letters[line].append(Future())
        return self.letters[line][self.begun[way, line] - 1]


class Ends:
    """The two ends of lines in one direction."""

    def __init__(self, lines: int = 1) -> None:
        letters: Any = defaultdict(list)
        self.log: list[tuple[str, int]] = []
        notes: Any = defaultdict(list)
        groups = [Group(own, letters, self.log) for own in range(2)]
        told = [Group(own, notes, []) for own in range(2)]
        directions = [Communicator(groups[own], 1 - own) for own in range(2)]
        self.lines = [
            [NcclLine(directions[own], told[own], 1 - own, tag, CPU) for own in range(2)] for tag in range(lines)
        ]
        self.source, self.target = self.lines[0]


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


def test_lines_begin_their_messages_in_the_order_of_the_sender() -> None:
    ends = Ends(lines=8)
    sent = [torch.full((size,), size, dtype=torch.uint8) for size in range(1, 9)]
    memory = [torch.zeros_like(one) for one in sent]
    meetings = [line[1].receive(one) for line, one in zip(ends.lines, memory, strict=True)]
    settled(ends)
    order = [3, 7, 0, 5, 1, 6, 2, 4]
    for number in order:
        meetings.append(ends.lines[number][0].send(sent[number]))
        meetings[-1].wait()
    for meeting in meetings:
        meeting.wait()
    sizes = [number + 1 for number in order]
    assert [[size for way, size in ends.log if way == mine] for mine in ("send", "receive")] == [sizes, sizes]
    assert all(torch.equal(a, b) for a, b in zip(sent, memory, strict=True))


def test_no_message_of_a_direction_waits_for_one_that_failed() -> None:
    ends = Ends(lines=2)
    meeting = ends.lines[1][1].receive(torch.zeros(2, dtype=torch.uint8))
    ends.lines[0][1]._communicator._begun = -1  # another message is to begin first
    ends.lines[1][0].send(torch.zeros(2, dtype=torch.uint8))
    settled(ends)
    ends.lines[0][1]._communicator.fail(RuntimeError("gloo"))
    with pytest.raises(RuntimeError, match="gloo"):
        meeting.wait()


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
