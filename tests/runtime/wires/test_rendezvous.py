"""A message over NCCL begins when both ends are ready for it, and those of a line keep their order."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpipe.runtime.wires.nccl_lines import Communicator, JointLaunch, Meeting, NcclLine

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
        self.log.append(("recv", len(data[0])))
        letter = self.letter("received", (source, self.own, tag))
        return Done(lambda: data[0].copy_(letter.result(timeout=10)))

    def letter(self, way: str, line: Any) -> Future[Tensor]:
        self.begun[way, line] += 1
        with LOCK:
            while len(self.letters[line]) < self.begun[way, line]:
                self.letters[line].append(Future())
        return self.letters[line][self.begun[way, line] - 1]


class Ends:
    """The two ends of lines in one direction: the sender is 0, and has the lower rank."""

    def __init__(self, lines: int = 1) -> None:
        letters: Any = defaultdict(list)
        self.log: list[tuple[str, int]] = []
        notes: Any = defaultdict(list)
        groups = [Group(own, letters, self.log) for own in range(2)]
        self.notes = [Group(own, notes, []) for own in range(2)]
        self.locks = [threading.Lock() for _ in range(2)]
        ends = [Communicator(groups[own], 1 - own) for own in range(2)]
        self.lines = [
            [NcclLine(ends[own], self.agreement(own, tag), torch.device("cpu")) for own in range(2)]
            for tag in range(lines)
        ]
        self.source, self.target = self.lines[0]

    def agreement(self, own: int, tag: int) -> JointLaunch:
        return JointLaunch(self.locks[own], self.notes[own], tag, **{"below" if own else "above": [1 - own]})


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
    assert sorted(ends.log) == [("recv", 5), ("send", 5)]
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


def test_both_ends_begin_the_messages_of_all_lines_in_one_order() -> None:
    ends = Ends(lines=8)
    sent = [torch.full((size,), size, dtype=torch.uint8) for size in range(1, 9)]
    memory = [torch.zeros_like(one) for one in sent]
    meetings = [line[1].receive(one) for line, one in zip(ends.lines, memory, strict=True)]
    meetings += [line[0].send(one) for line, one in zip(ends.lines, sent, strict=True)]
    for meeting in meetings:
        meeting.wait()
    begun = [[size for way, size in ends.log if way == mine] for mine in ("send", "recv")]
    assert begun[0] == begun[1]
    assert sorted(begun[0]) == [*range(1, 9)]
    assert all(torch.equal(a, b) for a, b in zip(sent, memory, strict=True))


@pytest.mark.parametrize("end", [0, 1])
def test_neither_end_begins_while_one_of_them_begins_another(end: int) -> None:
    ends = Ends()
    with ends.locks[end]:
        meetings = [ends.source.send(torch.ones(1)), ends.target.receive(torch.zeros(1))]
        assert settled(ends) == []
    for meeting in meetings:
        meeting.wait()


def test_several_processes_begin_together() -> None:
    notes: Any = defaultdict(list)
    locks, log = [threading.Lock() for _ in range(3)], []
    ready = [threading.Event() for _ in range(3)]

    def launch(own: int) -> None:
        others = [other for other in range(3) if other != own]
        agreement = JointLaunch(locks[own], Group(own, notes, []), 0, level=others)
        agreement.launch(lambda: assert_set(ready[own]), lambda: log.append([lock.locked() for lock in locks]))

    threads = [threading.Thread(target=launch, args=(own,), daemon=True) for own in range(3)]
    for thread in threads:
        thread.start()
    for own in (2, 0):
        ready[own].set()
    time.sleep(0.1)
    assert log == []
    assert not any(lock.locked() for lock in locks)  # none is held by a process that waits for another's device
    ready[1].set()
    for thread in threads:
        thread.join(10)
    assert len(log) == 3


def test_messages_and_sums_have_one_order_in_all_processes() -> None:
    """Two ranks of two replicas: sums of 0 and 1 and of 2 and 3, two lines of messages of 0 and 2 and of 1 and 3."""
    notes: Any = defaultdict(list)
    locks, logs = [threading.Lock() for _ in range(4)], [list[tuple[int, int]]() for _ in range(4)]
    kernels = [(0, 1), (2, 3), (0, 2), (0, 2), (1, 3), (1, 3)]

    def launch(kernel: int, own: int) -> None:
        (other,) = (each for each in kernels[kernel] if each != own)
        place = "level" if kernel < 2 else "below" if other < own else "above"
        agreement = JointLaunch(locks[own], Group(own, notes, []), kernel, **{place: [other]})
        for number in range(25):
            wait = random.Random(f"{kernel} {own} {number}").random() / 2000
            agreement.launch(partial(time.sleep, wait), lambda number=number: logs[own].append((kernel, number)))

    threads = [
        threading.Thread(target=launch, args=(kernel, own), daemon=True)
        for kernel, both in enumerate(kernels)
        for own in both
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [len(log) for log in logs] == [75] * 4
    order = TopologicalSorter[tuple[int, int]]()
    for log in logs:
        for before, after in pairwise(log):
            order.add(after, before)
    order.prepare()  # an error if there is a circle


def assert_set(event: threading.Event) -> None:
    assert event.wait(10)


def test_no_message_begins_after_one_that_could_not() -> None:
    ends = Ends(lines=2)
    first, second = ends.lines
    begin = first[1]._communicator._group.recv

    def lost(*given: object) -> Done:
        raise RuntimeError("out of memory")

    first[1]._communicator._group.recv = lost
    first[0].send(torch.zeros(2, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="out of memory"):
        first[1].receive(torch.zeros(2, dtype=torch.uint8)).wait()
    first[1]._communicator._group.recv = begin
    second[0].send(torch.zeros(2, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="out of memory"):
        second[1].receive(torch.zeros(2, dtype=torch.uint8)).wait()


def test_an_error_is_met_by_who_waits() -> None:
    ends = Ends()

    def lost(*given: object) -> Done:
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")

    ends.notes[0].recv = lost
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
