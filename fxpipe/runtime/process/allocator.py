"""The C allocator of a process that trains: freed memory stays in the process and is used again.

By default glibc gives the top of the heap back to the system when a step has freed its values, and the next step pays
for page faults on the same memory again. Called once, at the start of a process that is fxpipe's own: a worker, or
`compile`, so that it measures costs as the workers will have them.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGEST = 32 << 20  # bytes: the largest mmap threshold that glibc accepts


def reuse_freed_memory() -> bool:
    """Keep freed memory for this process's lifetime; False if the C library is not glibc."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL("libc.so.6")
        return bool(libc.mallopt(_MMAP_THRESHOLD, _LARGEST)) and bool(libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1))
    except (OSError, AttributeError):
        return False
