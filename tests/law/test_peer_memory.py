"""Messages through the memory of devices stay whole, however late streams are; a stream that does not wait is found."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier, Lock
from typing import Any

import pretended_streams
import pytest
import torch
from pretended_streams import Stream
from torch import Tensor

from fxpipe.observe.watch import Cause, Watch
from fxpipe.runtime.wires import peer_memory, shared_memory
from fxpipe.runtime.wires.peer_memory import PeerReceiver, PeerSender
from fxpipe.runtime.wires.shared_memory import Ends, connected
from fxpipe.runtime.wires.wired import WiredTransport

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("forgotten", "late", "found"),
    [("", "sending", False), ("", "copies", False), ("made", "sending", True), ("copied", "copies", True),
     ("freed", "copies", True)],
)  # fmt: skip
def test_streams_wait(forgotten: str, late: str, found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pretended_streams.set_up(monkeypatch.setattr)
    monkeypatch.setattr(pretended_streams, "forgotten", forgotten)
    computing, sending = pretended_streams.current(), Stream()

    def delay(stream: Stream) -> float:
        return 0.003 * (stream.of_copies == (late == "copies"))

    monkeypatch.setattr(pretended_streams, "delay", delay)
    sender = PeerSender(CPU)
    receiver = PeerReceiver(sender.handles, CPU)
    sender.met()
    values = [torch.full((3000,), float(number)) for number in range(4)]

    def passed(value: Tensor) -> Tensor:
        with pretended_streams.on(sending):
            sender.send(1, value)
        arriving = receiver.expect(1, len(value), value.dtype)
        arriving.wait()
        return arriving.take()

    at_once = [passed(value).clone() for value in values]
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)
    later = [passed(value) for value in values]
    computing.synchronize()
    whole = all(map(torch.equal, [*at_once, *later], [*values, *values]))
    assert whole != found
    assert len(sender._there) == 1, "a block is used again"
    with pytest.raises(AssertionError, match="another process has memory open"):
        sender.close()
    receiver.close()
    torch.cuda.ipc_collect()


def test_waiting_for_a_message_that_is_not_made_is_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """As over other wires; the host of the sender may have launched it long before."""
    pretended_streams.set_up(monkeypatch.setattr)
    monkeypatch.setattr(pretended_streams, "delay", lambda stream: 0.0)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)
    now, marks = [0.0], list[float]()

    def clock() -> float:
        marks.append(now[0])
        return now[0]

    monkeypatch.setattr(pretended_streams, "clock", clock)
    sender, sending = PeerSender(CPU), Stream()
    receiver = PeerReceiver(sender.handles, CPU)
    sender.met()
    transport, cause = object.__new__(WiredTransport), Cause("activation", "x", 0)
    transport.worker, transport.watch = 1, Watch("cuda")

    def late(waiting: int) -> None:
        """A second, once the receiver's device has begun to wait."""
        while len(marks) < waiting:
            time.sleep(0.0001)
        now[0] += 1

    for number in range(2):
        sending.launch(partial(late, 3 + 4 * number))
        with pretended_streams.on(sending):
            sender.send(1, torch.ones(3))
    transport._posted = {(number,): receiver.expect(1, 3, torch.float32) for number in range(2)}
    for number in range(2):
        transport.watch.open("receive")
        transport._wait((number,), cause)
        transport.watch.close()
    transport.watch.end()
    assert transport.watch.seconds("wait") == pytest.approx(2)
    assert transport.watch.busy == pytest.approx(0)
    receiver.close()
    sender.close()


def test_what_waits_for_another_process_has_a_place_in_the_order_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else replicas that launch sums meanwhile may wait for each other, where a device has one queue."""
    pretended_streams.set_up(monkeypatch.setattr)
    launching, launched = Lock(), list[bool]()
    launch = Stream.launch

    def noted(self: Stream, what: Any) -> None:
        launched.append(launching.locked())
        launch(self, what)

    sender = PeerSender(CPU, launching)
    receiver = PeerReceiver(sender.handles, CPU, launching)
    sender.met()
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(Stream, "launch", noted)
    for count in (3, 3):  # the second waits until the block is free
        arriving = receiver.expect(1, count, torch.float32)
        sender.send(1, torch.ones(count))
        arriving.wait()
        arriving.take()
    assert len(launched) == 2 + 5 + 3 + 5
    assert all(launched)
    receiver.close()
    sender.close()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", ""),
        ("shared_memory", "no memory is shared"),
        ("opened_memory", "no memory is shared"),
        ("wrong", "what arrives is not what was sent"),
        ("opened_memory", "pidfd_getfd: not permitted"),
    ],
)
def test_a_message_tries_each_direction(name: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretended_streams.set_up(monkeypatch.setattr)
    all_here, said, place = Barrier(2), dict[int, Any](), threading.local()

    def gathered(own: Any) -> list[Any]:
        said[place.rank] = own
        all_here.wait()
        found = [said[0], said[1]]
        all_here.wait()
        return found

    def fail(*given: Any) -> Any:
        raise RuntimeError(f"{why}\nof a device")

    monkeypatch.setattr(shared_memory, "gathered", gathered)
    if name == "wrong":
        monkeypatch.setattr(peer_memory, "opened_memory", lambda opens, device: pretended_streams.Memory(opens[0]))
    elif name:
        monkeypatch.setattr(peer_memory, name, fail)

    def connect(rank: int) -> Ends:
        place.rank = rank
        ends = connected(rank, [(0, 1), (1, 0)], CPU, (PeerSender, PeerReceiver))
        ends.close(all_here.wait)
        return ends

    with ThreadPoolExecutor(2) as threads:
        for rank, ends in enumerate(threads.map(connect, (0, 1))):
            assert {reason.partition("; ")[0] for reason in ends.without.values()} == {why}
            assert all(("ptrace_scope" in reason) == ("pidfd" in why) for reason in ends.without.values())
            others = [] if why else [1 - rank]
            assert [*ends.senders] == [*ends.receivers] == others
