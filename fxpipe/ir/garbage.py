"""Runs Python's garbage collector rarely while graphs are built: they are many small objects, none of them garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 50_000
"""Objects made before the collector looks at them; Python's own 700 cost a third of the passes' time."""


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Inside, Python's collector of cycles runs rarely; if it is off, it stays off."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(YOUNG, before[0]), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
