"""One kind of message on its way, and when each message arrives."""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.planner.links import Links


@dataclass(slots=True)
class Direction:
    """One direction of a link, and when it is free for the next message, in seconds."""

    free: float = 0.0


class Channel:
    """All messages of one `Message`, numbered by microbatch, or of one `Replica`, numbered by version.

    Args:
        direction: shared with the other channels from `src` to `dst`.
        count: how many messages there are.

    Attributes:
        copy: seconds that the processor of each end is busy with one message.
        ready: by number, when an otherwise idle receiver has the message; None before it is sent.
        copied: by number, whether the receiver has spent its `copy`.
        asleep: the number that the receiver waits for, −1 if it does not wait.
    """

    __slots__ = ("_direction", "_occupies", "_travels", "asleep", "bytes", "copied", "copy", "dst", "ready", "src")

    def __init__(self, src: int, dst: int, size: float, links: Links, direction: Direction, count: int) -> None:
        self.src = src
        self.dst = dst
        self.bytes = size
        self.copy = links.copy * size
        self.ready: list[float | None] = [None] * count
        self.copied = bytearray(count)
        self.asleep = -1
        self._direction = direction
        self._occupies = links.seconds(src, dst, size)
        # Both ends copy while the message is on its way: it has arrived when both link and copying are done.
        self._travels = max(self._occupies, self.copy) + links.latency_of(src, dst)

    def send(self, number: int, time: float) -> tuple[float, float]:
        """Send a message at `time` or as soon as the direction is free; returns when it begins and ends to occupy
        it."""
        start = max(time, self._direction.free)
        end = self._direction.free = start + self._occupies
        self.ready[number] = start + self._travels
        return start, end
