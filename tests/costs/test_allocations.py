"""Tracked allocations: views count once, what is freed no longer counts."""

from __future__ import annotations

import torch

from fxpipe.costs.allocations import TrackedAllocations


def test_memory_counts_from_its_making_to_its_end() -> None:
    with TrackedAllocations() as memory:
        whole = torch.zeros(1000)
        view = whole.view(10, 100)
        assert memory.live == 4000
        del whole
        assert memory.live == 4000, "the view still shows it"
        more = view + 1
        pieces = list(more.split(5))
        assert memory.live == 8000
        del view, more
        assert memory.live == 4000
        del pieces
        assert (memory.live, memory.peak) == (0, 8000)
        memory.restart()
        torch.ones(10).sum()
        assert memory.peak == 44


def test_what_was_there_before_counts_once_it_is_read() -> None:
    before = torch.zeros(100)
    with TrackedAllocations() as memory:
        before.add_(1)
        assert memory.live == 400
        del before
        assert memory.live == 0
