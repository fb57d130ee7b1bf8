"""No worker runs ahead of its neighbours, whatever it has to do."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cached import captured, lowered
from covering import covering
from greenlet import greenlet
from random_cuts import numbered, random_cuts
from torch import Tensor, nn

import fxpipe
from fxpipe.builds.build import Build
from fxpipe.observe.watch import Watch
from fxpipe.planner.cuts import Cuts
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process import world
from fxpipe.runtime.process.start import run_local
from fxpipe.runtime.wires.one_process import Turns
from fxpipe.runtime.worker.executor import Executor
from fxpipe.task.hooks import Hooks
from fxpipe.task.model_file import Task


def optimizer(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.01, momentum=0.9)


class HalfFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()).requires_grad_(False)
        self.trained = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.trained(self.frozen(x))


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def half_frozen(schedule: str, microbatches: int) -> tuple[nn.Module, Build]:
    torch.manual_seed(0)
    model = HalfFrozen()
    return model, fxpipe.compile(
        model, square, torch.randn(8, 6), workers=3, microbatches=microbatches, schedule=schedule, cost="analytic",
        forward_at=["frozen.2", "trained"],
    )  # fmt: skip


def nothing_in_the_middle() -> Build:
    count = len(numbered("function").units)
    return lowered("function", workers=3, cuts=Cuts((0, 5, 5, count), (0, 5, 5, count)))


BUILDS = {
    "half frozen": lambda: half_frozen("async", 1)[1],
    "nothing in the middle": nothing_in_the_middle,
    "everything on the first": lambda: lowered("function", workers=3, cuts=Cuts((0, 15, 15, 15), (0, 15, 15, 15))),
    "everything on the last": lambda: lowered("function", workers=3, cuts=Cuts((0, 0, 0, 15), (0, 0, 0, 15))),
    "backward the other way": lambda: lowered("function", workers=3, cuts=Cuts((0, 15, 15, 15), (0, 0, 0, 15))),
    **{f"random {s}": lambda s=s: lowered("unet", workers=4, cuts=random_cuts("unet", 4, s)) for s in range(1)},
}


class Unfair(Turns):
    """One worker acts whenever it can; or, without one, they act in a random order."""

    greedy: int | None = None

    def begin(self, rows: Sequence[Callable[[], None]]) -> None:
        super().begin(rows)
        self.all, self.chance = list(self._rows), random.Random(0)

    def _go(self, row: greenlet) -> bool:
        rows = self.chance.sample(self._rows, len(self._rows))
        first = [] if self.greedy is None else [self.all[self.greedy]]
        return any(map(super()._go, [*first, *rows]))


@pytest.mark.parametrize(("name", "greedy"), covering(BUILDS, [None, 0, 1, 2], strength=1))
def test_no_worker_runs_ahead_however_eager_it_is(
    name: str, greedy: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts of forwards and backwards keep to the pipeline's order."""
    build, steps = BUILDS[name](), 6
    workers, found = build.plan.workers, dict[int, Executor]()
    execute = Executor.execute

    def checked(self: Executor, *given: Any) -> Any:
        done, found[self.worker] = execute(self, *given), self
        watches = [found[worker].watch if worker in found else Watch() for worker in range(workers)]
        forwards, backwards = ([watch.count(kind) for watch in watches] for kind in ("F", "B"))
        assert forwards == sorted(forwards, reverse=True)
        assert backwards == sorted(backwards)
        assert all(f - b <= workers - k for k, (f, b) in enumerate(zip(forwards, backwards, strict=True)))
        return done

    monkeypatch.setattr(Executor, "execute", checked)
    monkeypatch.setattr(Unfair, "greedy", greedy)
    monkeypatch.setattr(world, "Turns", Unfair)
    task = Task(Hooks(optimizer=optimizer, train_data=lambda: data_of(name, steps)))
    build.save(tmp_path / "build")
    run_local(RunOptions(str(tmp_path / "build"), steps=steps, threads=1), task)
    assert found[0].watch.count("B") == steps * build.plan.microbatches


def data_of(name: str, count: int) -> list[Any]:
    if name == "half frozen":
        return [torch.randn(8, 6) for _ in range(count)]
    return captured("unet" if "random" in name else "function")[0].batches(count)
