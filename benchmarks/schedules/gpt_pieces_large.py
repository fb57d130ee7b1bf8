"""gpt_pieces.py with minibatches of 64 windows: most of its memory is what forwards save."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpt_pieces
from gpt_pieces import loss, model, optimizer, train_data

__all__ = ["loss", "model", "optimizer", "train_data"]
gpt_pieces.BATCH = 64
