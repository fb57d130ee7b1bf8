"""Clipping over all workers: as eager PyTorch clips where a schedule flushes, by the documented mixture where not."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import runpy
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from cached import captured, cuts, lowered
from commands import QUICK, fxpipe
from covering import covering
from model_files import write_model
from pipelines import pipeline_of
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import fxpipe as fxp
from fxpipe.build.build import Build
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.launch import launch
from fxpipe.runtime.process.local import LocalPipeline
from fxpipe.runtime.process.local_run import run_local
from fxpipe.runtime.worker.clip import Clip, ExactClip, PipelinedClip
from fxpipe.task.batch import split

STEPS = 4
DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"
MIXED = {"forward": (0, 0, 1, 2, 2), "backward": (0, 1, 1, 1, 2), "tied": True}


def grouped(named: Any) -> torch.optim.Optimizer:
    """Matrices and vectors in groups of their own, at rates of their own."""
    groups = [
        {"params": [p for _, p in named if p.dim() > 1], "lr": 0.05},
        {"params": [p for _, p in named if p.dim() <= 1], "lr": 0.2},
    ]
    return torch.optim.SGD([g for g in groups if g["params"]], momentum=0.9)


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
        announce, apply = kind.announce, kind.apply

        def announcing(self: Clip, minibatch: int, parameters: Any) -> None:
            found.raw[self.worker, minibatch] = copies(parameters)
            announce(self, minibatch, parameters)

        def applying(self: Clip, minibatch: int, parameters: Any) -> None:
            apply(self, minibatch, parameters)
            assert self.norm is not None
            found.norms[self.worker, minibatch] = self.norm
            found.clipped[self.worker, minibatch] = copies(parameters)

        monkeypatch.setattr(kind, "announce", announcing)
        monkeypatch.setattr(kind, "apply", applying)

    watch(ExactClip)
    watch(PipelinedClip)
    return found


# ── With a flush ────────────────────────────────────────────────────────────────────────────────────────────────────


def eager(name: str, microbatches: int, limit: float) -> tuple[list[float], list[float], nn.Module]:
    """Losses, norms and the model of ordinary training with clipping."""
    case, model, _ = captured(name, microbatches)
    model = copy.deepcopy(model)
    optimizer = grouped([(n, p) for n, p in model.named_parameters() if p.requires_grad])
    losses, norms = [], []
    for batch in case.batches(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for part in split(batch, microbatches):
            loss = case.loss(model, part) / microbatches
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(float(clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
    return losses, norms, model


@pytest.mark.parametrize(  # frozen, without a gradient; tied
    ("name", "workers", "microbatches"), covering(["dict", "gpt"], [1, 2, 3, 4], [1, 4], strength=1)
)
def test_with_a_flush_it_is_eager(name: str, workers: int, microbatches: int, seen: Seen) -> None:
    case, model, _ = captured(name, microbatches)
    _, free, _ = eager(name, microbatches, float("inf"))
    limit = statistics.median(free)
    losses, norms, trained = eager(name, microbatches, limit)
    assert min(norms) < limit < max(norms), "some minibatches are clipped, some are not"
    build = lowered(name, microbatches, workers=workers, schedule="1f1b", **cuts(case, workers, 1))
    own = [n for n, _ in model.named_parameters() if n in {p.name for p in build.plan.parameters if p.trained}]
    for schedule in ("1f1b", "gpipe"):
        pipeline = build.local(optimizer=grouped, schedule=schedule, clip_norm=limit)
        found = [float(pipeline.step(batch)) for batch in case.batches(STEPS)]
        assert found == pytest.approx(losses, rel=1e-5)
        assert [seen.norms[0, m] for m in range(STEPS)] == pytest.approx(norms, rel=1e-4)
        state = pipeline.state_dict()
        for n, p in trained.named_parameters():
            torch.testing.assert_close(state[n], p.detach(), rtol=1e-4, atol=1e-6)
        for m in range(STEPS):
            is_clip_grad_norm(pipeline, seen, m, limit, own)


def is_clip_grad_norm(pipeline: LocalPipeline, seen: Seen, minibatch: int, limit: float, names: list[str]) -> None:
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


@pytest.mark.parametrize("limit", [1e9, float("inf")])
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1f1b", "microbatches": 2},
        {"schedule": "async", "policy": "spectrain"},
        {"schedule": "async", "policy": "pipeoptim", "microbatches": 2},
    ],
)
def test_a_limit_that_nothing_reaches_changes_no_bit(
    toy: Any, batches: Any, tmp_path: Path, options: dict[str, Any], limit: float
) -> None:
    folder = toy(**MIXED, **options).save(tmp_path / "build")
    pipelines = [pipeline_of(folder, sgd, clip_norm=norm) for norm in (None, limit)]
    assert pipelines[0].run(batches) == pipelines[1].run(batches)
    states = [p.state_dict() for p in pipelines]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert pipelines[0].executors[0].store.updater.clip is None


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


@pytest.mark.parametrize("flush_at", [None, 2, 5])
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
    assert not pipeline._mailboxes[0].letters


def test_in_the_middle_of_a_run_the_age_is_the_distance_and_one(
    toy: Any, batches: Any, tmp_path: Path, seen: Seen
) -> None:
    """Worker j < k counts on worker k as it was in minibatch m − (k−j) − 1."""
    built = toy(forward=(0, 1, 2, 3), backward=(0, 1, 2, 3), policy="latest")
    pipeline = pipeline_of(built.save(tmp_path / "build"), sgd, clip_norm=0.05)
    pipeline.run(batches * 2)
    for k, m in itertools.product(range(4), range(4, 9)):
        square = sum(seen.square(j, m - (k - j) - 1 if j < k else m) for j in range(4))
        assert seen.norms[k, m] == pytest.approx(square**0.5, rel=1e-6)


def digits() -> tuple[nn.Module, Any, list[Any]]:
    """The example's model, loss and 60 minibatches of its data."""
    names = runpy.run_path(str(DIGITS))
    torch.manual_seed(0)
    model, data = names["model"](), names["train_data"]()
    return model, names["loss"], [batch for _ in range(2) for batch in data][:60]


@pytest.mark.slow
def test_how_far_the_mixture_is_from_the_exact_norm(seen: Seen) -> None:
    """The U-Net of `examples/digits.py` on four workers, 60 minibatches from scratch, nearly all of them clipped.

    Measured, over workers 1 to 3 and two policies: the norm is off by 1 to 5 % in the median, by less than 12 % three
    times out of four. It is at most 18 % too low, and up to 5 times too high, right after a minibatch with a large
    gradient or while the gradients fall fast. So a gradient is scaled by 0.43 to 1.22 times the exact factor: what
    is not exact takes shorter steps rather than longer ones. Worker 0 is exact.
    """
    limit, workers = 1.0, 4
    model, loss, batches = digits()
    build = fxp.compile(
        model, loss, batches[0], workers=workers, schedule="async", policy="latest", cost="analytic",
        forward_at=["down1", "middle", "up2"], backward_at=["down1", "middle", "up2"],
    )  # fmt: skip
    for policy in ("latest", "spectrain"):
        losses = build.local(optimizer=sgd, policy=policy, clip_norm=limit).run(batches)
        assert losses[-1] < 0.3 * losses[0]
        exact = [seen.norm(workers, m) for m in range(len(batches))]
        assert sum(norm > limit for norm in exact) > 40
        for worker in range(workers):
            ratios = [seen.norms[worker, m] / norm for m, norm in enumerate(exact)]
            errors = sorted(abs(ratio - 1) for ratio in ratios)
            if worker == 0:
                assert errors[-1] < 1e-6
                continue
            assert 0 < statistics.median(errors) < 0.12, (policy, worker)
            assert errors[int(0.75 * len(errors))] < 0.3, (policy, worker)
            assert min(ratios) > 0.7, (policy, worker)
            assert max(ratios) < 10, (policy, worker)
            for m, norm in enumerate(exact):
                factor = min(1, limit / seen.norms[worker, m]) / min(1, limit / norm)
                assert 0.25 < factor < 1.45, (policy, worker, m)
        for m in range(len(batches)):
            squares = [
                float(torch.stack([g.norm() for g in seen.clipped[w, m] if g is not None]).norm()) ** 2
                for w in range(workers)
            ]
            assert sum(squares) ** 0.5 < 1.25 * limit


# ── In processes, and on the command line ───────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(
    "options",
    [{"schedule": "1f1b", "microbatches": 2}, {"schedule": "async", "policy": "spectrain", "microbatches": 2}],
)
def test_processes_clip_as_one_process_does(toy: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    mixed = {"forward": (0, 0, 1, 1), "backward": (0, 1, 1, 1), "tied": True}
    folder = toy(**mixed, **options).save(tmp_path / "build")
    wanted = RunOptions(str(folder), steps=15, clip_norm=0.1, threads=1, out=str(tmp_path / "local"))
    local = run_local(wanted)
    free = run_local(dataclasses.replace(wanted, clip_norm=None, out=None))
    assert local["losses"] != free["losses"]
    real = launch(dataclasses.replace(wanted, out=str(tmp_path / "real")), 2)
    assert real["losses"] == local["losses"]
    weights = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("real", "local")]
    assert weights[0] == weights[1]
    norms = [[json.loads(s)["grad_norm"] for s in (tmp_path / d / "metrics.jsonl").open()] for d in ("real", "local")]
    assert norms[0] == norms[1]
    assert len(norms[0]) == 15
    assert min(norms[0]) > 0


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
        ["step", "loss", "epoch", "lr", "grad_norm", "seconds", "samples_per_second"]
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
