"""Readers of encoded weight copies: both ends agree, owners are exact, and readers follow them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines import pipeline_of, sgd
from torch import Tensor

import fxpipe
from fxpipe.codecs import CODECS, register
from fxpipe.codecs.casts import Cast
from fxpipe.policy.copy_messages import CopyMessages, Filling
from fxpipe.runtime.process.pipeline import Pipeline

MIXED = {"forward": (0, 0, 1, 2, 2), "backward": (0, 1, 1, 1, 2), "tied": True}
BACK = {"forward": (0, 1, 2, 2), "backward": (0, 0, 1, 2), "tied": True}
POLICIES = [
    ("latest", 1), ("stash", 2), ("vertical", 1), ("2bw", 2), ("2bw+predict", 2), ("spectrain", 1), ("spectrain", 2),
    ("pipeoptim", 1), ("pipeoptim+keep", 2), ("xpipe", 2), ("lwp", 1), ("lwp+ef", 2), ("spectrain+ef", 1),
]  # fmt: skip
SHAPED = list(zip(itertools.cycle([MIXED, BACK]), POLICIES, strict=False))


class Single(Cast):
    """float64 as float32: of differences, next to nothing is lost."""

    name = "single_of_tests"
    to = "float32"


@pytest.fixture(autouse=True)
def single() -> Any:
    register(Single)
    yield
    del CODECS[Single.name]


@pytest.fixture
def pipeline(toy: Any, tmp_path: Path) -> Callable[..., Pipeline]:
    def made(weights_codec: str, shape: Mapping[str, Any], **options: Any) -> Pipeline:
        folder = tmp_path / str(len(list(tmp_path.iterdir()))) / "build"
        return pipeline_of(toy(**shape, **options, weights_codec=weights_codec).save(folder), sgd)

    return made


@pytest.mark.parametrize(("shape", "case"), SHAPED)
def test_differences_lose_next_to_nothing_with_a_fine_codec(
    batches: Any, pipeline: Any, shape: dict[str, Any], case: tuple[str, int]
) -> None:
    """Through a flush, too: a reader that took a wrong base would be far off."""
    policy, microbatches = case
    found = []
    for name in ("", Single.name):
        made = pipeline(name, shape, policy=policy, microbatches=microbatches)
        losses = [*made.run(batches), *made.run(batches)]
        found.append((losses, made.state_dict()))
    (losses, weights), (others, other_weights) = found
    assert others == pytest.approx(losses, rel=1e-6)
    assert other_weights.keys() == weights.keys()
    for key, value in weights.items():
        assert torch.allclose(other_weights[key], value, rtol=1e-6, atol=1e-9), key


@pytest.mark.parametrize(("codec", "bound"), [("int8", 0.02), ("topk:0.3", 3.0), ("lowrank:2", 3.0)])
def test_readers_follow_and_do_not_drift(batches: Any, pipeline: Any, codec: str, bound: float) -> None:
    """Over 240 updates, in units of how far the update before moved the weight."""
    made = pipeline(codec, MIXED, policy="latest")
    apart: list[float] = []
    true: dict[tuple[int, int], dict[str, Tensor]] = {}
    for batch in batches * 40:
        made.step(batch)
        for executor in made.executors:
            store = executor.store
            true[executor.worker, store.version] = {n: p.detach().clone() for n, p in store.trained.items()}
        for executor in made.executors:
            for (owner, version, _), tensors in executor.store.versions.copies._bases.items():
                if version > 1:
                    now, before = true[owner, version], true[owner, version - 1]
                    apart += [((t - now[n]).norm() / (now[n] - before[n]).norm()).item() for n, t in tensors.items()]
    assert len(apart) > 240
    assert 0 < max(apart) < bound
    assert max(apart[-100:]) < 2 * max(apart[:100])


@pytest.mark.parametrize(("shape", "case"), SHAPED)
def test_bases_do_not_grow_and_are_those_of_the_table(
    batches: Any, pipeline: Any, shape: dict[str, Any], case: tuple[str, int]
) -> None:
    policy, microbatches = case
    made = pipeline("int8", shape, policy=policy, microbatches=microbatches)
    sizes = []
    for batch in batches * 4:
        made.step(batch)
        of_worker = []
        for executor in made.executors:
            held = executor.store.versions.copies
            sent = sum(t.nbytes for _, of in held._made.values() for t in of.values())
            received = sum(t.nbytes for of in held._bases.values() for t in of.values())
            of_worker.append((sent, received))
        sizes.append(of_worker)
    assert all(size == sizes[-1] for size in sizes[10:])
    demand = made.recipe.demand
    messages, workers = CopyMessages(demand), range(made.plan.workers)
    kept = {(o, r): messages.base_bytes(o, r, 20, Filling()) for o in workers for r in demand.readers(o)}
    for worker in workers:
        sent = sum(size for (owner, _), size in kept.items() if owner == worker)
        received = sum(size for (_, reader), size in kept.items() if reader == worker)
        assert sizes[-1][worker] == (sent, received)
    assert sum(sent for sent, _ in sizes[-1]) > 0


@pytest.mark.parametrize("how", [{"autocast": "bf16"}, {"params": "bf16"}])
def test_copies_that_readers_take_cast_are_sent_so(
    how: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as where stages cast them, with half of the bytes; a norm's weights stay whole under autocast."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)), torch.nn.LayerNorm(32))
    batches = [torch.randn(4, 32) for _ in range(6)]

    def loss(model: torch.nn.Module, x: Tensor) -> Tensor:
        return model(x.to(torch.bfloat16)).float().square().mean()

    options: dict[str, Any] = {"workers": 2, "schedule": "async", "policy": "spectrain", "cost": "analytic", **how}
    found, sizes = [], []
    for inside in (False, True):
        if inside:
            monkeypatch.setattr("fxpipe.passes.cast_weights._only_type", lambda weight: None)
        build = fxpipe.compile(net, loss, batches[0], forward_at=["1"], backward_at=["3"], **options)
        casts = {row.name: row.cast for row in build.plan.parameters}
        assert (casts["1.weight"] is None) == inside
        assert (casts["4.weight"] is None) == (inside or "autocast" in how)
        build.save(folder := tmp_path / str(inside))
        made = pipeline_of(folder, sgd)
        for batch in batches:
            made.step(batch)
        made.flush()
        found.append(made.state_dict())
        messages = CopyMessages(made.recipe.demand)
        sizes.append(messages.pack(0, 1, 5, 1, Filling()).bytes)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert 0 < sizes[0] < 0.6 * sizes[1]
