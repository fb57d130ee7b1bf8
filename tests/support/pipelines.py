"""A pipeline of a build on disk, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.process.pipeline import Pipeline
from fxpipe.runtime.process.start import open_local
from fxpipe.task.hooks import Hooks, MakeOptimizer, MakeScheduler
from fxpipe.task.model_file import Task


def optimizer(named: Any) -> torch.optim.Optimizer:
    """Of SGD with momentum and weight decay."""
    return torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9, weight_decay=1e-3)


def sgd(named: Any) -> torch.optim.Optimizer:
    """With momentum alone, and a greater rate."""
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


def pipeline_of(
    folder: Path, optimizer: MakeOptimizer, lr_scheduler: MakeScheduler | None = None, **options: Any
) -> Pipeline:
    """All workers of the build in `folder`, also of one that was written by hand."""
    return open_local(folder, Task(Hooks(optimizer=optimizer, lr_scheduler=lr_scheduler)), PipelineOptions(**options))
