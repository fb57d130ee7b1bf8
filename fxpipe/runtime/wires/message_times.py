"""Notes when the messages of a process leave and arrive, so that links can be measured without messages of their own.

Both ends number the messages of a tag alike. A receiver knows when a message came only if it waited for it.
Imports no torch.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter_ns
from typing import Any

SECOND = 10**9

MOST = 50
"""How many messages of a second are noted in each direction: the first ones, so both ends note the same."""

AWAITED = 100_000
"""Nanoseconds; a receiver that has waited for less has found the message there."""


class MessageTimes:
    """The times of one process's messages, in nanoseconds of worker 0's clock.

    Args:
        ahead: how far worker 0's clock is ahead of this process's.
    """

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._counts: Counter[tuple[Any, ...]] = Counter()
        self._seconds: dict[tuple[str, int], tuple[int, int]] = {}  # the last one, and what is noted of it
        self._rows: dict[str, list[tuple[int, ...]]] = {"sent": [], "came": []}

    def sent(self, to: int, tag: int, size: int) -> None:
        """A message of `size` bytes to another process begins to leave."""
        self._counts["bytes", to] += size
        total, number = self._counts["bytes", to], self._number("sent", to, tag)
        self._note("sent", to, perf_counter_ns() + self._ahead, tag, number, size, total)

    def expected(self, source: int, tag: int) -> Callable[[int, int], None]:
        """A receive was posted; the result takes the times from and until which the receiver waited for it."""
        number, posted = self._number("came", source, tag), perf_counter_ns() + self._ahead

        def came(begin: int, end: int) -> None:
            if end - begin > AWAITED:
                self._note("came", source, end + self._ahead, tag, number, posted)

        return came

    def put(self, write: Callable[[str], None]) -> None:
        """Write what was noted since the last call, as JSON: rows of the other process, the time, tag, number, and then
        of what was `sent` its bytes, and all bytes so far; of what `came`, when the receive was posted."""
        rows, self._rows = self._rows, {"sent": [], "came": []}
        with suppress(OSError):
            write(json.dumps(rows))

    def _number(self, *of: Any) -> int:
        self._counts[of] += 1
        return self._counts[of]

    def _note(self, kind: str, other: int, time: int, *more: int) -> None:
        second, count = self._seconds.get((kind, other), (0, 0))
        count = count + 1 if second == time // SECOND else 1
        self._seconds[kind, other] = time // SECOND, count
        if count <= MOST:
            self._rows[kind].append((other, time, *more))
