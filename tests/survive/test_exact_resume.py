"""Runs that go on have the bits of one that was never interrupted, whatever optimizers and schedulers hold."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_net import Net, batches, loss
from torch import nn
from torch.optim import SGD, Adadelta, AdamW, NAdam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import fxpipe
from fxpipe import Build

STEPS = 26


def built(workers: int, microbatches: int, **options: Any) -> Build:
    torch.manual_seed(0)
    return fxpipe.compile(
        Net(0.1), loss, batches(1)[0], workers=workers, microbatches=microbatches, cost="analytic", **options
    )


PINNED = {
    2: (("layers.3",), ("layers.1",)),
    4: (("layers.1", "layers.3", "leave"), ("layers.0", "layers.2", "layers.4")),
}


@pytest.fixture(scope="module")
def builds() -> Callable[..., Build]:
    made: dict[Any, Build] = {}

    def get(workers: int, microbatches: int, apart: bool = False) -> Build:
        key = (workers, microbatches, apart)
        if key not in made:
            forward, backward = PINNED[workers]
            cuts = {"forward_at": forward, "backward_at": backward} if apart else {}
            made[key] = built(workers, microbatches, **cuts)
        return made[key]

    return get


class Wandering(Optimizer):
    """Keeps more than `state`: a count and a tensor of its own, and a list in a parameter's state."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": 0.9})
        self.made = 0
        self.mean = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.made += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                held = self.state[p]
                held.setdefault("pair", [torch.zeros_like(p), torch.zeros_like(p)])
                held["pair"] = [held["pair"][1] * 0.9 + p.grad, held["pair"][0] * 0.9 - p.grad]
                self.mean = 0.9 * self.mean + p.grad.abs().mean()
                p.sub_(held["pair"][0] + 0.001 * torch.randn_like(p), alpha=group["lr"] / (1 + 0.01 * self.made))
                p.sub_(self.mean * 0.001)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda named: SGD([p for _, p in named], lr=0.05, momentum=0.9),
    "nadam": lambda named: NAdam([p for _, p in named], lr=0.01, betas=(0.99, 0.999)),
    "adadelta": lambda named: Adadelta([p for _, p in named], lr=0.5),
    "groups": lambda named: AdamW(
        [{"params": [p for n, p in named if p.ndim > 1]}, {"params": [p for n, p in named if p.ndim == 1], "lr": 0.02}],
        lr=torch.tensor(0.01),
    ),
    "own": lambda named: Wandering([p for _, p in named], lr=0.02),
}


class _Falling:
    """A scheduler that nobody can copy or write."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.steps, self.rule = optimizer, 0, lambda step: 0.97

    def step(self) -> None:
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] *= self.rule(self.steps)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, STEPS),
    "own": _Falling,
}


def test_weights_of_versions_before_keep_their_layout(tmp_path: Path) -> None:
    """Convolutions choose by the layout of their weights how they add up."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(5)), nn.Flatten(), nn.Linear(256, 3))
    model.to(memory_format=torch.channels_last)
    draw = torch.Generator().manual_seed(1)
    data = [(torch.randn(2, 4, 8, 8, generator=draw), torch.tensor([0, 2])) for _ in range(10)]
    build = fxpipe.compile(model, loss, data[0], workers=4, microbatches=1, cost="analytic")
    whole = build.local(policy="latest", checkpoint_every="5", out=tmp_path)
    losses = whole.run(data)
    whole.checkpoints.finish()
    again = build.local(resume=tmp_path / "checkpoints" / "step-5")
    ((first, *_), *_) = again._shards
    assert any(not value.is_contiguous() for weights in first.past.values() for value in weights.values())
    assert again.run(data[5:]) == losses[5:]
    assert digest(again) == digest(whole)


# workers, microbatches, distinct cuts, optimizer, scheduler, options, steps to go on from
CASES: list[tuple[int, int, bool, str, str, dict[str, Any], Sequence[int]]] = [
    (4, 1, True, "groups", "cosine", {"policy": "pipeoptim+keep"}, (2, 13)),
    (4, 1, False, "adadelta", "own", {"policy": "spectrain"}, (1, STEPS)),
    (4, 4, False, "nadam", "cosine", {"policy": "2bw+ef"}, (3, 15)),
    (2, 1, True, "own", "own", {"schedule": "async-late", "policy": "2bw+predict"}, (1, 14)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[3]}-{'-'.join(map(str, case[5].values()))}")
def test_goes_on_with_the_same_bits(case: Any, builds: Callable[..., Build], tmp_path: Path) -> None:
    workers, microbatches, apart, optimizer, scheduler, options, steps = case
    build = builds(workers, microbatches, apart)
    check(build, tmp_path, OPTIMIZERS[optimizer], SCHEDULERS[scheduler], options, steps)


def test_other_cuts_begin_with_whole_weight_copies(builds: Callable[..., Build], tmp_path: Path) -> None:
    plain, other = builds(4, 1, True), builds(2, 1, True)
    plans = [dataclasses.replace(build.plan, weights_codec="int8") for build in (plain, other)]
    first, second = (dataclasses.replace(b, plan=plan) for b, plan in zip((plain, other), plans, strict=True))
    given = {"optimizer": OPTIMIZERS["sgd"], "policy": "latest"}
    whole = first.local(**given, checkpoint_every="10", out=tmp_path)
    whole.run(batches(STEPS))
    whole.checkpoints.finish()
    path = tmp_path / "checkpoints" / "step-10"
    runs = [build.local(**given, resume=path).run(batches(STEPS)[10:]) for build in (second, other)]
    assert runs[0] != runs[1]
    assert runs[0] == pytest.approx(runs[1], rel=0.05)


def check(
    build: Build, out: Path, optimizer: Any, scheduler: Any, options: dict[str, Any], steps: Sequence[int]
) -> None:
    """The run is saved after every step; it goes on from some, and is saved again after each."""
    given = {"optimizer": optimizer, "lr_scheduler": scheduler, "accept_optimizer_per_worker": True}
    whole = build.local(**given, **options)
    losses = whole.run(batches(STEPS))
    saved = build.local(**given, **options, checkpoint_every="1", keep=STEPS, out=out / "saved")
    assert saved.run(batches(STEPS)) == losses
    saved.checkpoints.finish()
    assert digest(saved) == digest(whole), "saving changes training"
    for step in steps:
        path = out / "saved" / "checkpoints" / f"step-{step}"
        again = build.local(**given, resume=path, checkpoint_every="1", keep=STEPS, out=out / f"from {step}")
        assert again.fed == step
        assert again.run(batches(STEPS)[step:]) == losses[step:]
        again.checkpoints.finish()
        assert digest(again) == digest(whole)
        for later in range(step + 1, STEPS + 1):
            first, second = (
                folder / "checkpoints" / f"step-{later}" for folder in (out / "saved", out / f"from {step}")
            )
            for file in first.iterdir():
                if file.name != "checkpoint.json":
                    assert file.read_bytes() == (second / file.name).read_bytes(), f"{later}: {file.name}"


def digest(pipeline: Any) -> str:
    found = hashlib.sha256()
    averages = pipeline.averaged_state_dict() if pipeline.averages() is not None else {}
    for name, value in [*pipeline.state_dict().items(), *averages.items()]:
        found.update(name.encode())
        found.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
