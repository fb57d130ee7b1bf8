"""A wire that takes time: what one TUN device sends, another receives so many seconds later.

    python delayed_wire.py DESCRIPTOR DESCRIPTOR SECONDS

Some kernels lack netem, which would do this inside. Packets keep their order, and none is lost here. The process runs
before others, since a wire does not wait for a processor, and takes some microseconds of one a packet.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

LONGEST = 1 << 16
SET_DEVICE, TUN, NO_HEADER = 0x400454CA, 0x0001, 0x1000


def open_device(name: str) -> int:
    """Make a TUN device, which is there as long as the descriptor is open, wherever it is moved.

    Raises:
        OSError: the system has none, or does not allow it.
    """
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, SET_DEVICE, struct.pack("16sH22x", name.encode(), TUN | NO_HEADER))
    return descriptor


def carry(ends: tuple[int, int], seconds: float) -> None:
    """Carry packets between two devices, both ways.

    Raises:
        OSError: one of them is gone.
    """
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    on_the_way: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ends}
    while True:
        due = min((queue[0][0] for queue in on_the_way.values() if queue), default=None)
        wait = None if due is None else max(0.0, due - time.monotonic())
        for end in select.select(ends, (), (), wait)[0]:
            arrives = time.monotonic() + seconds
            for packet in _waiting(end):
                on_the_way[other[end]].append((arrives, packet))
        now = time.monotonic()
        for end, queue in on_the_way.items():
            while queue and queue[0][0] <= now:
                packet = queue.popleft()[1]
                with contextlib.suppress(OSError):  # the device is not up yet: the packet is lost
                    os.write(end, packet)


def _waiting(end: int) -> list[bytes]:
    packets: list[bytes] = []
    while len(packets) < 64:
        try:
            packets.append(os.read(end, LONGEST))
        except BlockingIOError:
            break
    return packets


if __name__ == "__main__":
    if os.geteuid() == 0:
        os.nice(-15)
    with contextlib.suppress(OSError):  # a host, and its device, are gone
        carry((int(sys.argv[1]), int(sys.argv[2])), float(sys.argv[3]))
