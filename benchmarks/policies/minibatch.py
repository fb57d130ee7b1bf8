"""What one minibatch costs: the work of all workers together, in one process of one thread."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import fxpipe
from fxpipe.runtime.process.device import reuse_freed_memory
from fxpipe.runtime.process.pipeline import Pipeline
from fxpipe.task.model_file import load_task


class SideBySide:
    """Pipelines of one build that take turns, some steps each, so that they meet the same machine.

    Args:
        policies: the policy of each pipeline, by what the pipeline is called.
    """

    def __init__(self, model: Path, policies: Mapping[str, str], workers: int, microbatches: int) -> None:
        reuse_freed_memory()  # as the workers do
        torch.set_num_threads(1)
        torch.manual_seed(0)
        task = load_task(model)
        self.data = list(task.train_data())
        cuts: dict[str, Any] = {"workers": workers, "microbatches": microbatches, "cuts": "same", "cost": "analytic"}
        build = fxpipe.compile(task.model(), task.loss, self.data[0], **cuts)
        self.pipelines = {name: build.local(policy=policy) for name, policy in policies.items()}
        self._orders = random.Random(0)
        for pipeline in self.pipelines.values():
            self._train(pipeline, 3 * workers)  # it fills, memory is first touched, and momentum gives a direction

    def round(self, steps: int) -> dict[str, float]:
        """Seconds a minibatch of each pipeline, in a new order: CPU time, whoever else wants the core."""
        found = {}
        for name in self._orders.sample(list(self.pipelines), len(self.pipelines)):
            begin = time.process_time()
            self._train(self.pipelines[name], steps)
            found[name] = (time.process_time() - begin) / steps
        return found

    def _train(self, pipeline: Pipeline, steps: int) -> None:
        for i in range(steps):
            pipeline.step(self.data[i % len(self.data)])
