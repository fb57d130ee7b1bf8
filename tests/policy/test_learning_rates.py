"""Rates told ahead against those that the real scheduler sets later."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from fxpipe.policy.optimizers.learning_rates import LearningRates

MakeScheduler = Callable[[Optimizer], Any]
UPDATES = 12


def warm_up(optimizer: Optimizer) -> SequentialLR:
    stages = [LinearLR(optimizer, 0.1, total_iters=4), CosineAnnealingLR(optimizer, 6)]
    return SequentialLR(optimizer, stages, milestones=[4])


SCHEDULES: dict[str, MakeScheduler] = {
    "lambda": lambda o: LambdaLR(o, lambda update: 1 / (1 + update)),
    "step": lambda o: StepLR(o, 3, gamma=0.5),
    "cosine": lambda o: CosineAnnealingLR(o, UPDATES),
    "restarts": lambda o: CosineAnnealingWarmRestarts(o, 4),
    "one-cycle": lambda o: OneCycleLR(o, max_lr=0.4, total_steps=UPDATES + 8),
    "cyclic": lambda o: CyclicLR(o, 0.1, 0.4, step_size_up=3),
    "warm-up": warm_up,
    "chained": lambda o: ChainedScheduler([ConstantLR(o, 0.3, total_iters=5), ExponentialLR(o, 0.9)]),
}


def parameter() -> Tensor:
    return torch.ones(2, requires_grad=True)


def two_groups(kind: str) -> Optimizer:
    groups: list[dict[str, Any]] = [{"params": [parameter()]}, {"params": [parameter()], "lr": 0.05}]
    if kind == "sgd":
        return SGD(groups, lr=0.2, momentum=0.9)
    return AdamW(groups, lr=torch.tensor(0.2), foreach=False)


def update(optimizer: Optimizer, scheduler: Any, rates: LearningRates | None = None) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    if rates is not None:
        rates.stepped()


def begin(optimizer: Optimizer, make: MakeScheduler | None) -> tuple[Any, LearningRates]:
    scheduler = make(optimizer) if make else None
    return scheduler, LearningRates(optimizer, scheduler)


def live(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("kind", ["sgd", "tensor-lr"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_told_ahead_are_those_that_come(name: str, kind: str) -> None:
    make = SCHEDULES[name]
    plain = two_groups(kind)
    real = make(plain)
    later = []
    for _ in range(UPDATES + 3):
        later.append(live(plain))
        update(plain, real)
    assert len({rate for rate, _ in later}) > 1

    optimizer = two_groups(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler, rates = begin(optimizer, make)
        assert rates.known
        for version in range(UPDATES):
            for group in (0, 1):
                assert rates.reach(group, 3) == [rate[group] for rate in later[version : version + 3]]
            update(optimizer, scheduler, rates)


@pytest.mark.parametrize("updates", [0, 2, 5])
@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_of_a_scheduler_for_epochs(name: str, updates: int) -> None:
    """An epoch has 3 updates; the scout begins after some of them."""
    optimizer = two_groups("sgd")
    scheduler = SCHEDULES[name](optimizer)
    seen, rates = [], None
    told: list[list[float] | None] = []
    for version in range(30):
        if version == updates:
            rates = LearningRates(optimizer, scheduler, updates, lambda made: made % 3 == 0)
        seen.append(live(optimizer)[1])
        if rates is not None and version < 20:
            told.append(rates.reach(1, 4))
        update(optimizer, scheduler if (version + 1) % 3 == 0 else None, rates)
    assert told == [seen[version : version + 4] for version in range(updates, 20)]


def test_the_scout_leaves_no_trace_on_the_real_optimizer() -> None:
    """Momentum is cycled in the shell, and `max_lr` and the like are set there, far ahead of the real ones."""
    optimizer, plain = two_groups("sgd"), two_groups("sgd")
    make = SCHEDULES["one-cycle"]
    scheduler, rates = begin(optimizer, make)
    real = make(plain)
    for _ in range(4):
        rates.reach(0, 6)
        assert options(optimizer) == options(plain)
        update(optimizer, scheduler, rates)
        update(plain, real)
    assert optimizer.param_groups[0]["params"][0].equal(plain.param_groups[0]["params"][0])


def options(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def test_each_rate_is_computed_once() -> None:
    asked: list[int] = []

    def make(optimizer: Optimizer) -> LambdaLR:
        def factor(count: int) -> float:
            asked.append(count)
            return 0.5**count

        return LambdaLR(optimizer, factor)

    optimizer = SGD([parameter()], lr=0.1)
    scheduler, rates = begin(optimizer, make)
    for _ in range(5):
        rates.reach(0, 4)
        rates.reach(0, 2)
        update(optimizer, scheduler, rates)
    assert sorted(asked) == sorted([*range(6), *range(1, 8)])  # the real one, and the scout from there on
    assert len(rates._rates) == 3


def test_past_the_end_of_a_schedule_its_last_rate_stands() -> None:
    optimizer = SGD([parameter()], lr=0.1, momentum=0.9)
    scheduler, rates = begin(optimizer, lambda o: OneCycleLR(o, 0.4, total_steps=4))
    told = rates.reach(0, 8)
    assert told is not None
    last = told[4]  # torch lets one more step be made than there are
    assert told[4:] == [last] * 4
    for expected in told[1:5]:
        update(optimizer, scheduler, rates)
        assert live(optimizer) == [expected]
    assert rates.reach(0, 2) == [last, last]


def plateau(optimizer: Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer)


class Metric:
    """A user's own scheduler that waits for something only training can give."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, loss: float) -> None:
        self.optimizer.param_groups[0]["lr"] *= loss


class Uncopyable:
    """A factor that holds what cannot be copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, update: int) -> float:
        return 1.0


@pytest.mark.parametrize("make", [plateau, Metric, lambda o: LambdaLR(o, Uncopyable()), lambda o: None])
def test_a_schedule_that_cannot_run_ahead_is_not_known(make: MakeScheduler) -> None:
    optimizer = SGD([parameter()], lr=0.1)
    _, rates = begin(optimizer, make)
    assert not rates.known
    assert rates.reach(0, 2) is None
    rates.stepped()
    assert rates.reach(0, 2) is None
    assert live(optimizer) == [0.1]


class Counting:
    """A factor with a state of its own: each call is one further."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, update: int) -> float:
        self.calls += 1
        return 1.0 / self.calls


def test_what_the_real_scheduler_holds_is_left_alone() -> None:
    optimizer, plain = SGD([parameter()], lr=0.1), SGD([parameter()], lr=0.1)
    scheduler, rates = begin(optimizer, lambda o: LambdaLR(o, Counting()))
    real = LambdaLR(plain, Counting())
    for _ in range(5):
        assert rates.reach(0, 4) is not None
        update(optimizer, scheduler, rates)
        update(plain, real)
        assert live(optimizer) == live(plain)


def test_a_rate_that_comes_otherwise_ends_it() -> None:
    rolls = iter([1.0, 0.5, 0.25, 0.125, 0.0625] * 10)  # one for both: functions are not copied
    optimizer = SGD([parameter()], lr=0.1)
    scheduler, rates = begin(optimizer, lambda o: LambdaLR(o, lambda update: next(rolls)))
    for _ in range(4):
        rates.reach(0, 3)
        update(optimizer, scheduler, rates)
    assert not rates.known
    assert rates.reach(0, 2) is None


def test_random_rates_take_nothing_from_the_random_numbers() -> None:
    torch.manual_seed(0)
    expected = torch.rand(4).tolist()
    torch.manual_seed(0)
    optimizer = SGD([parameter()], lr=1.0)
    _, rates = begin(optimizer, lambda o: LambdaLR(o, lambda update: float(torch.rand(()))))
    rates.reach(0, 5)
    assert live(optimizer) == expected[:1]
    assert torch.rand(3).tolist() == expected[1:]


def test_a_wrapped_optimizer_keeps_its_groups() -> None:
    class Wrapper(Optimizer):
        def __init__(self, inner: Optimizer) -> None:
            self.inner = inner
            self.defaults = inner.defaults

        @property  # type: ignore[override]
        def param_groups(self) -> Any:
            return self.inner.param_groups

        @param_groups.setter
        def param_groups(self, groups: Any) -> None:
            self.inner.param_groups = groups

    inner = SGD([parameter()], lr=0.1)
    _, rates = begin(Wrapper(inner), lambda o: StepLR(inner, 1))
    assert not rates.known
    assert len(inner.param_groups[0]["params"]) == 1


def test_somebody_else_changing_the_rate_is_noticed() -> None:
    optimizer = SGD([parameter()], lr=0.1)
    scheduler, rates = begin(optimizer, SCHEDULES["lambda"])
    update(optimizer, scheduler, rates)
    assert rates.reach(0, 1) == [0.05]
    optimizer.param_groups[0]["lr"] = 0.07
    assert rates.reach(0, 1) is None
    optimizer.param_groups[0]["lr"] = 0.05
    assert rates.reach(0, 1) == [0.05]
