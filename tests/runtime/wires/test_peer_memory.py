"""What CUDA devices share, as far as a CPU can tell; `tests/law/test_peer_memory.py` tests messages through it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxpipe.torch_private import shared_memory

READ = getattr(torch._C, "_accelerator_getAllocatorSettings", None)


@pytest.mark.skipif(READ is None, reason="this torch does not tell its allocator's settings")
@pytest.mark.parametrize(
    ("before", "inside"),
    [
        (
            "max_split_size_mb:64, expandable_segments:True, roundup_power2_divisions:4",
            "max_split_size_mb:64,expandable_segments:False,roundup_power2_divisions:4",
        ),
        ("expandable_segments:False", "expandable_segments:False"),
        ("", ""),
    ],
)
def test_shared_memory_is_in_no_expandable_segment(before: str, inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert READ is not None
    empty, seen, first = torch.empty, [], READ()

    def allocated(*size: Any, **options: Any) -> torch.Tensor:
        seen.append(READ())
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", allocated)
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda storage: "opens")
    torch._C._accelerator_setAllocatorSettings(before)
    try:
        assert shared_memory(8, torch.device("cpu"))[1] == "opens"
        assert (seen, READ()) == ([inside], before)
    finally:
        torch._C._accelerator_setAllocatorSettings(first)
