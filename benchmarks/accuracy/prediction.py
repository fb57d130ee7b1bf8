"""How far predicted weights are from those that come, beside how far stale ones are: plain PyTorch, no pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from training import make_optimizer
from workloads import WORKLOADS, loss

from fxpipe.policy.optimizers.predict import Predictor

FURTHEST = 8  # updates


@dataclass(frozen=True)
class PredictionError:
    """Predictions from sampled versions of one synchronous training, compared with the versions that came.

    Attributes:
        every: updates from one sampled version to the next; at least FURTHEST.
    """

    workload: str
    optimizer: str
    rate: float
    seed: int
    steps: int
    every: int

    def execute(self) -> dict[str, Any]:
        """Root mean square errors over all weights and sampled versions, for 1 to FURTHEST updates ahead."""
        workload = WORKLOADS[self.workload]
        model = workload.make(self.seed)
        parameters = list(model.parameters())
        optimizer = make_optimizer(self.optimizer, list(model.named_parameters()), self.rate)
        predictor = Predictor(optimizer, parameters)
        stale: list[list[float]] = [[] for _ in range(FURTHEST)]
        predicted: list[list[float]] = [[] for _ in range(FURTHEST)]
        sample: list[Tensor] = []  # the sampled version, then its predictions for 1, 2, … updates ahead
        for version, batch in zip(range(1, self.steps + 1), workload.batches(self.seed), strict=False):
            optimizer.zero_grad()
            loss(model, batch).backward()
            predictor.before_step()
            optimizer.step()
            predictor.after_step()
            ahead = version % self.every
            if sample and 1 <= ahead <= FURTHEST:
                weights = _flat(parameters)
                stale[ahead - 1].append(_mean_square(sample[0], weights))
                predicted[ahead - 1].append(_mean_square(sample[ahead], weights))
            if ahead == 0:
                sample = [_flat(predictor.predict(steps)) for steps in range(FURTHEST + 1)]
        return {"stale": _roots(stale), "predicted": _roots(predicted)}


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _mean_square(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).square().mean())


def _roots(squares: Sequence[Sequence[float]]) -> list[float]:
    return [(sum(each) / len(each)) ** 0.5 for each in squares]
