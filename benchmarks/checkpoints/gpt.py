"""The byte GPT of `examples/gpt.py`, two samples a minibatch: the less a step takes, the more a checkpoint costs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import gpt as example

example.BATCH = 2
model, loss, train_data = example.model, example.loss, example.train_data
optimizer, lr_scheduler = example.optimizer, example.lr_scheduler
