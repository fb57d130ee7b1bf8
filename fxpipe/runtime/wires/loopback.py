"""Messages between workers of one process: they stay where they are, and nothing travels."""

from __future__ import annotations

from collections import Counter

from torch import Tensor


class Loopback:
    """What workers of this process have sent each other and not yet received, by tag and place among those of the tag.

    As on other wires, the receive that was announced first gets what was sent first; but it may be waited for last.
    """

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int], Tensor] = {}
        self._counts: Counter[int] = Counter()
        self._expected: Counter[int] = Counter()

    def send(self, tag: int, flat: Tensor) -> None:
        """Hand over a tensor; it must not change afterwards."""
        self._sent[tag, self._counts[tag]] = flat
        self._counts[tag] += 1

    def expect(self, tag: int) -> Passing:
        """A receive of the first message of a tag that has none yet."""
        self._expected[tag] += 1
        return Passing(self._sent, (tag, self._expected[tag] - 1))

    @property
    def is_empty(self) -> bool:
        """Whether all that was sent was received."""
        return not self._sent


class Passing:
    """A receive of a message within the process."""

    __slots__ = ("_key", "_sent")

    def __init__(self, sent: dict[tuple[int, int], Tensor], key: tuple[int, int]) -> None:
        self._sent, self._key = sent, key

    def take(self) -> Tensor | None:
        """The very tensor that was sent; None if it was not: waiting would not help."""
        return self._sent.pop(self._key, None)
