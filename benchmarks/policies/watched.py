"""The efficiency benchmark's GPT as a model file whose workers say how much memory they needed to train it.

Worker k leaves `peak_k`, the bytes of its greatest resident set, in the folder in which the run was started. Python,
torch and the reading of weights are over when the watch begins: `optimizer` is the last thing a worker asks for.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from fxpipe.task.model_file import default_optimizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "efficiency"))
from model import loss, model, train_data

__all__ = ["loss", "model", "optimizer", "train_data"]

MMAP_THRESHOLD = -3  # of mallopt(3)


def optimizer(named_parameters: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """SGD with momentum, as by default."""
    if "RANK" in os.environ:
        _watch(Path(f"peak_{os.environ['RANK']}"))
    return default_optimizer(named_parameters)


def _watch(path: Path) -> None:
    """From here on every tensor lies in pages of its own, which go back when it goes.

    A worker's heap otherwise keeps what was freed, and where the gaps are is a matter of luck: its peak varies by more
    from run to run than policies differ.
    """
    ctypes.CDLL("libc.so.6").mallopt(MMAP_THRESHOLD, 1 << 16)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    atexit.register(_leave_peak, path)


def _leave_peak(path: Path) -> None:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    path.write_text(str(int(lines["VmHWM"].split()[0]) * 1024))
