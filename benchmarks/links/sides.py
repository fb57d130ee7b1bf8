"""What a contender is to the process that trains it, and the user's file that all of them train."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn, optim

Batch = tuple[Tensor, Tensor]


class Task(Protocol):
    """A file of models/: what `fxpipe compile` takes, with the model as a sequence of pieces and the loss apart."""

    def model(self) -> nn.Sequential: ...

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor: ...

    def train_data(self) -> Sequence[Batch]: ...

    def optimizer(self, named_parameters: list[tuple[str, nn.Parameter]]) -> optim.Optimizer: ...


class Side(Protocol):
    """One worker of a contender of torch's."""

    def step(self, batch: Batch) -> None:
        """Train this worker's part of a minibatch, which every worker is given as a whole."""

    def losses(self) -> list[float]:
        """Those of all minibatches so far; of this worker's samples, or none if it does not have them."""


def load_task(path: Path) -> Task:
    """The model file, as a module."""
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(f"task_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    task: Task = module
    return task
