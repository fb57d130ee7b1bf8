"""A worker's update: random numbers by seed, worker and step; optimizers without a rate, or of some parameters."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pipelines import pipeline_of

from fxpipe.errors import RunError
from fxpipe.random_state import seed_everything

Batches = list[tuple[torch.Tensor, torch.Tensor]]
POLICIES = [("async", "2bw"), ("async", "spectrain"), ("async", "lwp"), ("1f1b", "latest")]

OPTIMIZERS = """
import random
import numpy
import torch

class Noisy(torch.optim.Optimizer):
    '''Langevin dynamics, with noise from every generator that there is.'''

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["start"] = torch.randn_like(p)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad
                p += 1e-3 * (torch.randn_like(p) + self.state[p]["start"] + random.random() + numpy.random.normal())


class Relative(torch.optim.Optimizer):
    '''Finds its own rate at every step, as Adafactor does.'''

    def __init__(self, params):
        super().__init__(params, {"lr": None})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                p -= 0.1 / self.steps * p.grad
"""
scope: dict[str, Any] = {}
exec(OPTIMIZERS, scope)


def noisy(named: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = scope["Noisy"]([p for _, p in named])
    return made


def relative(named: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = scope["Relative"]([p for _, p in named])
    return made


def of_layer(layer: int) -> Callable[[Any], torch.optim.Optimizer]:
    """Chooses one layer: no parameter on the worker that has the other."""
    return lambda named: torch.optim.SGD([p for n, p in named if f"layers.{layer}." in n], lr=0.1)


class Jumpy(torch.optim.lr_scheduler.LambdaLR):
    """A rate drawn anew for every update."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, lambda update: 0.5 + torch.rand(()).item() + random.random())


def drawn() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.random())


def test_random_numbers_follow_from_the_seed_alone(toy: Any, tmp_path: Path, batches: Batches) -> None:
    folder = toy(dropout=True).save(tmp_path / "build")
    found = []
    for before, seed in ((1, 0), (2, 0), (1, 5)):
        seed_everything(before)
        pipeline = pipeline_of(folder, noisy, Jumpy, seed=seed)
        losses = pipeline.run(batches)
        found.append((losses, pipeline.state_dict()))
    (one, state), (again, state_again), (other, _) = found
    assert one == again
    assert all(state[name].equal(state_again[name]) for name in state)
    assert one[1:] != other[1:]


def test_the_process_random_state_stays_as_it_is(toy: Any, tmp_path: Path, batches: Batches) -> None:
    folder = toy().save(tmp_path / "build")
    seed_everything(3)
    np.random.normal()  # numpy draws these in pairs, and keeps the second
    expected = drawn()
    pair = np.random.normal()
    seed_everything(3)
    np.random.normal()
    pipeline = pipeline_of(folder, noisy, Jumpy)
    pipeline.run(batches[:3])
    assert drawn() == expected
    pipeline.run(batches[3:])
    assert np.random.normal() == pair


def test_a_hook_of_torchs_own_optimizer_may_draw(toy: Any, tmp_path: Path, batches: Batches) -> None:
    def shaken(named: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD([p for _, p in named], lr=0.1)

        def shake(*_: Any) -> None:
            with torch.no_grad():
                for _, p in named:
                    p += torch.rand_like(p)

        made.register_step_post_hook(shake)
        return made

    folder = toy().save(tmp_path / "build")
    found = []
    for before in (1, 2):
        seed_everything(before)
        found.append(pipeline_of(folder, shaken).run(batches))
    assert found[0] == found[1]


def test_workers_have_numbers_of_their_own_but_a_common_rate(toy: Any, tmp_path: Path, batches: Batches) -> None:
    pipeline = pipeline_of(toy().save(tmp_path / "build"), noisy, Jumpy)
    optimizers = [executor.store.updater.optimizer for executor in pipeline.executors]
    starts = [next(iter(optimizer.state.values()))["start"] for optimizer in optimizers if optimizer is not None]
    assert len(starts) == 2
    assert not starts[0].equal(starts[1])
    rates = []
    for batch in batches[:3]:
        pipeline.step(batch)
        pipeline.flush()
        rates.append({executor.store.updater.lr for executor in pipeline.executors})
    assert [len(both) for both in rates] == [1, 1, 1]
    assert len(set.union(*rates)) == 3


@pytest.mark.parametrize(("schedule", "policy"), POLICIES[1:])
def test_an_optimizer_without_a_rate_trains(
    toy: Any, tmp_path: Path, batches: Batches, schedule: str, policy: str
) -> None:
    built = toy(microbatches=2, schedule="1f1b") if schedule != "async" else toy()
    pipeline = pipeline_of(built.save(tmp_path / "build"), relative, schedule=schedule, policy=policy)
    assert pipeline.executors[0].store.updater.lr is None
    pipeline.run(batches)
    trained = pipeline.state_dict()
    assert all(not trained[name].equal(initial) for name, initial in built.initial().items())


@pytest.mark.parametrize(("schedule", "policy", "layer"), [(*how, i % 2) for i, how in enumerate(POLICIES)])
def test_parameters_that_the_optimizer_does_not_choose_stay(
    toy: Any, tmp_path: Path, batches: Batches, schedule: str, policy: str, layer: int
) -> None:
    built = toy(microbatches=2, schedule="1f1b") if schedule != "async" else toy()
    pipeline = pipeline_of(
        built.save(tmp_path / "build"), of_layer(layer), Jumpy, schedule=schedule, policy=policy, clip_norm=0.5
    )
    pipeline.run(batches)
    trained, initial = pipeline.state_dict(), built.initial()
    chosen, other = f"layers.{layer}.weight", f"layers.{1 - layer}.weight"
    assert not trained[chosen].equal(initial[chosen])
    assert trained[other].equal(initial[other])
    assert (pipeline.executors[0].store.updater.lr is None) == (layer == 1)


def test_gradients_that_nothing_reads_are_freed(toy: Any, tmp_path: Path, batches: Batches) -> None:
    pipeline = pipeline_of(toy().save(tmp_path / "build"), of_layer(0))
    pipeline.run(batches)
    assert [p.grad for executor in pipeline.executors for p in executor.store.updater.parameters] == [None, None]


def test_a_failing_update_still_restores_the_random_state(toy: Any, tmp_path: Path, batches: Batches) -> None:
    class Tired(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ArithmeticError("enough")

    pipeline = pipeline_of(toy().save(tmp_path / "build"), lambda named: Tired([p for _, p in named], lr=0.1))
    seed_everything(4)
    expected = drawn()
    seed_everything(4)
    with pytest.raises(RunError, match="ArithmeticError: enough"):
        pipeline.run(batches)
    assert drawn() == expected
