"""A pipeline of all workers in one process: flushes, random state, reused batches, and errors with their lines."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines import pipeline_of, sgd

from fxpipe.errors import PolicyError, RunError

SHAPES = [
    {"forward": (0, 1), "backward": (0, 1)},
    {"forward": (0, 0, 1), "backward": (0, 1, 1)},  # layer 1: forward on 0, backward on 1
    {"forward": (0, 1, 1), "backward": (0, 0, 1)},  # the other way round
    {"forward": (0, 1, 2), "backward": (0, 1, 2), "tied": True},
    {"forward": (0, 0, 1, 2, 2), "backward": (0, 1, 1, 1, 2), "tied": True},
]
POLICIES = ["latest", "stash", "vertical", "spectrain", "pipeoptim", "pipeoptim+keep", "lwp"]


@pytest.mark.parametrize(("shape", "policy"), list(zip(itertools.cycle(SHAPES), POLICIES, strict=False)))
def test_after_a_flush_a_pipeline_is_as_new(
    toy: Any, batches: Any, tmp_path: Path, shape: dict[str, Any], policy: str
) -> None:
    """No value, no copy and no prediction is left over, and it goes on as one that only has its state."""
    folder = toy(**shape, policy=policy).save(tmp_path / "build")
    pipeline, fresh = pipeline_of(folder, sgd), pipeline_of(folder, sgd)
    pipeline.run(batches[:3])
    assert not pipeline.job.world.loopback.left
    for executor in pipeline.executors:
        assert not executor.saved._left
        assert not executor.store.versions.predictions.made
    pipeline.save(tmp_path / "saved")
    fresh.load(tmp_path / "saved")
    assert fresh.run(batches[3:]) == pipeline.run(batches[3:])
    state = pipeline.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in fresh.state_dict().items())


def test_dropout_depends_on_the_action_and_leaves_the_users_random_state(
    toy: Any, batches: Any, tmp_path: Path
) -> None:
    folder = toy(dropout=True).save(tmp_path / "build")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = pipeline_of(folder, sgd, seed=1).run(batches)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert pipeline_of(folder, sgd, seed=1).run(batches) == first
    assert pipeline_of(folder, sgd, seed=2).run(batches) != first


def test_state_in_flight_is_refused(toy: Any, batches: Any, tmp_path: Path) -> None:
    pipeline = pipeline_of(toy().save(tmp_path / "build"), sgd)
    pipeline.step(batches[0])
    with pytest.raises(RunError, match=r"in flight[\s\S]*flush"):
        pipeline.state_dict()
    with pytest.raises(RunError, match="1f1b"):
        pipeline.gradients()
    pipeline.flush()
    pipeline.flush()
    assert set(pipeline.state_dict()) == {"layers.0.weight", "layers.1.weight", "seen"}


def test_policies_are_checked_and_default_with_the_schedule(toy: Any, tmp_path: Path) -> None:
    folder = toy(policy="spectrain").save(tmp_path / "build")
    assert pipeline_of(folder, sgd).recipe.policy.name == "spectrain"
    assert pipeline_of(folder, sgd, schedule="gpipe").recipe.policy.name == "latest"
    with pytest.raises(PolicyError):
        pipeline_of(folder, sgd, schedule="gpipe", policy="stash")


def test_an_iterable_may_reuse_its_tensor(toy: Any, batches: Any, tmp_path: Path) -> None:
    folder = toy().save(tmp_path / "build")
    expected = pipeline_of(folder, sgd).run(batches)
    x, y = torch.empty_like(batches[0][0]), torch.empty_like(batches[0][1])
    pipeline = pipeline_of(folder, sgd)
    losses = [float(pipeline.step((x.copy_(a), y.copy_(b)))) for a, b in batches]
    assert losses == expected


def test_a_failing_line_is_named(toy: Any, batches: Any, tmp_path: Path) -> None:
    folder = toy(spoil={1: ("z = g1", "z = g1[:, :2]")}).save(tmp_path / "build")
    pipeline = pipeline_of(folder, sgd)
    assert [p.name for p in pipeline.edited] == ["stage_1.py"]
    with pytest.raises(RunError) as caught:
        pipeline.step(batches[0])
    text = str(caught.value)
    assert "backward of step 1 (B0) failed on worker 1: RuntimeError" in text
    number = 1 + (folder / "stage_1.py").read_text().splitlines().index("    z = g1[:, :2] * (1 - h1 ** 2)")
    assert f"{folder.resolve()}/stage_1.py:{number}: z = g1[:, :2] * (1 - h1 ** 2)" in text
    with pytest.raises(RunError, match="an earlier step failed"):
        pipeline.step(batches[0])


def test_a_wrong_shape_on_a_wire_is_named(toy: Any, batches: Any, tmp_path: Path) -> None:
    folder = toy(spoil={0: ("comm.send('h0_F0_F1', h0)", "comm.send('h0_F0_F1', h0[:1])")}).save(tmp_path / "build")
    with pytest.raises(RunError, match=r"h0_F0_F1 is torch.float64\[1, 6\], but the plan says"):
        pipeline_of(folder, sgd).step(batches[0])


def test_a_failing_optimizer_is_named(toy: Any, batches: Any, tmp_path: Path) -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise ValueError("no such step")

    folder = toy(schedule="1f1b").save(tmp_path / "build")
    pipeline = pipeline_of(folder, lambda named: Broken([p for _, p in named]))
    with pytest.raises(RunError, match=r"update after step 1 failed on worker 1: ValueError: no such step") as caught:
        pipeline.step(batches[0])
    assert str(caught.value.where).endswith(': raise ValueError("no such step")')
