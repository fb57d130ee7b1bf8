"""Shared memory: messages stay whole as long as they are used, its blocks are used again, lost processes are said."""

from __future__ import annotations

import os
import random
from collections import deque

import pytest
import torch
from torch import Tensor

from fxpipe.errors import PeerLost
from fxpipe.runtime.wires.shared_memory import Arriving, Receiver, Sender, rounded

TYPES = (torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.complex64)


def ends() -> tuple[Sender, Receiver]:
    sender = Sender()
    receiver = Receiver(sender.handles)
    sender.met()
    return sender, receiver


def received(arriving: Arriving) -> Tensor:
    arriving.wait()
    assert arriving.here
    return arriving.take()


def test_messages_stay_whole_as_long_as_they_are_used() -> None:
    sender, receiver = ends()
    draw = random.Random(0)
    sent: deque[tuple[Tensor, Arriving]] = deque()
    used: list[tuple[Tensor, Tensor]] = []  # with a view of what was received
    for number in range(600):
        dtype, count = draw.choice(TYPES), draw.choice((0, 1, 63, 4096, 5000))
        value = torch.randint(0, 2, (count,)).to(dtype)
        line = number % 5
        arriving = receiver.expect(line, count, dtype)
        sender.send(line, value)
        sent.append((value.clone(), arriving))
        value.zero_()
        if len(sent) > 8:
            at = draw.randrange(8)  # not in the order of sending
            expected, arriving = sent[at]
            del sent[at]
            used.append((expected, received(arriving)[:]))
        if len(used) > 10:
            expected, found = used.pop(draw.randrange(10))
            assert torch.equal(found, expected)
        assert all(torch.equal(found, expected) for expected, found in used)
    assert sender._end < 40 * 64 * 1024, "blocks are used again"
    receiver.close()
    assert all(torch.equal(found, expected) for expected, found in used)
    sender.close()


def test_no_block_is_added_for_one_message_after_another() -> None:
    sender, receiver = ends()
    for number in range(50):
        sender.send(7, torch.full((1000,), number))
        assert received(receiver.expect(7, 1000, torch.int64))[0] == number
    assert len(sender._blocks) <= 2


def test_messages_of_ever_new_sizes_use_the_same_blocks() -> None:
    sender, receiver = ends()
    for count in range(2**20 + 1, 2**22, 2**18 + 1):
        sender.send(7, torch.ones(count, dtype=torch.uint8))
        assert received(receiver.expect(7, count, torch.uint8)).sum() == count
    assert len(sender._blocks) == 2
    assert all(size < 2 * (2**20 + 1) for size in map(rounded, (1, 2**20, 2**20 + 1)))


def test_a_lost_process_is_said() -> None:
    sender, receiver = ends()
    sender.send(1, torch.ones(3))
    sender.close()
    assert received(receiver.expect(1, 3, torch.float32)).sum() == 3
    with pytest.raises(PeerLost, match="this process lost a connection: Connection closed by peer"):
        receiver.expect(1, 3, torch.float32).wait()
    sender, receiver = ends()
    receiver.close()
    with pytest.raises(PeerLost, match="this process lost a connection: Broken pipe"):
        sender.send(1, torch.ones(3))


def test_descriptors_are_closed() -> None:
    before = os.listdir("/proc/self/fd")
    sender, receiver = ends()
    sender.close()
    receiver.close()
    assert len(os.listdir("/proc/self/fd")) == len(before)
