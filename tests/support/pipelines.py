"""A pipeline of a build on disk, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.process.local import LocalPipeline
from fxpipe.task.hooks import ObjectTask
from fxpipe.task.model_file import MakeOptimizer, MakeScheduler


def pipeline_of(
    folder: Path, optimizer: MakeOptimizer, lr_scheduler: MakeScheduler | None = None, **options: Any
) -> LocalPipeline:
    """All workers of the build in `folder`, also of one that was written by hand."""
    return LocalPipeline(folder, ObjectTask(optimizer, lr_scheduler), PipelineOptions(**options))
