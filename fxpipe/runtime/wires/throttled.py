"""Imitates slow links: a message counts as received only when links of a given bandwidth and latency would deliver it.

Each direction of a link carries one message at a time:

    starts = max(wire free, sent)        wire free = starts + bytes / bandwidth        arrives = wire free + latency

The message itself is sent as usual. Its sender computes the time of arrival, and sends it in a word that follows the
message; the receiver waits for both, and until that time. If a message waits for its turn (`fxpipe.plan.urgency`), each
chunk counts as such a message, which starts when the wire is free and nothing urgent has been sent; the word is sent
once the last chunk has started. The simulator's `Direction` has the same rule.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from threading import Condition, Thread
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxpipe.plan.urgency import CHUNK, URGENT
from fxpipe.planner.links import Links
from fxpipe.runtime.wires.addresses import Channel
from fxpipe.runtime.wires.group import peers
from fxpipe.runtime.wires.processes import ProcessWires

_WORDS = 2**24
"""The tags of words begin here, above those of messages."""

Say = Callable[[float], None]
"""Takes the time at which a message arrives, by the sender's clock."""


class SlowDirection:
    """One direction of a link: when it is free, and the messages that wait for their turn."""

    def __init__(self, bandwidth: float, latency: float) -> None:
        self._bandwidth, self._latency = bandwidth, latency
        self._free = 0.0
        self._numbers = count()
        self._waiting: list[tuple[int, int, int, Say]] = []  # a heap of turn, number, bytes left

    def put(self, say: Say, size: int, turn: int, now: float) -> None:
        """A message of `size` bytes is sent now; `say` is called here or later, once its time of arrival is known."""
        self.carry(now)
        self._free = max(self._free, now)
        if turn == URGENT:
            self._free += size / self._bandwidth
            say(self._free + self._latency)
        else:
            heappush(self._waiting, (turn, next(self._numbers), size, say))

    def carry(self, now: float) -> None:
        """Start all chunks that can start before now."""
        while self._waiting and self._free < now:
            turn, number, left, say = heappop(self._waiting)
            self._free += min(left, CHUNK) / self._bandwidth
            if left > CHUNK:
                heappush(self._waiting, (turn, number, left - CHUNK, say))
            else:
                say(self._free + self._latency)

    @property
    def then(self) -> float | None:
        """When the next chunk starts unless an urgent message comes first; None if none waits."""
        return self._free if self._waiting else None


@dataclass(eq=False)
class _SlowSend:
    """A message that was sent, and the word with its time of arrival."""

    work: Any
    send: Callable[[Tensor], Any]
    _word: Future[Any] = field(default_factory=Future)

    def say(self, arrives: float) -> None:
        """Send the word; `wait` raises an error of this."""
        try:
            self._word.set_result(self.send(torch.tensor([arrives], dtype=torch.float64)))
        except Exception as error:
            self._word.set_exception(error)

    def wait(self) -> None:
        """Wait until both have left. RuntimeError if the connection was lost."""
        self.work.wait()
        self._word.result().wait()


@dataclass(eq=False)
class _SlowReceive:
    """The receives of a message and of its word; `ahead` is how far worker 0's clock is ahead of this process's."""

    work: Any
    word: Any
    arrives: Tensor
    ahead: float

    def wait(self) -> None:
        """Wait until both have arrived, and until the time in the word."""
        self.work.wait()
        self.word.wait()
        while (left := self.arrives.item() - self.ahead - perf_counter()) > 0:
            sleep(left)


class ThrottledWires(ProcessWires):
    """Wires over gloo whose messages take as long as over the given links, if these are slower.

    Over NCCL, a message is begun before the device has made it, so its clock would run too early.

    The links are between processes; worker 0's clock is so many seconds ahead of this process's.
    """

    shares = False

    def __init__(self, links: Links, ahead: float, rank: int, *arguments: Any) -> None:
        super().__init__(rank, *arguments)
        self._links, self._ahead = links, ahead
        self._directions: dict[int, SlowDirection] = {}
        self._carried: set[int] = set()  # the processes for which a thread starts waiting chunks
        self._lock = Condition()

    def _begin(self, flat: Tensor, to: int, channel: Channel | None, tag: int, turn: int) -> Any:
        now, work = perf_counter(), super()._begin(flat, to, channel, tag, turn)
        with peers():
            group = dist.group.WORLD  # not looked up later: `peers` changes it in this thread
        assert group is not None
        message = _SlowSend(work, lambda word: group.send([word.add_(self._ahead)], to, _WORDS + tag))
        with self._lock:
            if to not in self._directions:
                links = self._links
                self._directions[to] = SlowDirection(links.bandwidth_of(self.rank, to), links.latency_of(self.rank, to))
            self._directions[to].put(message.say, flat.nbytes, turn, now)
            if self._directions[to].then is not None and to not in self._carried:
                self._carried.add(to)
                Thread(target=self._carry, args=(to,), name="fxpipe-throttle", daemon=True).start()
        return message

    def _expect(self, flat: Tensor, source: int, channel: Channel | None, tag: int, turn: int) -> Any:
        arrives, work = torch.empty(1, dtype=torch.float64), super()._expect(flat, source, channel, tag, turn)
        with peers():
            return _SlowReceive(work, dist.irecv(arrives, source, tag=_WORDS + tag), arrives, self._ahead)

    def _carry(self, to: int) -> None:
        """Start chunks at their time, as long as any wait."""
        with self._lock:
            while (then := self._directions[to].then) is not None:
                self._lock.wait(max(then - perf_counter(), 0.0))
                self._directions[to].carry(perf_counter())
            self._carried.remove(to)
