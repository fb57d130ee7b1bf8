"""Vectors in memory that two replicas share: threads stand for the two processes."""

from __future__ import annotations

import queue
import random
import resource
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.runtime.wires import shared_vectors
from fxpipe.runtime.wires.shared_vectors import SharedVectors

TIMEOUT = 60.0


@dataclass
class Work:
    run: Callable[[], object]

    def wait(self) -> None:
        self.run()


class Group:
    """One end of a process group of two."""

    def __init__(self, sent: queue.Queue[Tensor], received: queue.Queue[Tensor]) -> None:
        self._sent, self._received = sent, received

    def send(self, tensors: list[Tensor], other: int, tag: int) -> Work:
        self._sent.put(tensors[0].clone())
        return Work(lambda: None)

    def recv(self, tensors: list[Tensor], other: int, tag: int) -> Work:
        return Work(lambda: tensors[0].copy_(self._received.get(timeout=TIMEOUT)))


def both(run: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(2) as threads:
        return [each.result(TIMEOUT) for each in [threads.submit(run, replica) for replica in range(2)]]


def met() -> list[SharedVectors | None]:
    there: queue.Queue[Tensor] = queue.Queue()
    back: queue.Queue[Tensor] = queue.Queue()
    groups = [Group(there, back), Group(back, there)]
    return both(lambda replica: SharedVectors.between(groups[replica], replica))


def pair() -> list[SharedVectors]:
    ends = [end for end in met() if end is not None]
    assert len(ends) == 2
    return ends


def written(end: SharedVectors, value: Tensor, divisor: int = 1) -> shared_vectors.Shared:
    shared = end.hand_over(end.empty(len(value), value.dtype, nullcontext).copy_(value), divisor)
    assert shared is not None
    return shared


@pytest.mark.parametrize("block", [2**13, 2**28])
@pytest.mark.parametrize("late", [0, 1, 2])
def test_sums_are_right_however_far_one_is_ahead(block: int, late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every vector is taken `late` minibatches after its own; memory that was read is used again."""
    monkeypatch.setattr(shared_vectors, "_BLOCK", block)
    ends, sizes, minibatches = pair(), [1, 5000, 3, 140_000, 5000], 40

    def value(replica: int, minibatch: int, size: int) -> Tensor:
        return torch.randn(size, generator=torch.Generator().manual_seed(1000 * replica + 7 * minibatch + size))

    def run(replica: int) -> int:
        end, draw, under_way = ends[replica], random.Random(replica), []
        for minibatch in range(minibatches + late):
            if draw.random() < 0.2:
                pause(draw)
            if minibatch < minibatches:
                under_way.append([written(end, value(replica, minibatch, size), 3) for size in sizes])
            if minibatch >= late:
                for size, shared in zip(sizes, under_way.pop(0), strict=True):
                    expected = (value(0, minibatch - late, size) + value(1, minibatch - late, size)) / 3
                    assert torch.equal(end.added(shared), expected)
        return len(end._regions)

    assert both(run) == [len(sizes) * (late + 1)] * 2


def pause(draw: random.Random) -> None:
    queue_that_stays_empty: queue.Queue[None] = queue.Queue()
    with pytest.raises(queue.Empty):
        queue_that_stays_empty.get(timeout=draw.random() / 100)


def test_both_may_hand_over_more_than_the_line_holds() -> None:
    ends, count = pair(), 3000

    def run(replica: int) -> list[float]:
        under_way = [written(ends[replica], torch.tensor([float(number)])) for number in range(count)]
        found = [ends[replica].added(shared).item() for shared in under_way]
        ends[replica].end()
        return found

    assert both(run) == [[2.0 * number for number in range(count)]] * 2


def test_what_was_not_made_here_is_not_handed_over() -> None:
    assert pair()[0].hand_over(torch.zeros(3), 1) is None


@pytest.mark.parametrize("missing", ["_door", "_connect"])
def test_without_a_way_between_them_both_know(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_vectors, missing, lambda *given: None)
    assert met() == [None, None]


def test_where_no_block_of_memory_can_be_made_both_know() -> None:
    """As where the size of files is limited, or that of memory: they are told before a vector is handed over."""
    own = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (shared_vectors._BLOCK - 1, own[1]))
    try:
        assert met() == [None, None]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, own)
    assert None not in met()


def test_who_does_not_know_the_secret_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, strangers = shared_vectors._connect, []

    def after_a_stranger(name: bytes, secret: bytes) -> socket.socket | None:
        strangers.append(connect(name, bytes(len(secret))))
        return connect(name, secret)

    monkeypatch.setattr(shared_vectors, "_connect", after_a_stranger)
    ends = pair()
    assert both(lambda replica: ends[replica].added(written(ends[replica], torch.ones(2))).tolist()) == [[2.0, 2.0]] * 2
    assert strangers[0].recv(1) == b""


def test_an_end_that_is_gone_is_noticed() -> None:
    first, second = pair()
    last, lost = written(first, torch.ones(2)), written(first, torch.ones(2))
    written(second, torch.ones(2))
    second.end()
    assert first.added(last).tolist() == [2.0, 2.0]
    with pytest.raises(ConnectionError):
        first.added(lost)
    with pytest.raises(ConnectionError):
        written(first, torch.ones(2))


def test_vectors_of_other_sizes_are_not_added_up() -> None:
    ends = pair()

    def run(replica: int) -> None:
        shared = written(ends[replica], torch.ones(3 + replica))
        with pytest.raises(RunError, match=f"gradients of {4 * (3 + replica)} and of {4 * (4 - replica)} bytes"):
            ends[replica].added(shared)

    both(run)


def test_only_what_takes_time_is_a_wait() -> None:
    first, second = pair()
    waits: list[Tensor] = []

    @contextmanager
    def waiting() -> Iterator[None]:
        waits.append(second.added(late.pop()))
        yield

    for reads_in_time in (True, False):
        shared, late = written(first, torch.ones(2)), [written(second, torch.ones(2))]
        first.added(shared)
        if reads_in_time:
            second.added(late.pop())
        assert first.empty(2, torch.float32, waiting).tolist() == [1.0, 1.0]
        assert len(waits) == (0 if reads_in_time else 1)
        first._free[8].append(first._filling.popitem()[1])
