"""What both sides of this benchmark train with: AdamW for the adapters, and a note of the memory that it took.

A process leaves `peak_RANK` in the folder in which it was started: the bytes of its greatest resident set while it
trains, less what it had when the libraries were imported and no model was there.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn


def resident(key: str = "VmRSS") -> int:
    """Bytes: of now, or with `VmHWM` the most so far."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[key].split()[0]) * 1024


def adamw(named_parameters: Sequence[tuple[str, nn.Parameter]], imported: int) -> torch.optim.Optimizer:
    """The optimizer, which is the last thing that a side asks for before it trains; `imported` are the bytes then."""
    if rank := os.environ.get("RANK"):  # a compile asks for the optimizer, too
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        atexit.register(lambda: Path(f"peak_{rank}").write_text(str(resident("VmHWM") - imported)))
    return torch.optim.AdamW([p for _, p in named_parameters if p.requires_grad], lr=1e-3)
