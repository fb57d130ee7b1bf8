"""The first thing to run: a small model captured, cut, emitted, trained and compared with eager PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor, nn

import fxpipe

STEPS, RATE = 3, 0.1


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(STEPS)]


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=RATE, momentum=0.9)


def eager(net: nn.Module) -> list[float]:
    """The losses of ordinary training."""
    optimizer, losses = sgd(list(net.named_parameters())), []
    for batch in batches():
        optimizer.zero_grad()
        value = loss(net, batch)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def test_a_small_model_trains_as_in_eager_pytorch(tmp_path: Path) -> None:
    net = model()
    made = fxpipe.compile(
        net, loss, batches()[0], workers=2, schedule="1f1b", microbatches=2,
        forward_at=["3"], backward_at=["2"], cost="analytic",
    )  # fmt: skip
    build = fxpipe.load(made.save(tmp_path / "build").folder)
    code = (tmp_path / "build" / "stage_1.py").read_text()
    assert "def forward(" in code
    assert "comm.recv(" in code
    pipeline = build.local(optimizer=sgd)
    found = [float(pipeline.step(batch)) for batch in batches()]
    pipeline.flush()
    ordinary = copy.deepcopy(net)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(eager(ordinary)))
    torch.testing.assert_close(dict(pipeline.state_dict()), dict(ordinary.state_dict()))


def test_every_level_computes_the_same() -> None:
    net, batch = model(), batches()[0]
    program = fxpipe.capture(net, loss, batch)
    value, *gradients = program.run()
    expected = loss(net, batch)
    torch.testing.assert_close(value, expected)
    for made, wanted in zip(gradients, torch.autograd.grad(expected, list(net.parameters())), strict=True):
        torch.testing.assert_close(made, wanted)


def test_asynchronous_training_learns() -> None:
    build = fxpipe.compile(model(), loss, batches()[0], workers=2, cost="analytic", forward_at=["3"])
    pipeline = build.local(optimizer=sgd, schedule="async", policy="spectrain")
    losses = pipeline.run(batches()[:1] * 12)
    assert losses[-1] < losses[0] / 2
