"""Times of one process told in the time of another."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from fxpipe.runtime.wires.exchange import ClockOffset, aligned, read_offset

WORKERS = 3
AHEAD = 10**12
"""Nanoseconds by which each worker's clock is ahead of the one before it."""


def test_between_two_readings_the_offset_changes_steadily() -> None:
    before, after = ClockOffset(1000, 500, 1), ClockOffset(2000, 600, 1)
    assert [aligned(t, before, after) for t in (1000, 1500, 2000, 3000)] == [1500, 2050, 2600, 3700]


def test_what_may_be_chance_is_no_drift() -> None:
    before, after = ClockOffset(1000, 500, 60), ClockOffset(2000, 600, 40)
    assert [aligned(t, before, after) for t in (1000, 1500, 2000, 3000)] == [1600, 2100, 2600, 3600]


def test_a_single_moment_is_enough() -> None:
    reading = ClockOffset(1000, 500, 1)
    assert aligned(1200, reading, reading) == 1700


def _read(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORKERS)

    def now() -> int:
        return time.perf_counter_ns() + rank * AHEAD

    reading = read_offset(now)
    dist.barrier()
    Path(folder, str(rank)).write_text(f"{reading.offset} {reading.error}")
    dist.destroy_process_group()


@pytest.mark.multiproc
@pytest.mark.skipif(os.name != "posix", reason="one clock for all processes is known of Linux alone")
def test_clocks_that_differ_are_found_out(tmp_path: Path) -> None:
    multiprocessing.start_processes(_read, (str(tmp_path),), WORKERS, start_method="fork")
    for rank in range(WORKERS):
        offset, error = map(int, (tmp_path / str(rank)).read_text().split())
        assert abs(offset + rank * AHEAD) <= error, "the error is a bound: all processes share one clock"
        assert error < 10**8
