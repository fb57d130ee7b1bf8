"""Which messages wait for their turn on a link, so that an urgent one need not wait for them.

The receiver of an activation or a gradient has nothing else to do; saved values and weights are read later. So large
messages of those two kinds wait for their turn: they go in chunks, each when the link is free, saved values before
weights, else in the order in which they were sent. All other messages are urgent: they go at once, in program order,
after the chunk that is being sent. A small message of any kind takes less than a chunk, and is urgent, too.
"""

from __future__ import annotations

CHUNK = 256 * 1024
"""The most bytes that an urgent message may have to wait for."""

URGENT, SAVED, WEIGHTS = range(3)
"""Turns; a message of a smaller one goes first."""

_TURNS = {"saved": SAVED, "weights": WEIGHTS}


def turn_of(kind: str, size: float) -> int:
    """The turn of a message.

    Args:
        kind: of an edge, or `weights`.
        size: in bytes; for weights, the most that one owner sends to one reader, since those stay in order.
    """
    return _TURNS.get(kind, URGENT) if size > CHUNK else URGENT
