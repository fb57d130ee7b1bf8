"""Training through the runtime equals training in eager PyTorch."""

from __future__ import annotations

import math

import pytest
import torch
from as_eager import eager, equals_eager, error, optimizer
from cached import captured, cuts, lowered
from covering import covering
from random_cuts import random_cuts
from small_models import CASES
from torch import nn

from fxpipe.planner.cuts import Cuts
from fxpipe.planner.links import Links

STEPS = 5
Named = list[tuple[str, nn.Parameter]]


NAMES = [n for n in CASES if n != "gpt-dropout"]


@pytest.mark.parametrize(
    ("name", "schedule", "where"),
    covering(NAMES, ["gpipe", "1f1b"], [(2, 0), (2, 1), (2, -1), (3, 1), (3, -1), (4, 0), (4, 1)], strength=1),
)
def test_synchronous_schedules_equal_eager(name: str, schedule: str, where: tuple[int, int]) -> None:
    workers, shift = where
    microbatches = 2 if workers < 4 else 4
    build = lowered(name, microbatches, workers=workers, schedule=schedule, **cuts(CASES[name], workers, shift))
    equals_eager(name, STEPS, build)


@pytest.mark.parametrize(("name", "mode"), covering(NAMES, ["same", "bidirectional", "three-way"], strength=1))
def test_planned_cuts_train_as_eager(name: str, mode: str) -> None:
    links = Links(bandwidth=1e12)  # fast ones: cuts that differ are worth their messages
    build = lowered(name, 2, workers=3, schedule="1f1b", cuts=mode, links=links)
    assert build.partitions[-1].mode == mode
    equals_eager(name, STEPS, build)


@pytest.mark.parametrize(("name", "workers"), covering(NAMES, [2, 3, 4], strength=1))
def test_any_legal_cuts_train_as_eager(name: str, workers: int) -> None:
    """Forward, backward and weight gradients cut apart, parts empty, runs recomputed."""
    where = random_cuts(name, workers, seed=1)
    microbatches = 2 if workers < 4 else 4
    build = lowered(name, microbatches, workers=workers, schedule="1f1b", cuts=where, split_backward=workers != 2)
    equals_eager(name, 3, build)


@pytest.mark.parametrize(("name", "policy"), [("gpt", "latest"), ("gpt", "spectrain"), ("conv", "stash")])
def test_one_asynchronous_worker_is_plain_training(name: str, policy: str) -> None:
    case, model, _ = captured(name)
    batches = case.batches(STEPS)
    pipeline = lowered(name, workers=1).local(optimizer=optimizer, policy=policy)
    losses = pipeline.run(batches)
    expected, _ = eager(case, model, batches, 1)
    state = pipeline.state_dict()
    for entry, tensor in expected.state_dict().items():
        assert error(state[entry], tensor, 1e-3) < 1e-6, entry
    assert len(losses) == STEPS


POLICIES = ["latest", "stash", "spectrain"]


@pytest.mark.parametrize(("policy", "where"), covering(POLICIES, [(3, 1), (3, -1), (4, 1)], strength=1))
def test_with_a_zero_learning_rate_all_policies_agree(policy: str, where: tuple[int, int]) -> None:
    workers, shift = where
    case, model, _ = captured("gpt")
    batches = case.batches(6)
    build = lowered("gpt", workers=workers, **cuts(case, workers, shift))
    pipeline = build.local(
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.0, momentum=0.9), policy=policy
    )
    losses = pipeline.run(batches)
    assert losses == pytest.approx([case.loss(model, batch).item() for batch in batches], rel=1e-6)


@pytest.mark.parametrize(("policy", "where"), covering(POLICIES, [(2, 1), (3, -1), (4, 0)], strength=1))
def test_asynchronous_training_learns(policy: str, where: tuple[int, int]) -> None:
    workers, shift = where
    case, _, _ = captured("gpt-dropout")
    batch = case.batches(1)[0]
    build = lowered("gpt-dropout", workers=workers, **cuts(case, workers, shift))
    losses = build.local(optimizer=optimizer, policy=policy).run([batch] * 60)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(("name", "seed"), [("gpt", 10), ("conv", 5), ("checkpoint", 4)])
def test_any_legal_cuts_run_under_every_policy(name: str, seed: int) -> None:
    """Recomputation sees the weights that the policy gives backward: under `stash` those that forward saw."""
    where = random_cuts(name, 3, seed)
    assert where.recompute
    assert where.weights != where.backward
    batches = captured(name)[0].batches(8)
    build = lowered(name, workers=3, cuts=where, split_backward=True)
    losses = {policy: build.local(optimizer=optimizer, policy=policy).run(batches) for policy in POLICIES}
    assert all(math.isfinite(loss) for run in losses.values() for loss in run)
    assert losses["latest"] != losses["stash"]
    sent = lowered(name, workers=3, cuts=Cuts(where.forward, where.backward, where.weights), split_backward=True)
    assert sent.local(optimizer=optimizer, policy="stash").run(batches) == losses["stash"]


def test_a_pipeline_continues_after_a_flush() -> None:
    case, _, _ = captured("gpt")
    batches = case.batches(4)
    build = lowered("gpt", workers=2, **cuts(case, 2, 1))
    pipeline = build.local(optimizer=optimizer)
    pipeline.run(batches[:2])
    first = pipeline.state_dict()
    pipeline.run(batches[2:])
    second = pipeline.state_dict()
    assert any(not torch.equal(first[k], second[k]) for k in first)
    assert torch.equal(second["head.weight"], second["tok.weight"])
