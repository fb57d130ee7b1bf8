"""Checkpoints of replicas that train apart: what they hold, and who goes on from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from apart import compiled_file
from safetensors.torch import load_file
from torch import Tensor

import fxpipe as fxp
from fxpipe.plan.mesh import OuterSpec
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.start import run_local
from fxpipe.runtime.wires.collective import LocalCollective, ReplicaBoard
from fxpipe.runtime.wires.one_process import Turns
from fxpipe.runtime.worker.outer_step import OuterStep
from fxpipe.task.model_file import load_task

STEPS = 6


def options(folder: Path, out: str, **more: Any) -> RunOptions:
    given = {"steps": STEPS, "checkpoint_every": "1", "keep": 99, "progress": False, **more}
    return RunOptions(str(folder / "build"), out=str(folder / out), **given)


def step_of(folder: Path, out: str, step: int) -> Path:
    return folder / out / "checkpoints" / f"step-{step}"


def files(folder: Path) -> dict[str, bytes]:
    """All but the manifest, which says how a run was asked for."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "checkpoint.json"}


def check_alike(folder: Path, one: str, other: str, since: int) -> None:
    """Two runs have the same checkpoints, byte for byte, and end with the same weights."""
    for step in range(since + 1, STEPS + 1):
        found = [files(step_of(folder, out, step)) for out in (one, other)]
        assert found[0].keys() == found[1].keys()
        assert [name for name, data in found[0].items() if data != found[1][name]] == []
    weights = [(folder / out / "model.safetensors").read_bytes() for out in (one, other)]
    assert weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.parametrize(("delay", "codec"), [(0, "none"), (1, "none"), (0, "outer=int8"), (1, "outer=sparseloco:4")])
def test_a_run_that_ended_can_be_made_longer(tmp_path: Path, delay: int, codec: str) -> None:
    """The last checkpoint is cut before the outer step that ends a run; going on for no step makes just that."""
    compiled_file(tmp_path, "async", 2, 3, 1, outer_every=2, outer_delay=delay, codec=codec)
    run_local(options(tmp_path, "whole"))
    run_local(options(tmp_path, "short", steps=5))
    step = str(step_of(tmp_path, "short", 5))
    run_local(options(tmp_path, "longer", resume=step))
    check_alike(tmp_path, "whole", "longer", 5)
    run_local(options(tmp_path, "ended", resume=step, steps=5))
    ends = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("short", "ended")]
    assert ends[0] == ends[1]


@pytest.mark.slow
def test_a_checkpoint_has_what_each_replica_left_out(tmp_path: Path) -> None:
    """In float32, of each parameter, as of the last outer step that was made."""
    compiled_file(tmp_path, "1f1b", 2, 2, 1, outer_every=2, outer_delay=1, codec="outer=sparseloco:4")
    run_local(options(tmp_path, "whole"))
    found = [
        {name: value for name, value in _state(step_of(tmp_path, "whole", step), 0, replica).items() if "left" in name}
        for step in (3, 4, 5)
        for replica in (0, 1)
    ]
    assert found[0] == found[1] == {}, "the first exchange is under way"
    assert set(found[2]) == {f"outer.memories.{name}.left_out" for name in ("a.weight", "b.weight")}
    for name, value in found[2].items():
        assert value.dtype == torch.float32
        assert torch.equal(value, found[4][name])
        assert not torch.equal(value, found[3][name])


def test_a_checkpoints_model_is_the_common_weights(tmp_path: Path) -> None:
    """Between outer steps, those of the last one, whatever replicas have made of them."""
    compiled_file(tmp_path, "1f1b", 2, 2, 1, outer_every=2)
    run_local(options(tmp_path, "whole"))
    run_local(options(tmp_path, "short", steps=2))
    found = [_model(step_of(tmp_path, "whole", step)) for step in (2, 3, 4)]
    trained = [name for name in found[0] if "running" not in name and "tracked" not in name]
    ended = load_file(tmp_path / "short" / "model.safetensors")
    assert trained
    for name in trained:
        assert torch.equal(found[0][name], ended[name])
        assert torch.equal(found[0][name], found[1][name])
    assert any(not torch.equal(found[1][name], found[2][name]) for name in trained)
    own = [_own(step_of(tmp_path, "whole", 3), 0, replica) for replica in (0, 1)]
    assert not torch.equal(own[0], own[1])
    assert not any(name.startswith("outer.weights") for name in _state(step_of(tmp_path, "whole", 4), 0, 1))


def _model(step: Path) -> dict[str, Tensor]:
    return {name: value for path in step.glob("model-*.safetensors") for name, value in load_file(path).items()}


def _state(step: Path, worker: int, replica: int) -> dict[str, Tensor]:
    of = f"-replica-{replica}" if replica else ""
    return load_file(step / f"optimizer-{worker + 1:05d}-of-00002{of}.safetensors")


def _own(step: Path, worker: int, replica: int) -> Tensor:
    return _state(step, worker, replica)["outer.weights.torch.float32"]


@pytest.mark.parametrize(
    ("workers", "dp", "outer"),
    [(2, 1, {"outer": None}), (1, 3, {"outer_every": 2})],
)
def test_another_build_goes_on_with_what_replicas_have_in_common(
    tmp_path: Path, workers: int, dp: int, outer: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights, and the first one's optimizer."""
    compiled_file(tmp_path, "1f1b", 2, 2, 1, outer_every=2)
    run_local(options(tmp_path, "whole"))
    step = step_of(tmp_path, "whole", 3)
    other = tmp_path / "other"
    compiled_file(other, "1f1b", workers, dp, 1, **outer)
    capsys.readouterr()
    run_local(options(other, "run", resume=str(step), steps=4))
    assert "with the common weights of replicas that trained separately" in capsys.readouterr().err
    pipeline = fxp.load(other / "build").local(optimizer=load_task(other / "model.py").optimizer)
    pipeline.load(step)
    for name, value in _model(step).items():
        if "running" not in name:
            assert torch.equal(pipeline.state_dict()[name], value)
    first = {name: value for worker in (0, 1) for name, value in _state(step, worker, 0).items()}
    found = 0
    for executor in pipeline.every:
        assert executor.store.updater.optimizer is not None
        for name, parameter in executor.store.trained.items():
            moment = executor.store.updater.optimizer.state[parameter]["exp_avg"]
            (saved,) = [v for key, v in first.items() if name in key and key.endswith("exp_avg")]
            assert torch.equal(moment, saved)
            found += 1
    assert found == 8 * dp


def test_a_run_of_gradients_added_up_goes_on_apart(tmp_path: Path) -> None:
    joint = tmp_path / "joint"
    compiled_file(joint, "1f1b", 2, 2, 1, outer=None)
    compiled_file(tmp_path, "1f1b", 2, 2, 1, outer_every=2)
    run_local(options(joint, "run", steps=3))
    run = run_local(options(tmp_path, "run", resume=str(step_of(joint, "run", 3))))
    assert len(run["losses"]) == STEPS
    assert "optimizer-00001-of-00002-replica-1.safetensors" in files(step_of(tmp_path, "run", 4))


def test_entries_wait_for_the_last_replica() -> None:
    """One that is behind by a round of outer steps finds what was decided before."""
    for delay, made in ((0, [0, 0, 0, 3, 3, 3, 6]), (1, [-3, -3, -3, 0, 0, 0, 3])):
        outer = OuterStep(OuterSpec(3, 0.7, 0.9, delay), {}, LocalCollective(ReplicaBoard(2, Turns()), 0))
        assert [outer.made_by_all(version) for version in range(7)] == made
