"""Clipping over all workers: parameters of all types, the documented mixture without a flush, metrics."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import QUICK, fxpipe
from model_files import write_model
from pipelines import pipeline_of
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import fxpipe as fxp
from fxpipe.builds.build import Build
from fxpipe.runtime.process.pipeline import Pipeline
from fxpipe.runtime.worker.clip import Clip, ExactClip, PipelinedClip

MIXED = {"forward": (0, 0, 1, 2, 2), "backward": (0, 1, 1, 1, 2), "tied": True}


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9)


@dataclass
class Seen:
    """What clipping met, by worker and minibatch.

    Attributes:
        raw: the gradients before it, by place among the worker's parameters.
        clipped: the same after it.
        norms: the norm it used.
    """

    raw: dict[tuple[int, int], list[Tensor | None]] = field(default_factory=dict)
    clipped: dict[tuple[int, int], list[Tensor | None]] = field(default_factory=dict)
    norms: dict[tuple[int, int], float] = field(default_factory=dict)

    def square(self, worker: int, minibatch: int) -> float:
        return sum(float(g.double().norm()) ** 2 for g in self.raw[worker, minibatch] if g is not None)

    def norm(self, workers: int, minibatch: int) -> float:
        """Of all workers' gradients of a minibatch."""
        return float(sum(self.square(w, minibatch) for w in range(workers)) ** 0.5)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen()

    def copies(parameters: Any) -> list[Tensor | None]:
        return [None if p.grad is None else p.grad.detach().clone() for p in parameters]

    def watch(kind: type[Clip]) -> None:
        measure, apply = kind.measure, kind.apply

        def measuring(self: Clip, minibatch: int) -> None:
            found.raw[self.worker, minibatch] = copies(self._parameters)
            measure(self, minibatch)

        def applying(self: Clip, minibatch: int) -> None:
            apply(self, minibatch)
            assert self.norm is not None
            found.norms[self.worker, minibatch] = self.norm
            found.clipped[self.worker, minibatch] = copies(self._parameters)

        monkeypatch.setattr(kind, "measure", measuring)
        monkeypatch.setattr(kind, "apply", applying)

    watch(ExactClip)
    watch(PipelinedClip)
    return found


# ── With a flush ────────────────────────────────────────────────────────────────────────────────────────────────────


def is_clip_grad_norm(pipeline: Pipeline, seen: Seen, minibatch: int, limit: float, names: list[str]) -> None:
    """To the last bit, from the gradients that the workers had, in the model's own order."""
    raw: dict[str, Tensor | None] = {}
    clipped: dict[str, Tensor | None] = {}
    for worker, executor in enumerate(pipeline.executors):
        raw |= zip(executor.store.trained, seen.raw[worker, minibatch], strict=True)
        clipped |= zip(executor.store.trained, seen.clipped[worker, minibatch], strict=True)
    assert set(raw) == set(names)
    parameters = []
    for name in names:
        gradient = raw[name]
        assert gradient is not None, "the plan trains only what has a gradient"
        parameters.append(nn.Parameter(torch.zeros_like(gradient)))
        parameters[-1].grad = gradient.clone()
    total = float(clip_grad_norm_(parameters, limit))
    assert {seen.norms[w, minibatch] for w in range(len(pipeline.executors))} == {total}
    for name, parameter in zip(names, parameters, strict=True):
        assert torch.equal(clipped[name], parameter.grad), name  # type: ignore[arg-type]


class Kinds(nn.Module):
    """Weights of several types."""

    def __init__(self, kinds: str) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64 if kinds == "complex" else torch.float32))
        self.b = nn.Linear(8, 8).to(torch.bfloat16 if kinds == "mixed" else torch.float32)
        self.c = nn.Linear(8, 4).to(torch.float64 if kinds == "mixed" else torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        x = (torch.tanh(self.a(x)) * self.turn).abs()
        x = torch.tanh(self.b(x.to(self.b.weight.dtype)))
        return self.c(x.to(self.c.weight.dtype)).float()


def mean_squared(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return ((model(x) - y) ** 2).mean()


def pairs(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 6, generator=generator), torch.randn(8, 4, generator=generator)) for _ in range(count)]


def kinds_of(kinds: str, schedule: str) -> Build:
    torch.manual_seed(0)
    return fxp.compile(
        Kinds(kinds), mean_squared, pairs(1)[0], workers=3, microbatches=2, schedule=schedule, policy="latest",
        forward_at=["b", "c"], backward_at=["b", "c"], cost="analytic",
    )  # fmt: skip


@pytest.mark.parametrize("kinds", ["mixed", "complex"])
def test_parameters_of_several_types(kinds: str, seen: Seen) -> None:
    build = kinds_of(kinds, "1f1b")
    pipeline = build.local(optimizer=sgd, clip_norm=0.1)
    for m, batch in enumerate(pairs(3)):
        pipeline.step(batch)
        is_clip_grad_norm(pipeline, seen, m, 0.1, [n for n, _ in Kinds(kinds).named_parameters()])
    assert max(seen.norms.values()) > 0.1
    flowing = kinds_of(kinds, "async").local(optimizer=sgd, clip_norm=0.1)
    flowing.run(pairs(5))
    assert all(torch.isfinite(value).all() for value in flowing.state_dict().values())


def test_a_worker_that_trains_nothing_passes_the_norms_on(seen: Seen) -> None:
    for frozen in ("0", "2", "4"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))
        for parameter in model.get_submodule(frozen).parameters():
            parameter.requires_grad_(False)
        build = fxp.compile(
            model, mean_squared, pairs(1)[0], workers=3, schedule="1f1b",
            forward_at=["2", "4"], backward_at=["2", "4"], cost="analytic",
        )  # fmt: skip
        pipeline = build.local(optimizer=sgd, clip_norm=0.1)
        assert [not e.store.trained for e in pipeline.executors] == [frozen == str(2 * k) for k in range(3)]
        names = [n for n, p in model.named_parameters() if p.requires_grad]
        pipeline.run(pairs(2))
        is_clip_grad_norm(pipeline, seen, 1, 0.1, names)
        flowing = build.local(optimizer=sgd, schedule="async", clip_norm=0.1)
        flowing.run(pairs(6))
        for m in range(6):
            assert seen.norms[0, m] == pytest.approx(seen.norm(3, m), rel=1e-6)


# ── Without a flush ─────────────────────────────────────────────────────────────────────────────────────────────────


def mixture(seen: Seen, elements: list[int], microbatches: int, worker: int, m: int, start: int, stop: int) -> float:
    """The norm that the update of minibatch `m` uses by the documentation.

    Of every worker before, the newest gradients that had come down with the last first-microbatch forward that ran
    before the update; forwards run in flat order, N−1−k of them ahead of worker k's backwards.

    Args:
        elements: of each worker's parameters.
        start, stop: the minibatches between two flushes that `m` lies in.
    """
    workers = len(elements)
    square = sum(seen.square(w, m) for w in range(worker, workers))
    known = sum(elements[worker:])
    flat = m * microbatches + microbatches - 1 + workers - 1 - worker
    forward = min(flat // microbatches, stop - 1)
    for other in range(worker):
        updates = max(start, (forward * microbatches - (workers - 1 - other)) // microbatches)
        if updates:
            square += seen.square(other, updates - 1)
            known += elements[other]
    return float((square * sum(elements) / known) ** 0.5) if known else 0.0


@pytest.mark.parametrize("flush_at", [None, 5])
@pytest.mark.parametrize(
    "options",
    [
        {"forward": (0, 0), "backward": (0, 0)},
        {"forward": (0, 1, 2), "backward": (0, 1, 2), "policy": "stash"},
        {"forward": (0, 1, 2, 3), "backward": (0, 1, 2, 3), "policy": "spectrain"},
        {"forward": (0, 1, 2, 3), "backward": (0, 1, 2, 3), "microbatches": 2, "policy": "pipeoptim"},
        {"forward": (0, 1, 2, 3), "backward": (0, 1, 2, 3), "microbatches": 4},
        {**MIXED, "policy": "latest"},
        {**MIXED, "policy": "lwp", "microbatches": 2},
    ],
)
def test_without_a_flush_it_is_the_documented_mixture(
    toy: Any, batches: Any, tmp_path: Path, options: dict[str, Any], flush_at: int | None, seen: Seen
) -> None:
    limit = 0.05
    built = toy(**options)
    pipeline = pipeline_of(built.save(tmp_path / "build"), sgd, clip_norm=limit)
    data = (batches * 2)[:11]
    for m, batch in enumerate(data):
        if m == flush_at:
            pipeline.flush()
        pipeline.step(batch)
    pipeline.flush()
    elements = [sum(p.numel() for p in e.store.trained.values()) for e in pipeline.executors]
    ends = sorted({0, flush_at or 0, len(data)})
    for worker, (start, stop) in itertools.product(range(built.workers), itertools.pairwise(ends)):
        for m in range(start, stop):
            expected = mixture(seen, elements, built.microbatches, worker, m, start, stop)
            found = seen.norms[worker, m]
            assert found == pytest.approx(expected, rel=1e-6), (worker, m)
            if worker == 0 or built.workers == 1:
                assert found == pytest.approx(seen.norm(built.workers, m), rel=1e-6)
            factor = min(1.0, limit / (found + 1e-6))
            for before, after in zip(seen.raw[worker, m], seen.clipped[worker, m], strict=True):
                torch.testing.assert_close(after, before * factor, rtol=1e-6, atol=0)  # type: ignore[operator]
    assert not pipeline.job.world.loopback.left


# ── In processes, and on the command line ───────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build for two workers."""
    made = tmp_path_factory.mktemp("clip")
    result = fxpipe("compile", write_model(made), "-o", made / "build", "--fp-cut", "blocks.2", *QUICK)
    assert result.code == 0, result.err
    return made / "build"


@pytest.mark.parametrize("schedule", ["async", "1f1b"])
def test_metrics_hold_the_norm(compiled: Path, tmp_path: Path, schedule: str) -> None:
    def lines(*arguments: object) -> list[dict[str, Any]]:
        out = tmp_path / "out"
        said = fxpipe("run", compiled, "--local", "--schedule", schedule, "--json", "--out", out, *arguments).json
        found = [json.loads(line) for line in (out / "metrics.jsonl").open()]
        assert [line["loss"] for line in found] == said["losses"]
        return found

    free = lines()
    assert not any("grad_norm" in line for line in free)
    high = lines("--clip-norm", 1e6)
    assert [list(line) for line in high] == [
        ["step", "loss", "epoch", "lr", "grad_norm", "seconds", "samples_per_second", "tflops_per_device"]
    ] * len(free)
    assert [line["loss"] for line in high] == [line["loss"] for line in free]
    low = lines("--clip-norm", min(line["grad_norm"] for line in high) / 2)
    assert low[0]["grad_norm"] == high[0]["grad_norm"], "the norm is that before clipping"
    assert [line["loss"] for line in low] != [line["loss"] for line in free]


@pytest.mark.parametrize("value", ["0", "-1", "nan", "much"])
def test_bad_limits_are_refused(compiled: Path, tmp_path: Path, value: str) -> None:
    result = fxpipe("run", compiled, "--local", "--clip-norm", value, "--out", tmp_path / "out")
    assert result.code == 2, result
    assert "--clip-norm" in result.err
    assert not (tmp_path / "out").exists()
