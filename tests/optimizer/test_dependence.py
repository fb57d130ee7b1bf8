"""What an optimizer would do with other values is found out, whatever it has done with those of the trial."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cached import lowered
from deciding_optimizers import ALONE, LOGGING, TOGETHER, Decides, SkipsLargeNorms, SkipsNotFinite, global_norm
from torch import Tensor

from fxpipe.errors import TaskError
from fxpipe.optimizer import per_worker
from fxpipe.optimizer.per_worker import check_per_worker
from fxpipe.plan.spec import Plan

Named = list[tuple[str, torch.nn.Parameter]]


@functools.cache
def plan() -> Plan:
    return lowered("gpt", workers=3).plan


def over(kind: type[Decides]) -> Callable[[Named], Decides]:
    return lambda named: kind([p for _, p in named])


@pytest.mark.parametrize("kind", TOGETHER)
def test_what_decides_by_all_parameters_is_refused(kind: type[Decides], monkeypatch: pytest.MonkeyPatch) -> None:
    said = rf"{kind.__name__} trains otherwise with one for each worker, over its own parameters"
    with pytest.raises(TaskError, match=said):
        check_per_worker(plan(), over(kind))
    accepted = check_per_worker(plan(), over(kind), accepted=True)
    assert accepted is not None
    assert accepted.endswith("this was accepted")
    # In the trial itself nothing differs: it is the dependence that is found.
    monkeypatch.setattr(per_worker, "find_dependence", lambda *_: None)
    assert check_per_worker(plan(), over(kind)) is None


@pytest.mark.parametrize("kind", ALONE)
def test_what_decides_by_each_parameter_alone_passes(kind: type[Decides]) -> None:
    assert check_per_worker(plan(), over(kind)) is None


@pytest.mark.parametrize("kind", LOGGING)
def test_what_may_be_used_later_is_in_doubt(kind: type[Decides]) -> None:
    found = check_per_worker(plan(), over(kind))
    assert found is not None
    assert re.search(rf"{kind.__name__} may train otherwise .*deciding_optimizers.py:\d+, `self.last =", found) or (
        kind.__name__ == "KeepsTheNorm" and "`return torch.stack([g.norm() for g in gradients]).norm()`" in found
    )
    assert found.endswith("in 36 steps no weight has changed by it, later ones may")


def test_the_line_that_decides_is_named() -> None:
    for kind, line in (
        (SkipsLargeNorms, "global_norm(self.gradients) < 150e4"),
        (SkipsNotFinite, "g.isfinite().all()"),
    ):
        with pytest.raises(TaskError) as caught:
            check_per_worker(plan(), over(kind))
        assert re.search(rf"deciding_optimizers.py:\d+, `return .*{re.escape(line)}", caught.value.what)
        assert "--clip-norm" in str(caught.value.hint)
        assert "--accept-optimizer-per-worker" in str(caught.value.hint)


def test_the_scheduler_is_followed_too() -> None:
    class Follows(torch.optim.lr_scheduler.LRScheduler):
        def get_lr(self) -> list[float]:
            gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"]]
            large = gradients[0] is not None and global_norm(gradients) > 1e12
            return [0.05 if large else 0.1 for _ in self.optimizer.param_groups]

    def make(named: Named) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named], lr=0.1)

    assert check_per_worker(plan(), make) is None
    with pytest.raises(TaskError, match=r"SGD trains otherwise .*0.05 if large else 0.1"):
        check_per_worker(plan(), make, Follows)


def test_a_parameter_that_few_would_ask_is_asked() -> None:
    """One of many, by its name, not among those with which many steps are played."""

    def make(named: Named) -> Decides:
        class AsksOne(Decides):
            asked = dict(named).get("blocks.1.mlp.0.weight")

            def goes(self) -> bool:
                return self.asked is None or bool(self.asked.grad.abs().max() < 1e9)

        return AsksOne([p for _, p in named])

    with pytest.raises(TaskError, match=r"AsksOne trains otherwise .*self.asked is None or bool"):
        check_per_worker(plan(), make)


def test_what_is_not_the_same_twice_is_in_doubt() -> None:
    made: list[Decides] = []

    class Counts(Decides):
        """The first seven optimizers of a process do otherwise than later ones."""

        def __init__(self, params: Any) -> None:
            super().__init__(params)
            made.append(self)
            self.much = 1.0 if len(made) <= 7 else 1.1

        def move(self, p: Tensor, grad: Any) -> None:
            super().move(p, grad * self.much)

    found = check_per_worker(plan(), over(Counts))
    assert found is not None
    assert found.startswith("Counts may train otherwise")
