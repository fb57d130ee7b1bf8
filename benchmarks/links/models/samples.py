"""Minibatches for the models of this folder, always the same, of the accuracy study's data."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "accuracy"))
import data

Batch = tuple[Tensor, Tensor]
PACKAGES, VOCABULARY, WORDS = data.PACKAGES, data.VOCABULARY, data.WORDS
BATCHES = 320
"""Minibatches of `train_data()`."""


def digits(batch: int) -> list[Batch]:
    """Images [batch, 1, 8, 8] and labels [batch]: every image once, then all of them in another order."""
    return _minibatches(data.digits(), batch)


def lines(batch: int) -> list[Batch]:
    """Hashed words [batch, WORDS], and the numbers of the packages that they are from [batch]."""
    return _minibatches(data.lines(), batch)


def windows(batch: int, length: int) -> list[Batch]:
    """Bytes [batch, length] of the standard library's top-level modules, and the same windows one byte later."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - length, (BATCHES, batch, 1), generator=generator)
    found = text[starts + torch.arange(length + 1)]
    return [(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in found]


def _minibatches(known: data.Data, batch: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    made: list[Batch] = []
    while len(made) < BATCHES:
        order = torch.randperm(len(known.targets), generator=generator)
        made += [(known.inputs[some], known.targets[some]) for some in order.split(batch) if len(some) == batch]
    return made[:BATCHES]
