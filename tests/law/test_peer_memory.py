"""Messages through the memory of devices stay whole, however late streams are; a stream that does not wait is found."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Barrier
from typing import Any

import pretended_streams
import pytest
import torch
import torch.distributed as dist
from pretended_streams import Stream
from torch import Tensor

from fxpipe.runtime.wires import peer_memory, shared_memory
from fxpipe.runtime.wires.peer_memory import PeerReceiver, PeerSender
from fxpipe.runtime.wires.shared_memory import Ends, connected

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
    sender = PeerSender(0, CPU)
    receiver = PeerReceiver(1, sender.handles, CPU)
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
    sender.close()
    receiver.close()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", ""),
        ("shared_memory", "no memory is shared"),
        ("opened_memory", "no memory is shared"),
        ("wrong", "what arrives is not what was sent"),
    ],
)
def test_a_message_tries_each_direction(name: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretended_streams.set_up(monkeypatch.setattr)
    all_here, said = Barrier(2), dict[int, Any]()

    def gathered(own: Any, rank: int, ranks: int) -> list[Any]:
        said[rank] = own
        all_here.wait()
        found = [said[0], said[1]]
        all_here.wait()
        return found

    def fail(*given: Any) -> Any:
        raise RuntimeError(f"{why}\nof a device")

    monkeypatch.setattr(shared_memory, "gathered", gathered)
    monkeypatch.setattr(shared_memory, "peers", lambda rank: nullcontext())
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    if name == "wrong":
        monkeypatch.setattr(peer_memory, "opened_memory", lambda opens, device: pretended_streams.Memory(opens[0]))
    elif name:
        monkeypatch.setattr(peer_memory, name, fail)

    def connect(rank: int) -> Ends:
        return connected(rank, [(0, 1), (1, 0)], CPU, (PeerSender, PeerReceiver))

    with ThreadPoolExecutor(2) as threads:
        for rank, ends in enumerate(threads.map(connect, (0, 1))):
            assert ends.without == {(0, 1): why, (1, 0): why}
            others = [] if why else [1 - rank]
            assert [*ends.senders] == [*ends.receivers] == others
            ends.close()
