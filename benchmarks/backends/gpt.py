"""The GPT of the end-to-end part, as a model file for `fxpipe compile`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
import models

MODEL, BATCH = models.MODELS["gpt-256"]


def model() -> nn.Module:
    """Width 256."""
    return MODEL()


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Cross entropy of the next byte."""
    return models.loss(model, batch)


class Batches:
    """Random bytes: only the time counts here."""

    def __len__(self) -> int:
        return 1000

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            yield BATCH()


def train_data() -> Batches:
    """An epoch."""
    return Batches()


def optimizer(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """SGD, so that the engines' share of a step is large."""
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.01)
