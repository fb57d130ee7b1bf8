"""Optimizers that look at all parameters at once are found out; of others nothing is said that is not known."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cached import lowered
from own_optimizers import (
    Adapts,
    AdaptsLate,
    ByPlace,
    ClipsInside,
    ClipsLater,
    Each,
    Halves,
    MeanOfSquares,
    Noisy,
    OwnGenerator,
    RaisesOnNan,
    SkipsNotFinite,
    TrustRatio,
)
from torch import Tensor
from torch.optim import SGD, Adadelta, Adafactor, Adagrad, Adam, AdamW, Muon, NAdam, Optimizer, RMSprop, Rprop
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from fxpipe.errors import TaskError
from fxpipe.optimizer.per_worker import MOST, check_per_worker, largest_difference
from fxpipe.optimizer.play import LOUD, Played
from fxpipe.plan.plan import Plan
from fxpipe.plan.spec import TensorSpec
from fxpipe.random_state import seed_everything
from fxpipe.task.one_optimizer import OptimizerRefused

Named = list[tuple[str, torch.nn.Parameter]]


@functools.cache
def plan(workers: int = 3) -> Plan:
    return lowered("gpt", workers=workers).plan


def weights(named: Named) -> list[torch.nn.Parameter]:
    return [p for _, p in named]


def decay_groups(named: Named) -> list[dict[str, Any]]:
    return [
        {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.1},
        {"params": [p for n, p in named if not n.endswith("weight")], "weight_decay": 0.0},
    ]


def by_name(named: Named) -> list[dict[str, Any]]:
    """Rates that fall with depth, of which the name tells."""
    return [
        {"params": [p], "lr": 0.1 * 0.8 ** (4 - int(n.split(".")[1])) if n.startswith("blocks") else 0.1}
        for n, p in named
    ]


def lion(named: Named) -> Optimizer:
    class Lion(Each):
        def way(self, group: dict[str, Any], p: Tensor, place: int) -> Tensor:
            mean = self.state[p].setdefault("mean", torch.zeros_like(p))
            sign = mean.lerp(super().way(group, p, place), 0.1).sign()
            mean.lerp_(super().way(group, p, place), 0.01)
            return sign

    return Lion(weights(named))


KNOWN: dict[str, Any] = {
    "sgd": lambda n: SGD(weights(n), lr=0.1, momentum=0.9, nesterov=True),
    "sgd foreach": lambda n: SGD(weights(n), lr=0.1, foreach=True),
    "sgd fused": lambda n: SGD(weights(n), lr=0.1, fused=True),
    "adam": lambda n: Adam(weights(n), lr=0.1, amsgrad=True),
    "adamw": lambda n: AdamW(weights(n)),
    "adamw foreach": lambda n: AdamW(weights(n), foreach=True),
    "adamw fused": lambda n: AdamW(weights(n), fused=True),
    "adamw tensor": lambda n: AdamW(weights(n), lr=torch.tensor(0.1)),
    "decay groups": lambda n: AdamW(decay_groups(n)),
    "by name": lambda n: AdamW(by_name(n)),
    "adafactor": lambda n: Adafactor(weights(n)),
    "muon": lambda n: Muon([p for p in weights(n) if p.dim() == 2]),
    "nadam": lambda n: NAdam(weights(n)),
    "rmsprop": lambda n: RMSprop(weights(n), centered=True),
    "rprop": lambda n: Rprop(weights(n)),
    "adagrad": lambda n: Adagrad(weights(n)),
    "adadelta": lambda n: Adadelta(weights(n)),
    "chooses some": lambda n: SGD([p for name, p in n if "blocks.0" in name], lr=0.1),
}
ALONE: dict[str, Any] = {
    "lion": lion,
    "lamb": lambda n: TrustRatio(weights(n)),
    "sgld": lambda n: Noisy(weights(n)),
    "own generator": lambda n: OwnGenerator(weights(n)),
    "raises": lambda n: RaisesOnNan(weights(n)),
    "does not end": lambda n: Halves(weights(n)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_to_look_at_each_parameter_alone_passes(name: str) -> None:
    assert check_per_worker(plan(), KNOWN[name]) is None


@pytest.mark.parametrize("name", ALONE)
def test_what_looks_at_each_parameter_alone_is_in_doubt_unless_the_user_knows(name: str) -> None:
    found = check_per_worker(plan(), ALONE[name])
    assert found is not None
    assert "may train differently with one for each worker" in found
    assert "a trial on small copies found no difference" in found
    assert check_per_worker(plan(), ALONE[name], accepted=True) is None


def test_so_is_what_waits_for_more_than_a_trial_has() -> None:
    assert "ClipsLater may train differently" in (
        check_per_worker(plan(), lambda n: ClipsLater(weights(n), most=1.0)) or ""
    )


def test_optimizers_of_other_libraries_are_known() -> None:
    import pytorch_optimizer

    def named(name: str) -> Any:
        return lambda n: pytorch_optimizer.load_optimizer(name)(weights(n), lr=0.01)

    assert check_per_worker(plan(), named("stableadamw")) is None
    assert "Lamb may train differently" in (check_per_worker(plan(), named("lamb")) or "")


def test_a_step_with_hooks_is_not_known() -> None:
    def make(named: Named) -> Optimizer:
        made = SGD(weights(named), lr=0.1)
        made.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(weights(named), 1e9) and None)
        return made

    with pytest.raises(TaskError, match=r"SGD behaves differently .*; gradients of other workers are far larger there"):
        check_per_worker(plan(), make)


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: LambdaLR(o, lambda update: 1 / (1 + update)),
        lambda o: LambdaLR(o, [lambda update: 0.5**update, lambda update: 1.0]),
        lambda o: OneCycleLR(o, 0.4, total_steps=4),
        lambda o: (ReduceLROnPlateau(o), "loss"),
        lambda o: 1 / 0,
    ],
)
def test_schedulers_pass(scheduler: Any) -> None:
    assert check_per_worker(plan(), lambda n: AdamW(decay_groups(n)), scheduler) is None


def by_count(named: Named) -> Optimizer:
    return SGD([{"params": [p], "lr": 0.1 * (i + 1) / len(named)} for i, (_, p) in enumerate(named)], lr=0.1)


class SkipsSpikes(SGD):
    """No step where any gradient is larger than it ought to be."""

    def __init__(self, parameters: list[Tensor], most: float) -> None:
        super().__init__(parameters, lr=0.1)
        self.most = most

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if all(p.grad is None or p.grad.abs().max() <= self.most for g in self.param_groups for p in g["params"]):
            super().step()


class CarriesOver(SGD):
    """Half of a gradient is there again in the next step."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in (p for g in self.param_groups for p in g["params"] if p.grad is not None):
            p.grad.mul_(0.5)


LOOKS = {
    "skips, over 3": (lambda n: SkipsSpikes(weights(n), 3.0), "something over all parameters"),
    "norm": (lambda n: ClipsInside(weights(n), most=1.0), "a norm: to clip"),
    "hardly ever": (lambda n: ClipsInside(weights(n), most=1e9), "a norm: to clip"),
    "not finite": (lambda n: SkipsNotFinite(weights(n)), "must follow from each parameter alone"),
    "mean": (lambda n: MeanOfSquares(weights(n)), "something over all parameters"),
    "adapts": (lambda n: Adapts(weights(n)), "it adapts d to all parameters at once"),
    "by place": (lambda n: ByPlace(weights(n)), "something over all parameters"),
    "rate by place": (by_count, "make lr from the parameter's name and from constants"),
}


@pytest.mark.parametrize("name", LOOKS)
def test_what_looks_at_all_parameters_is_refused(name: str) -> None:
    make, cure = LOOKS[name]
    with pytest.raises(TaskError) as caught:
        check_per_worker(plan(), make)
    kind = type(make([("weight", torch.nn.Parameter(torch.ones(1)))])).__name__
    assert caught.value.what.startswith(f"{kind} behaves differently when each worker has its own")
    assert cure in str(caught.value.hint)
    assert "--accept-optimizer-per-worker" in str(caught.value.hint)
    accepted = check_per_worker(plan(), make, accepted=True)
    assert accepted is not None
    assert accepted.endswith("this was accepted")
    assert check_per_worker(plan(1), make) is None


def test_a_number_of_all_parameters_is_refused_though_no_weight_has_moved_by_it_yet() -> None:
    class Waits(SGD):
        """It measures, and would use what it has measured later."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                group["d"] = sum(float(p.grad.norm()) for p in group["params"] if p.grad is not None)
            super().step()

    with pytest.raises(TaskError, match=r"Waits adapts d to all parameters at once: after \d+ steps it is .* own \("):
        check_per_worker(plan(), lambda n: Waits(weights(n), lr=0.1))
    with pytest.raises(TaskError, match=r"AdaptsLate adapts d .*; gradients of other workers are far larger there"):
        check_per_worker(plan(), lambda n: AdaptsLate(weights(n)))
    accepted = check_per_worker(plan(), lambda n: Waits(weights(n), lr=0.1), accepted=True)
    assert accepted is not None
    assert accepted.endswith("this was accepted")


def test_what_carries_gradients_over_is_refused() -> None:
    with pytest.raises(OptimizerRefused, match=r"CarriesOver.zero_grad\(\) keeps gradients for the next step"):
        check_per_worker(plan(), lambda n: CarriesOver(weights(n), lr=0.1))


def test_a_schedulers_rates_by_place_are_refused() -> None:
    def falling(optimizer: Optimizer) -> LambdaLR:
        def of(place: int) -> Any:
            return lambda update: 0.9 ** (update * place)

        return LambdaLR(optimizer, [of(i) for i in range(len(optimizer.param_groups))])

    def groups(named: Named) -> Optimizer:
        return SGD([{"params": [p]} for p in weights(named)], lr=0.1)

    assert check_per_worker(plan(), groups) is None
    with pytest.raises(TaskError, match="its lr is"):
        check_per_worker(plan(), groups, falling)


STEPS = [0]


class Counts(Each):
    """Each parameter alone, by a number that is not the optimizer's own."""

    def way(self, group: dict[str, Any], p: Tensor, place: int) -> Tensor:
        return super().way(group, p, place) / math.sqrt(1 + STEPS[0])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        STEPS[0] += 1
        super().step()


def counted(optimizer: Optimizer) -> LambdaLR:
    def rate(update: int) -> float:
        STEPS[0] += 1
        return float(0.9 ** STEPS[0])

    return LambdaLR(optimizer, rate)


@pytest.mark.parametrize(
    ("make", "scheduler"), [(Counts, None), (functools.partial(SGD, lr=0.1), counted)], ids=["optimizer", "scheduler"]
)
def test_state_that_optimizers_share_is_named(make: Any, scheduler: Any) -> None:
    with pytest.raises(TaskError, match=r"(Counts|SGD) or its scheduler changes STEPS at every step") as caught:
        check_per_worker(plan(), lambda n: make(weights(n)), scheduler)
    assert "keep it in the optimizer" in str(caught.value.hint)
    assert STEPS[0] == 0, "nothing is left of the trial"


def test_how_far_apart_is_said() -> None:
    with pytest.raises(TaskError) as caught:
        check_per_worker(plan(), by_count)
    assert f"after {1 + len(LOUD)} steps weights differ by up to" in caught.value.what
    assert ", of worker " in caught.value.what
    assert "with one, " in caught.value.what


def test_random_numbers_of_other_generators_are_in_doubt() -> None:
    class Shuffled(Each):
        def way(self, group: dict[str, Any], p: Tensor, place: int) -> Tensor:
            return super().way(group, p, place) * random.random()

    found = check_per_worker(plan(), lambda n: Shuffled(weights(n)))
    assert found is not None
    assert found.endswith("it draws random numbers from `random` or numpy, which may be the only reason")


def test_what_cannot_be_tried_is_in_doubt() -> None:
    found = check_per_worker(plan(), lambda n: torch.optim.SparseAdam(weights(n)))
    assert found is not None
    assert "SparseAdam does not support dense gradients" in found
    assert found.endswith("whether each worker may have its own is unknown")


def test_what_fails_on_one_workers_parameters_is_refused() -> None:
    def needs_the_first(named: Named) -> Optimizer:
        return SGD([{"params": [dict(named)["tok.weight"]]}], lr=0.1)

    with pytest.raises(TaskError, match=r"works over all parameters, but fails[\s\S]*KeyError: 'tok.weight'"):
        check_per_worker(plan(), needs_the_first)


def test_what_no_run_can_use_is_refused() -> None:
    with pytest.raises(OptimizerRefused, match="chooses none of the model's parameters"):
        check_per_worker(plan(), lambda n: SGD([p for name, p in n if "lora" in name], lr=0.1))
    for workers in (1, 3):
        with pytest.raises(OptimizerRefused, match=r"LBFGS\.step\(\) needs a closure"):
            check_per_worker(plan(workers), lambda n: torch.optim.LBFGS(weights(n)))


def test_the_default_is_known() -> None:
    assert check_per_worker(plan(), None) is None


def test_the_process_is_left_as_it_was() -> None:
    def draws() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(np.random.random())

    seed_everything(1)
    expected = draws()
    seed_everything(1)
    threads = torch.get_num_threads()
    assert check_per_worker(plan(), ALONE["sgld"], accepted=True) is None
    assert (draws(), torch.get_num_threads()) == (expected, threads)


def large(count: int) -> Plan:
    """Many large parameters in bfloat16; only a plan, no values."""
    row = plan().parameters[0]
    specs = (TensorSpec((8192, 8192), (8192, 1), "bfloat16"), TensorSpec((8192,), (1,), "bfloat16"))
    rows = [
        replace(row, names=(f"m.{i}",), owner=4 * i // count, trained=True, tensor=specs[i % 2]) for i in range(count)
    ]
    return replace(plan(4), parameters=tuple(rows))


@pytest.mark.parametrize("count", [8, 10_000])
def test_copies_are_small_and_few(count: int) -> None:
    seen: list[Named] = []

    def watching(named: Named) -> Optimizer:
        seen.append(named)
        return MeanOfSquares(weights(named))

    with pytest.raises(TaskError, match="MeanOfSquares behaves differently"):
        check_per_worker(large(count), watching)
    assert len(seen[0]) == min(count, MOST)
    assert [len(named) for named in seen[1:5]] == pytest.approx([len(seen[0]) / 4] * 4, rel=0.3)
    assert max(p.numel() for _, p in seen[0]) <= 64
    assert {p.dim() for _, p in seen[0]} == {1, 2}
    order = [int(name[2:]) for name, _ in seen[0]]
    assert order == sorted(order) == [int(name[2:]) for named in seen[1:5] for name, _ in named]


def test_none_chosen_of_a_sample_says_nothing() -> None:
    assert check_per_worker(large(10_000), lambda n: SGD([p for name, p in n if name == "m.x"], lr=0.1)) is None


def played(*steps: list[float]) -> Played:
    return Played(("SGD",), [[torch.tensor(step, dtype=torch.float64)] for step in steps], ([], []))


def test_differences_are_relative_to_the_way_gone() -> None:
    zero = [0.0, 0.0]
    assert largest_difference(played(zero, [3.0, 4.0]), played(zero, [3.0, 4.0]))[0] == 0
    assert largest_difference(played(zero, [3.0, 4.0]), played(zero, [3.0, 4.5]))[0] == pytest.approx(0.1)
    assert largest_difference(played(zero, [3.0, 4.0], zero), played(zero, [3.0, 4.0], [1.0, 0.0]))[0] == pytest.approx(
        0.1
    )
    assert largest_difference(played(zero, zero), played(zero, [1.0, 0.0]))[0] > 1e6
    assert largest_difference(played([1.0, 1.0], [1.0, 1.0]), played([1.0, 1.0], [1.0, 1.0 + 2e-16]))[0] == 0
    same = largest_difference(played(zero, [math.nan, 1.0]), played(zero, [math.nan, 1.0]))
    assert same[0] == 0
    assert largest_difference(played(zero, [math.nan, 1.0]), played(zero, [0.0, 1.0]))[0] == math.inf


def test_gradients_are_even_first_and_loud_later() -> None:
    assert len(set(LOUD[:6])) == 1
    assert max(LOUD) / LOUD[0] >= 100
