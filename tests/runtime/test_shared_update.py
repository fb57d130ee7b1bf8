"""Replicas share out a worker's parameters: each updates its own, with the bits of replicas that update all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cached import captured, cuts
from pipelines import pipeline_of
from small_models import CASES
from torch import Tensor

import fxpipe as fxp
from fxpipe.errors import CutError, FxpipeError, PolicyError, RunError
from fxpipe.planner.links import Links
from fxpipe.policy.recipe import choose
from fxpipe.simulator.memory import memory_of
from fxpipe.simulator.of_build import exposed_sums
from fxpipe.task.hooks import MakeOptimizer


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=1e-3, momentum=0.9)


def adamw(named: Any) -> torch.optim.Optimizer:
    """With two groups, of which a replica may have one alone."""
    wide = [p for _, p in named if p.dim() > 1]
    flat = [p for _, p in named if p.dim() < 2]
    return torch.optim.AdamW([{"params": wide, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}], lr=1e-3)


def built(case: str, dp: int, shard: Any, workers: int = 2, schedule: str = "1f1b", **more: Any) -> fxp.Build:
    program = captured(case, dp, size=12)[2]
    at = cuts(CASES[case], workers, 1) if workers > 1 else {}
    options = {"workers": workers, "dp": dp, "microbatches": 1, "schedule": schedule, "cost": "analytic", **at, **more}
    return fxp.lower(program, shard=shard, **options)


def trained(build: fxp.Build, folder: Path, data: list[Any], optimizer: MakeOptimizer, **options: Any) -> Any:
    build.save(folder)
    pipeline = pipeline_of(folder, optimizer, **options)
    losses = pipeline.run(data)
    return losses, pipeline.state_dict(), pipeline


def _held(executor: Any) -> dict[str, int]:
    """Bytes of the optimizer's state by parameter, but for what counts its steps."""
    optimizer, found = executor.store.updater.optimizer, {}
    for name, parameter in executor.store.trained.items():
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        tensors = [v for v in state.values() if isinstance(v, Tensor) and v.numel() == parameter.numel() and v.dim()]
        if tensors:
            found[name] = sum(v.nbytes for v in tensors)
    return found


@pytest.mark.parametrize(("dp", "optimizer"), [(2, sgd), (3, adamw)])
def test_what_replicas_hold_is_what_was_foretold(tmp_path: Path, dp: int, optimizer: MakeOptimizer) -> None:
    builds = [built("gpt", dp, shard, 2, optimizer=optimizer) for shard in (None, "optimizer")]
    _, _, pipeline = trained(builds[1], tmp_path / "shares", CASES["gpt"].batches(1, 12), optimizer)
    plan = builds[1].plan
    for worker in range(2):
        held = [sum(_held(executor).values()) for executor in pipeline.every if executor.worker == worker]
        shares = [sum(p.tensor.bytes for p in plan.updated(worker, replica)) for replica in range(dp)]
        predicted = [builds[1].costs.optimizer_bytes * share for share in shares]
        assert held == pytest.approx(predicted, rel=0.05)
        all_of_it = sum(p.tensor.bytes for p in plan.owned(worker) if p.trained)
        assert max(shares) < 0.75 * all_of_it
        before = [_at_rest(build, worker) for build in builds]
        spared = builds[1].costs.optimizer_bytes * (all_of_it - max(shares))
        assert before[0] - before[1] == pytest.approx(spared, rel=1e-6)
        assert builds[1].costs.workers[worker].memory_bytes < builds[0].costs.workers[worker].memory_bytes


def _at_rest(build: fxp.Build, worker: int) -> float:
    """The forecast of what a worker holds before its first action."""
    recipe = choose(build.plan)
    row = list(recipe.schedule.until(worker, 1))
    return memory_of(build.plan, build.costs, recipe.demand, worker, row)[0].before


def test_the_weights_handed_out_are_charged() -> None:
    whole, shares = (built("gpt", 2, shard).plan for shard in (None, "optimizer"))
    links = Links(1e6, 0.0)
    hidden = exposed_sums(whole, 0, links, 1e9)[0], exposed_sums(shares, 0, links, 1e9)[0]
    every = sum(bucket.bytes for bucket in shares.stages[0].buckets)
    assert hidden[1] - hidden[0] > 0.9 * every / 2 / 1e6 - 1e-6 * shares.stages[0].buckets[-1].bytes
    open_ = exposed_sums(whole, 0, links, 0.0)[0], exposed_sums(shares, 0, links, 0.0)[0]
    assert open_[1] == pytest.approx(open_[0], rel=0.5)
    assert open_[1] >= open_[0]


@pytest.mark.parametrize(
    ("before", "after"),
    [(("optimizer", 3), ("optimizer", 2)), (("optimizer", 2), (None, 2)), ((None, 2), ("optimizer", 2))],
)
def test_a_run_goes_on_with_other_shares(tmp_path: Path, before: Any, after: Any) -> None:
    """The state of every parameter is found, whoever wrote it: the next update is that of an unbroken run."""
    data = CASES["dict"].batches(4, 12)
    first, later = (
        fxp.lower(
            captured("dict", 6, size=12)[2],
            **{"workers": 2, "dp": dp, "microbatches": 6 // dp, "schedule": "1f1b", "cost": "analytic", "shard": shard},
            **cuts(CASES["dict"], 2, 1),
        )
        for shard, dp in (before, after)
    )
    first.save(tmp_path / "first")
    later.save(tmp_path / "later")
    pipeline = pipeline_of(tmp_path / "first", adamw, clip_norm=0.1)
    pipeline.run(data[:2])
    pipeline.save(tmp_path / "saved")
    losses = [float(pipeline.step(batch)) for batch in data[2:]]
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert ("optimizer-00001-of-00002-replica-1.safetensors" in names) == (before[0] is not None)
    other = pipeline_of(tmp_path / "later", adamw, clip_norm=0.1)
    other.load(tmp_path / "saved")
    found = [float(other.step(batch)) for batch in data[2:]]
    states = [_of_all(each) for each in (pipeline, other)]
    assert states[0].keys() == states[1].keys()
    if before[1] == after[1]:
        assert found == losses
        assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    else:
        assert found == pytest.approx(losses, rel=1e-4)
        for name, value in states[0].items():
            torch.testing.assert_close(states[1][name], value, rtol=1e-3, atol=1e-6)


def _of_all(pipeline: Any) -> dict[str, Tensor]:
    """The optimizers' state of every parameter, from whichever replica has it; and how many steps were made."""
    found = {}
    for executor in pipeline.every:
        optimizer = executor.store.updater.optimizer
        for name, parameter in executor.store.trained.items():
            for kind, value in ({} if optimizer is None else optimizer.state.get(parameter, {})).items():
                found[f"{name} {kind}"] = value
    return found


def test_what_needs_the_whole_optimizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CutError, match=r"among a worker.s replicas, but each has one"):
        built("dict", 1, "optimizer")
    with pytest.raises(FxpipeError, match="shard='weights' is not one of optimizer"):
        built("dict", 2, "weights")
    with pytest.raises(CutError, match="--shard optimizer and --autocast fp16"):
        built("dict", 2, "optimizer", autocast="fp16")
    for policy in ("spectrain", "latest+ef"):
        with pytest.raises(PolicyError, match="with --shard optimizer each has only its own share"):
            built("dict", 2, "optimizer", schedule="async", policy=policy)
    built("dict", 2, "optimizer", schedule="async", policy="latest").save(tmp_path / "build")
    with pytest.raises(PolicyError, match="predicts weights"):
        pipeline_of(tmp_path / "build", sgd, policy="spectrain")
    with pytest.raises(RunError, match="the staleness log follows"):
        pipeline_of(tmp_path / "build", sgd, log_staleness=True)


class ByNorm(torch.optim.SGD):
    """Looks at all of its parameters at once."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1e-3)
        return super().step(closure)


def test_an_optimizer_that_looks_at_all_parameters_is_refused_on_one_worker() -> None:
    """The whole worker's optimizer would do; that of a share does not."""

    def by_norm(named: Any) -> torch.optim.Optimizer:
        return ByNorm([p for _, p in named], lr=1e-3)

    built("dict", 2, None, 1, optimizer=by_norm)
    with pytest.raises(FxpipeError, match="replica r of worker w is 2 w"):
        built("dict", 2, "optimizer", 1, optimizer=by_norm)
