"""What a policy does to weights, counted from the schedule, against what a pipeline does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from cached import cuts, lowered
from small_models import CASES
from torch import Tensor

from fxpipe.plan.cost_records import PolicyTimes
from fxpipe.policy import make as make_policy
from fxpipe.policy.costs import predictions, seconds_per_owned_byte
from fxpipe.policy.optimizers.predict import Predictor
from fxpipe.schedule import make as make_schedule


@pytest.mark.parametrize(
    ("policy", "workers", "microbatches", "expected"),
    [
        ("latest", 3, 1, [0, 0, 0]),
        ("spectrain", 2, 1, [1, 0]),
        ("spectrain", 3, 1, [1, 1, 1]),
        ("spectrain", 2, 2, [1, 0]),
        ("spectrain+ef", 4, 4, [1, 1, 1, 1]),
        ("pipeoptim", 3, 1, [1, 1, 0]),
        ("2bw+predict", 4, 4, [1, 1, 1, 1]),
    ],
)
def test_predictions_are_those_of_a_run(
    policy: str, workers: int, microbatches: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = make_schedule("async", workers, microbatches)
    assert [predictions(make_policy(policy), schedule, worker) for worker in range(workers)] == expected

    made: Counter[int] = Counter()
    predict = Predictor.predict

    def counted(self: Predictor, steps: int, subset: Any = None) -> list[Tensor]:
        made[id(self)] += 1
        return predict(self, steps, subset)

    build = lowered("conv", microbatches, workers=workers, policy=policy, **cuts(CASES["conv"], workers, 0))
    pipeline = build.local(optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.01, momentum=0.9))
    batch = CASES["conv"].batches(1)[0]
    for _ in range(6 * workers):
        pipeline.step(batch)
    monkeypatch.setattr(Predictor, "predict", counted)
    for _ in range(10):
        pipeline.step(batch)
    predictors = [executor.store.versions.predictions.predictor for executor in pipeline.executors]
    assert [made[id(p)] / 10 if p else 0 for p in predictors] == expected


def test_seconds_are_of_what_a_worker_does() -> None:
    times = PolicyTimes(prediction=1.0, repetition=10.0, repairs=(("ef", 100.0),))
    two = make_schedule("async", 2, 1)
    assert seconds_per_owned_byte(make_policy("spectrain"), two, times) == (1.0, 0.0)
    assert seconds_per_owned_byte(make_policy("spectrain+ef"), two, times) == (101.0, 0.0)
    assert seconds_per_owned_byte(make_policy("lwp"), two, times) == (10.0, 0.0)
    assert seconds_per_owned_byte(make_policy("latest+ef"), two, times) == (100.0, 0.0)
    braked = PolicyTimes(repairs=(("ef", 100.0), ("brake", 3.0)))
    assert seconds_per_owned_byte(make_policy("latest+ef+brake"), two, braked) == (103.0, 3.0)
    assert seconds_per_owned_byte(make_policy("latest"), make_schedule("1f1b", 2, 4), times) == (0.0, 0.0)
