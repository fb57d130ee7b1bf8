"""The store holds as many copies of its weights as the policy says it costs, and no run makes it grow."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines import pipeline_of, sgd
from torch import Tensor, nn

import fxpipe
from fxpipe.policy import copies, make
from fxpipe.policy.optimizers.error_feedback import ErrorFeedback
from fxpipe.runtime.process.pipeline import Pipeline
from fxpipe.runtime.worker.gradients import GradientSum
from fxpipe.runtime.worker.update import AroundStep
from fxpipe.runtime.worker.versions import ReadVersions
from fxpipe.runtime.worker.weights import WeightStore

LINE = {"forward": (0, 0, 1, 1, 2, 2, 3, 3), "backward": (0, 0, 1, 1, 2, 2, 3, 3)}
MIXED = {"forward": (0, 0, 1, 2, 2), "backward": (0, 1, 1, 1, 2), "tied": True}
POLICIES = [
    *(("latest", 1), ("stash", 1), ("stash", 2), ("vertical", 2), ("2bw", 4), ("2bw+predict", 4), ("2bw+ef", 4)),
    *(("spectrain", 1), ("spectrain", 4), ("spectrain+ef", 4), ("stash+ef", 1)),
    *(("pipeoptim", 2), ("pipeoptim+keep", 1), ("xpipe", 2), ("lwp", 1), ("lwp+ef", 2)),
]
SHAPED = list(zip(itertools.cycle([LINE, MIXED]), POLICIES, strict=False))


def fed(toy: Any, batches: Any, tmp_path: Path, policy: str, microbatches: int) -> Pipeline:
    """Four workers in a line, with minibatches in flight."""
    pipeline = pipeline_of(toy(**LINE, policy=policy, microbatches=microbatches).save(tmp_path / "build"), sgd)
    for batch in batches * 2:
        pipeline.step(batch)
    return pipeline


def held(store: WeightStore) -> int:
    """The most copies that there are of one of the worker's parameters, beside the live one.

    What waits to be used again (`give_back`) takes as much memory as what is in use, so it counts.
    """
    most = 0
    for name, live in store.trained.items():
        found = {
            id(copy[name]) for key, copy in store.versions._held.items() if key[0] == store.worker and name in copy
        }
        found |= {id(predicted[name]) for predicted in store.versions.predictions.made.values() if name in predicted}
        found.discard(id(live))
        predictor = store.versions.predictions.predictor
        if predictor is not None:
            found |= {id(tensor) for tensor in predictor._spare[id(live)]}
            found |= {id(predictor._update[id(live)])} if id(live) in predictor._update else set()
        feedbacks = [
            part.work for part in store.parts if isinstance(part, AroundStep) and isinstance(part.work, ErrorFeedback)
        ]
        for late in (late for feedback in feedbacks for late in feedback._late):
            spare = [] if late.spare is None else [late.spare]
            found |= {id(kept[i]) for i, w in enumerate(late.weights) if w is live for kept in (*late.steps, *spare)}
        most = max(most, len(found))
    return most


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """By worker: the most copies at any moment at which the store has just done something."""
    found: dict[int, int] = {}

    store_of: dict[ReadVersions, WeightStore] = {}
    begin = WeightStore.begin

    def beginning(self: WeightStore, *arguments: Any) -> None:
        store_of[self.versions] = self
        begin(self, *arguments)

    def watch(kind: type, name: str) -> None:
        inner = getattr(kind, name)

        def watching(self: Any, *arguments: Any) -> Any:
            result = inner(self, *arguments)
            store = self if isinstance(self, WeightStore) else store_of.get(self)
            if store is not None:
                found[store.worker] = max(found.get(store.worker, 0), held(store))
            return result

        monkeypatch.setattr(kind, name, watching)

    monkeypatch.setattr(WeightStore, "begin", beginning)
    watch(WeightStore, "settle")
    for name in ("read", "release", "leave", "_take", "_send_copies_of"):
        watch(ReadVersions, name)
    return found


@pytest.mark.parametrize(("policy", "microbatches"), POLICIES)
def test_as_many_copies_as_the_policy_says(
    toy: Any, batches: Any, tmp_path: Path, policy: str, microbatches: int, most: dict[int, int]
) -> None:
    """Each worker has a layer whose weight both passes read; a flush takes no more and leaves nothing."""
    pipeline = fed(toy, batches, tmp_path, policy, microbatches)
    assert tuple(most[worker] for worker in range(4)) == copies(make(policy), pipeline.recipe.schedule)
    before = dict(most)
    pipeline.flush()
    assert most == before
    for executor in pipeline.executors:
        assert not executor.store.versions._held
        assert not executor.store.versions.predictions.made


@pytest.mark.parametrize(("shape", "case"), SHAPED)
def test_a_long_run_does_not_grow(
    toy: Any, batches: Any, tmp_path: Path, shape: dict[str, Any], case: tuple[str, int]
) -> None:
    policy, microbatches = case
    folder = toy(**shape, policy=policy, microbatches=microbatches).save(tmp_path / "build")
    pipeline = pipeline_of(folder, sgd)
    sizes: list[tuple[int, ...]] = []
    for batch in batches * 6:
        pipeline.step(batch)
        stores = [executor.store for executor in pipeline.executors]
        sizes.append(
            (
                *(len(store.versions._held) for store in stores),
                *(len(store.versions.predictions.made) for store in stores),
                *(sum(len(messages) for messages in store.versions._unread._versions.values()) for store in stores),
                *(
                    sum(len(tensors) for tensors in store.versions.predictions.predictor._spare.values())
                    for store in stores
                    if store.versions.predictions.predictor is not None
                ),
                pipeline.job.world.loopback.left,
            )
        )
    assert len(set(sizes[10:])) == 1, "steady: every step leaves as much as the one before"


class Weights(torch.autograd.Function):
    """A product whose gradient of the weights is the weights themselves, in the same memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (weight,) = ctx.saved_tensors
        return gradient @ weight.t(), weight


class Strange(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Weights.apply(x, self.weight))


def pairs(count: int, rows: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        tuple(torch.randn(rows, 8, dtype=torch.float64, generator=generator) for _ in range(2))  # type: ignore[misc]
        for _ in range(count)
    ]


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


@pytest.mark.parametrize(
    ("policy", "microbatches", "clip_norm"),
    [("2bw", 3, None), ("2bw+predict", 3, None), ("xpipe", 3, None), ("vertical", 1, 0.3)],
)
def test_a_gradient_that_is_a_weight_is_not_written(
    policy: str, microbatches: int, clip_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept and predicted weights, too: sums and clipping write into gradients."""
    torch.manual_seed(0)
    data = pairs(8, 6)
    build = fxpipe.compile(
        nn.Sequential(*(Strange(8, 8, bias=False) for _ in range(3))).double(),
        squares,
        data[0],
        workers=3,
        microbatches=microbatches,
        forward_at=["1", "2"],
        cost="analytic",
    )

    def trained() -> dict[str, Tensor]:
        pipeline = build.local(optimizer=sgd, policy=policy, clip_norm=clip_norm)
        pipeline.run(data)
        return pipeline.state_dict()

    found = trained()
    add = GradientSum.add
    monkeypatch.setattr(GradientSum, "add", lambda self, gs, taken: add(self, [g.clone() for g in gs], taken))
    for name, value in trained().items():
        assert torch.equal(found[name], value), name
