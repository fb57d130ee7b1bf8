"""Replicas share each minibatch's microbatches: slow links, callbacks, and other replicas that go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from apart import compiled_file, launched

import fxpipe as fxp
from fxpipe.errors import RunError
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.start import run_local


def test_a_throttle_is_refused(tmp_path: Path) -> None:
    compiled_file(tmp_path, "1f1b", 1, 2, 1, outer=None)
    with pytest.raises(RunError, match="--throttle slows messages down, but not the sums over replicas"):
        launched(RunOptions(str(tmp_path / "build"), throttle="160kbit,10ms", out=str(tmp_path / "out")))


def test_a_run_says_what_its_sums_have_sent(tmp_path: Path) -> None:
    """2 (R - 1)/R of the gradients leave each process."""
    compiled_file(tmp_path, "1f1b", 1, 2, 1, outer=None)
    common = {"build": str(tmp_path / "build"), "steps": 6, "progress": False}
    found, local = launched(RunOptions(**common, out=str(tmp_path / "out"))), run_local(RunOptions(**common))
    assert found["losses"] == local["losses"]
    size = sum(bucket.bytes for bucket in fxp.load(tmp_path / "build").plan.stages[0].buckets)
    for row in (*found["workers"], *found["replicas"]):
        sent = {what: count / 6 for what, count in row["sent"].items()}
        assert sum(count for what, count in sent.items() if what.startswith("bucket")) == size
        assert sent["loss"] == 4
    assert all(row["sent"] == {} for row in (*local["workers"], *local["replicas"]))


@pytest.mark.parametrize(("before", "after"), [((2, 1), (1, 2)), ((2, 1), (3, 1))])
def test_a_run_goes_on_with_other_replicas(tmp_path: Path, before: tuple[int, int], after: tuple[int, int]) -> None:
    for name, (dp, own) in (("before", before), ("after", after)):
        compiled_file(tmp_path / name, "1f1b", 2, dp, own, outer=None)
    before_build, after_build = (str(tmp_path / name / "build") for name in ("before", "after"))
    whole = run_local(RunOptions(before_build, steps=6, out=str(tmp_path / "whole"), progress=False))
    first = RunOptions(before_build, steps=3, checkpoint_every="3", out=str(tmp_path / "a"), progress=False)
    run_local(first)
    step = str(tmp_path / "a" / "checkpoints" / "step-3")
    later = RunOptions(after_build, steps=6, resume=step, out=str(tmp_path / "b"), progress=False)
    found = run_local(later)["losses"]
    if before[0] * before[1] == after[0] * after[1]:
        assert found == whole["losses"]  # each microbatch is as it was
    else:
        assert found[3:] == pytest.approx(whole["losses"][3:], rel=0.15)


@pytest.mark.slow
@pytest.mark.multiproc
def test_what_callbacks_decide_holds_for_every_replica(tmp_path: Path) -> None:
    """Rates that change from step to step, and a metric that a scheduler waits for: replicas stay equal."""
    more = """
def on_step(step, loss, run):
    run.set_lr(0.01 / step)

def on_eval(step, measured, run):
    run.set_lr(0.002)
"""
    compiled_file(tmp_path, "1f1b", 2, 2, 1, more, outer=None)
    common = {"build": str(tmp_path / "build"), "steps": 6, "eval_every": 2, "progress": False}
    local = run_local(RunOptions(**common, out=str(tmp_path / "local")))
    apart = launched(RunOptions(**common, out=str(tmp_path / "apart")))
    assert apart["losses"] == local["losses"]
    weights = [(tmp_path / where / "model.safetensors").read_bytes() for where in ("local", "apart")]
    assert weights[0] == weights[1]
    compiled_file(tmp_path / "one", "1f1b", 2, 1, 2, more, outer=None)
    one = run_local(RunOptions(**{**common, "build": str(tmp_path / "one" / "build")}, out=str(tmp_path / "alone")))
    assert one["losses"] == local["losses"]


def test_replicas_that_read_other_batches_are_told(tmp_path: Path) -> None:
    """A data set that follows the process, and not the run's seed, would train on other minibatches without a word."""
    compiled_file(tmp_path, "1f1b", 1, 2, 1, "OWN_DATA = True\n", outer=None)
    with pytest.raises(RunError, match="replicas of worker 0 read different batches in step 1: replica 1 unlike"):
        launched(RunOptions(str(tmp_path / "build"), steps=3, out=str(tmp_path / "out"), progress=False))
