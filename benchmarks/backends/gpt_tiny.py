"""gpt.py, tiny: for `--quick`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpt
import models
from gpt import loss, model, optimizer, train_data

__all__ = ["loss", "model", "optimizer", "train_data"]
gpt.MODEL, gpt.BATCH = models.TINY["gpt-tiny"]
