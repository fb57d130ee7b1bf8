"""gpt.py, tiny: for `--quick`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "schedules"))
from gpt_pieces_tiny import loss, model, optimizer, train_data

__all__ = ["loss", "model", "optimizer", "train_data"]
