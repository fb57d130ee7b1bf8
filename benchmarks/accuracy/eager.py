"""Whether the synchronous baseline is what a plain PyTorch loop computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from training import SYNCHRONOUS, Run, make_optimizer, make_scheduler, pipeline_of
from workloads import WORKLOADS, loss


@dataclass(frozen=True)
class EagerCheck:
    """Some steps of the one-worker build beside the same steps in eager PyTorch."""

    workload: str
    optimizer: str
    rate: float
    steps: int

    def execute(self) -> dict[str, Any]:
        """The greatest difference of a parameter or buffer after these steps, and the greatest value."""
        workload = WORKLOADS[self.workload]
        run = Run(self.workload, self.optimizer, SYNCHRONOUS, 1, 1, self.rate, seed=0, steps=self.steps, points=1)
        pipeline = pipeline_of(run)
        model = workload.make(seed=0)
        optimizer = make_optimizer(self.optimizer, list(model.named_parameters()), self.rate)
        scheduler = make_scheduler(optimizer, self.steps)
        for _, batch in zip(range(self.steps), workload.batches(seed=0), strict=False):
            pipeline.step(batch)
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
            scheduler.step()
        eager, found = model.state_dict(), pipeline.state_dict()
        return {
            "difference": max(float((found[name] - value).abs().max()) for name, value in eager.items()),
            "greatest": max(float(value.abs().max()) for value in eager.values()),
            "equal": all(torch.equal(found[name], value) for name, value in eager.items()),
        }
