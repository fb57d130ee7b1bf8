"""A list of optimizers trains as its parts do: Muon for matrices and others for the rest, with every kind of policy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, NAdam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import fxpipe
from fxpipe.costs.optimizer import optimizer_costs
from fxpipe.errors import PolicyError, TaskError

WIDTH = 8
CLIP = 0.2
STEPS = 12
Named = list[tuple[str, nn.Parameter]]
Made = Callable[[Named], Any]


class Scale(nn.Module):
    """No matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


def model() -> nn.Sequential:
    """Worker 0 and 2 own both kinds, worker 1 a matrix alone, worker 3 none."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH), Scale()]
    return nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers))


def loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return (net(x) - y).square().mean()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(12, WIDTH, generator=generator) for _ in range(STEPS)]
    return [(x, x.flip(1).mul(0.7).tanh()) for x in given]


def two(matrices: Callable[[list[nn.Parameter]], Optimizer], rest: Callable[[list[nn.Parameter]], Optimizer]) -> Made:
    def make(named: Named) -> Any:
        own = [p for _, p in named if p.dim() == 2], [p for _, p in named if p.dim() != 2]
        return [kind(given) for kind, given in zip((matrices, rest), own, strict=True) if given]

    return make


def halving(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.8**step)


@functools.cache
def built(microbatches: int) -> fxpipe.Build:
    at = ["1", "2", "3"]
    return fxpipe.compile(
        model(),
        loss,
        batches()[0],
        workers=4,
        microbatches=microbatches,
        forward_at=at,
        backward_at=at,
        schedule="async",
        policy="latest",
        cost="analytic",
        optimizer=two(Muon, AdamW),
        lr_scheduler=halving,
    )


def piped(make: Made, microbatches: int = 1, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    pipeline = built(microbatches).local(optimizer=make, lr_scheduler=halving, clip_norm=CLIP, **options)
    return [float(x) for x in pipeline.run(batches())], pipeline.state_dict()


KINDS: dict[str, tuple[Any, Any, float]] = {
    "muon-adamw": (lambda p: Muon(p, lr=0.02), lambda p: AdamW(p, lr=0.01), 2e-3),  # Muon multiplies in bfloat16
    "muon-nadam": (lambda p: Muon(p, lr=0.02), lambda p: NAdam(p, lr=0.01, betas=(0.99, 0.999)), 2e-3),
    "nadam-sgd": (lambda p: NAdam(p, lr=0.01), lambda p: SGD(p, lr=0.1, momentum=0.9), 1e-6),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_synchronous_schedule_is_eager_pytorch(name: str, microbatches: int) -> None:
    """With clipping over both, and a scheduler of the rates of both."""
    matrices, rest, near = KINDS[name]
    make = two(matrices, rest)
    losses, weights = piped(make, microbatches, schedule="1f1b")
    net, expected = model(), []
    optimizers = make(list(net.named_parameters()))
    schedulers = [halving(each) for each in optimizers]
    for batch in batches():
        net.zero_grad()
        value = loss(net, batch)
        value.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        for each in (*optimizers, *schedulers):
            each.step()
        expected.append(value.item())
    assert expected[-1] < 0.95 * expected[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=near, atol=0)
    for key, value in net.state_dict().items():
        torch.testing.assert_close(weights[key], value, rtol=0, atol=near)


POLICIES = [("spectrain", 1), ("pipeoptim+decay", 1), ("lwp", 1), ("spectrain+ef", 3), ("2bw+predict", 3)]


@pytest.mark.parametrize(("policy", "microbatches"), POLICIES)
@pytest.mark.parametrize("kind", [AdamW, NAdam, functools.partial(SGD, momentum=0.9)], ids=["adamw", "nadam", "sgd"])
def test_two_of_a_kind_are_one_with_two_groups(kind: Any, policy: str, microbatches: int) -> None:
    """To the bit: predicted by the same rule, with the same rates to come, and fed back the same steps."""

    def grouped(named: Named) -> Optimizer:
        groups = [
            {"params": [p for _, p in named if (p.dim() == 2) == flat], "lr": lr}
            for flat, lr in ((True, 0.02), (False, 0.05))
        ]
        made: Optimizer = kind([group for group in groups if group["params"]], lr=1.0)
        return made

    separate = two(lambda p: kind(p, lr=0.02), lambda p: kind(p, lr=0.05))
    losses, weights = piped(separate, microbatches, policy=policy)
    expected, wanted = piped(grouped, microbatches, policy=policy)
    assert losses == expected
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    assert losses != piped(grouped, microbatches, policy="latest")[0]


@pytest.mark.parametrize(("policy", "microbatches"), [p for p in POLICIES if "decay" not in p[0]])
def test_muon_and_the_rest_learn_with_stale_weights(policy: str, microbatches: int) -> None:
    matrices, rest, _ = KINDS["muon-nadam"]
    pipeline = built(microbatches).local(optimizer=two(matrices, rest), clip_norm=CLIP, policy=policy)
    losses = [float(x) for x in pipeline.run(batches() * 5)]
    assert sum(losses[-STEPS:]) < 0.7 * sum(losses[:STEPS])


def test_each_part_is_predicted_by_its_own_rule() -> None:
    matrices, rest, _ = KINDS["muon-nadam"]
    pipeline = built(1).local(optimizer=two(matrices, rest), policy="spectrain")
    rules = [e.store.updater.predictor.rules for e in pipeline.executors]
    assert rules == [("last-update", "nadam"), ("last-update",), ("last-update", "nadam"), ("nadam",)]


def test_what_a_part_cannot_do_is_refused_by_its_name() -> None:
    with pytest.raises(PolicyError, match="Muon in parameter group 0"):
        built(1).local(optimizer=two(Muon, AdamW), policy="spectrain+decay")
    with pytest.raises(PolicyError, match="SGD in parameter group 1 has none"):
        built(1).local(optimizer=two(Muon, lambda p: SGD(p, lr=0.1)), policy="latest+ef")


def test_an_empty_part_would_leave_a_worker_untrained() -> None:
    def careless(named: Named) -> Any:
        return [Muon([p for _, p in named if p.dim() == 2]), AdamW([p for _, p in named if p.dim() != 2])]

    with pytest.raises(TaskError, match="its worker 1 alone: an optimizer over an empty list") as caught:
        built(1).local(optimizer=careless, policy="latest")
    assert "if matrices else []" in str(caught.value.hint)


def test_the_memory_of_every_parts_state_is_counted() -> None:
    named = [(name, p.detach()) for name, p in model().named_parameters()]
    matrices = sum(p.nbytes for _, p in named if p.dim() == 2)
    rest = sum(p.nbytes for _, p in named) - matrices
    found = optimizer_costs(named, two(Muon, AdamW), timed=False, bandwidth=1.0).state_bytes
    steps = 3 * 4  # AdamW's count of each tensor's updates
    assert found * (matrices + rest) == pytest.approx(matrices + 2 * rest + steps, abs=steps)
