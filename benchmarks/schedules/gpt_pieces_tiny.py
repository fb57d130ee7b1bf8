"""gpt_pieces.py, tiny: for `--quick`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpt_pieces
from gpt_pieces import loss, model, optimizer, train_data

__all__ = ["loss", "model", "optimizer", "train_data"]
gpt_pieces.WIDTH, gpt_pieces.CONTEXT = 64, 32
